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

from collections import deque
from typing import Any, NamedTuple

from casckpt.format.structure import Structure, leaf_places
from casckpt.state.build import Builder, LeafMemory, read_scalars, refuse_opaque
from casckpt.state.differences import Difference, mismatch
from casckpt.state.fit import Fit
from casckpt.state.inplace import LiveLeaf, copy_leaf, direct_blocks, find_sharing


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
        strict: names on one side only, other shapes and scalars of another family are differences. Without it, plain
            containers take what the snapshot has, and what only the live object has is left alone.
        cast: a leaf may have another dtype than the live one; `casts` then says what that changed.

    Attributes:
        differences: what the structure alone tells; empty if the restore can go on to `check`.
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
        self._strict = strict
        self._values: list[Any] | None = None
        self.casts: list[Cast] = []
        self.leaf_paths_touched: list[str] = []
        fit = Fit(structure, self._copy, strict=strict, cast=cast)
        self._filling = fit.fit(live, structure.tree, component)
        self.differences = fit.differences
        if not self._filling.is_in_place and not self._is_scalar_root():
            found = f"a {type(live).__name__}, which cannot change"
            self.differences.append(Difference(component, "something that can be restored in place", found))
        self._compare_sharing(fit, strict)
        self._fit = fit
        self._plan_memory(component)
        self.restore_last = bool(fit.last)

    def _is_scalar_root(self) -> bool:
        """Whether the whole component is one scalar that a live list, set or deque may take into itself."""
        return self._structure.tree is None and type(self._live) in (list, set, deque)

    def _compare_root(self, value: Any) -> list[Difference]:
        live = self._live
        if type(value) is type(live) and getattr(value, "maxlen", None) == getattr(live, "maxlen", None):
            return []
        return [Difference(self.component, f"a {type(value).__name__}", f"a {type(live).__name__} to restore into")]

    def _compare_sharing(self, fit: Fit, strict: bool) -> None:
        for one in find_sharing(self._structure, fit.entries):
            if one.is_stored and strict:
                found = Difference(one.path, f"memory shared with {one.other}", "memory of its own", "strict=False")
                self.differences.append(found)
            elif not one.is_stored:
                self.differences.append(Difference(one.path, "memory of its own", f"memory shared with {one.other}"))
        if strict:
            self._compare_new_values(fit)

    def _compare_new_values(self, fit: Fit) -> None:
        """A new value cannot share memory with a live one, unless it is the same leaf."""
        leaves = self._structure.leaves
        in_place = {entry.leaf for entry in fit.entries}
        path_of_block = {leaves[entry.leaf].block: entry.path for entry in fit.entries}
        for leaf, path in fit.new_leaves.items():
            other = path_of_block.get(leaves[leaf].block)
            if leaf not in in_place and leaves[leaf].block >= 0 and other is not None:
                found = Difference(path, f"memory shared with {other}", "a place for a new value", "strict=False")
                self.differences.append(found)

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
        values = read_scalars(self._structure, scalars)
        compared = [place.compare(values[place.position], self._strict) for place in self._fit.scalar_places]
        root = self._compare_root(values[0]) if self._is_scalar_root() else []
        differences = [*self.differences, *filter(None, compared), *root]
        if differences:
            raise mismatch(differences)
        if self._opaque and not allow_pickle:
            raise refuse_opaque(self._opaque)
        builder = Builder(self._memory, values)
        for check in self._fit.checks:
            check(builder)
        self._values = values

    def finish(self, scalars: bytes | memoryview, allow_pickle: bool = False) -> None:
        """Put everything in place; every block must have been filled. Generators come last.

        Raises:
            What `check` raises, before anything staged is copied; what the object's own `load_state_dict` raises.
        """
        if self._values is None:
            self.check(scalars, allow_pickle)
        live_leaves = {entry.leaf: entry.live for entry in self._fit.entries}
        builder = Builder(self._memory, self._values or [], live_leaves=live_leaves)
        self._note_direct()
        self._filling.fill(builder)
        for fill in self._fit.last:
            fill(builder)
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

    def _copy(self, entry: LiveLeaf) -> None:
        """Copy an entry, unless its block went straight into its memory."""
        if self._is_direct(entry.leaf):
            return
        leaf = self._structure.leaves[entry.leaf]
        change = copy_leaf(entry.live, self._memory.leaf(entry.leaf), leaf.kind)
        self.leaf_paths_touched.append(entry.path)
        dtype = entry.extent[0][1]
        if dtype != leaf.dtype:
            self.casts.append(Cast(entry.path, leaf.dtype, dtype, change))
