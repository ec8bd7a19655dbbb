"""Restore in place: a live object beside the stored structure of a component.

Constructing a `Target` walks both and collects `differences`; nothing is touched. Blocks that can stream straight into
live memory are offered as that memory, the others as fresh memory that `finish` copies from. The order is

    target = Target("policy", policy, structure)      # compares names, shapes, dtypes, sharing
    target.check(scalars)                             # compares what only the scalars tell; last chance to refuse
    for block, memory in target.blocks.items(): ...   # fill; from the first byte on, direct leaves are touched
    target.finish(scalars)

Memory beyond the live object: the staged blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from casckpt.errors import MismatchError
from casckpt.format.structure import Structure, leaf_places
from casckpt.state.build import Builder, LeafMemory, read_scalars, refuse_opaque
from casckpt.state.fit import Difference, Fit
from casckpt.state.inplace import copy_leaf, direct_blocks, find_sharing


class Cast(NamedTuple):
    """A leaf whose dtype was changed on the way into the live object, and by how much its values changed at most."""

    path: str
    stored_dtype: str
    live_dtype: str
    max_change: float


class Target:
    """One component to be restored into one live object.

    Args:
        component: the first part of its leaf paths.
        live: a Checkpointable, or a tree of dicts, lists, tensors, arrays and generators.
        structure: decoded, and its layout compared with the chunks that exist.
        strict: names on one side only are differences; without it they are left alone.
        cast: a leaf may have another dtype than the live one; `casts` then says what that changed.

    Attributes:
        differences: empty if the restore can go on.
        blocks: writable memory to fill, by block index.
        direct_paths: leaf paths that are touched while a block is filled, by block index.
        leaf_paths_touched: what `finish` has changed so far, in order; all of it when it returned.
        restore_last: whether this component should be finished after those without it.
    """

    def __init__(
        self, component: str, live: Any, structure: Structure, *, strict: bool = True, cast: bool = False
    ) -> None:
        self.component = component
        self._live = live
        self._structure = structure
        self._values: list[Any] | None = None
        self.casts: list[Cast] = []
        self.leaf_paths_touched: list[str] = []
        fit = Fit(structure, self._copy, strict=strict, cast=cast)
        self._filling = fit.fit(live, structure.tree, component)
        self.differences = fit.differences
        if not self._filling.is_in_place:
            found = f"a {type(live).__name__}, which cannot change"
            self.differences.append(Difference(component, "something that can be restored in place", found))
        self._compare_sharing(fit, strict)
        self._fit = fit
        self._plan_memory(component)
        self.restore_last = bool(fit.last)

    def _compare_sharing(self, fit: Fit, strict: bool) -> None:
        for one in find_sharing(self._structure, fit.entries):
            if one.is_stored and strict:
                self.differences.append(Difference(one.path, f"memory shared with {one.other}", "memory of its own"))
            elif not one.is_stored:
                self.differences.append(Difference(one.path, "memory of its own", f"memory shared with {one.other}"))

    def _plan_memory(self, component: str) -> None:
        fit, leaves = self._fit, self._structure.leaves
        direct = {} if self.differences else direct_blocks(self._structure, fit.entries, fit.staged)
        copied = {entry.leaf for entry in fit.entries if leaves[entry.leaf].block not in direct}
        wanted = set() if self.differences else copied | fit.staged
        self._memory = LeafMemory(self._structure, wanted)
        self.blocks: dict[int, memoryview] = {**self._memory.blocks, **direct}
        self.direct_paths: dict[int, list[str]] = {block: [] for block in direct}
        for entry in fit.entries:
            if leaves[entry.leaf].block in direct:
                self.direct_paths[leaves[entry.leaf].block].append(entry.path)
        places = leaf_places(self._structure, component)
        self._opaque = [place.path for place in places if place.is_opaque and place.leaf in fit.staged]

    def raise_differences(self) -> None:
        """Refuse what does not fit.

        Raises:
            MismatchError: there are differences; `differences` holds (path, expected, found) of each.
        """
        if self.differences:
            raise mismatch(self.differences)

    def check(self, scalars: bytes | memoryview, allow_pickle: bool = False) -> None:
        """Try everything that can fail and touches nothing, given the scalar block.

        Raises:
            MismatchError: differences of any kind.
            UnsupportedStateError: an opaque leaf without `allow_pickle`.
            CorruptionError: the scalar block is damaged.
        """
        self.raise_differences()
        if self._opaque and not allow_pickle:
            raise refuse_opaque(self._opaque)
        self._values = read_scalars(self._structure, scalars)
        builder = Builder(self._memory, self._values)
        for check in self._fit.checks:
            check(builder)

    def finish(self, scalars: bytes | memoryview, allow_pickle: bool = False) -> None:
        """Put everything in place; every block must have been filled. Generators come last.

        Raises:
            What `check` raises, before anything staged is copied; what the object's own `load_state_dict` raises.
        """
        if self._values is None:
            self.check(scalars, allow_pickle)
        builder = Builder(self._memory, self._values or [])
        self._note_direct()
        placed = self._filling.fill(builder)
        for fill in self._fit.last:
            fill(builder)
        if placed is not self._live:
            raise mismatch([Difference(self.component, f"a {type(placed).__name__}", f"a {type(self._live).__name__}")])
        self._note_values()

    def _note_values(self) -> None:
        """Everything that was not skipped has been touched by now."""
        done = dict.fromkeys(self.leaf_paths_touched)
        kept = {entry.leaf for entry in self._fit.entries} | self._fit.staged
        for place in leaf_places(self._structure, self.component):
            is_touched = place.leaf in kept if place.scalar is None else place.scalar not in self._fit.skipped_scalars
            if is_touched:
                done.setdefault(place.path)
        self.leaf_paths_touched = list(done)

    def _note_direct(self) -> None:
        written = [entry for entry in self._fit.entries if self._is_direct(entry.leaf)]
        tensors = [entry.live for entry in written if self._structure.leaves[entry.leaf].kind == "torch"]
        if tensors:
            from casckpt.state import _torch

            _torch.note_written(tensors)
        self.leaf_paths_touched += [entry.path for entry in written]

    def _is_direct(self, index: int) -> bool:
        return self._structure.leaves[index].block in self.direct_paths

    def _copy(self, number: int) -> None:
        """Copy entry `number`, unless its block went straight into its memory."""
        index, live, extent, path = self._fit.entries[number]
        if self._is_direct(index):
            return
        leaf = self._structure.leaves[index]
        change = copy_leaf(live, self._memory.leaf(index), leaf.kind)
        self.leaf_paths_touched.append(path)
        if extent[0][1] != leaf.dtype:
            self.casts.append(Cast(path, leaf.dtype, extent[0][1], change))


def mismatch(differences: list[Difference]) -> MismatchError:
    """One error for all differences, of one component or of several."""
    shown = "; ".join(map(str, differences[:8]))
    more = f"; and {len(differences) - 8} more" if len(differences) > 8 else ""
    return MismatchError(
        f"{len(differences)} differences between snapshot and live state: {shown}{more}. Nothing was touched. "
        "Pass strict=False to leave out names that exist on one side only, or restore() to get the values.",
        differences=[tuple(difference) for difference in differences],
        path=differences[0].path,
    )
