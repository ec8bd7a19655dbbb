"""A live object walked beside a stored tree: what fits where, and every difference.

The walk touches nothing. It returns *fillings*: given a `Builder`, a filling puts its part of the snapshot into the
live object and returns what stands at that place afterwards: the same object where it could be filled in place, or a
new value that the parent container stores.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from casckpt.format.structure import (
    Mapping,
    Node,
    Opaque,
    Record,
    Rng,
    Sequence,
    Structure,
    children_of,
    join_path,
    keys_of,
)
from casckpt.state import rng
from casckpt.state.build import Builder
from casckpt.state.differences import Difference
from casckpt.state.inplace import LiveLeaf, describe_live, is_writable, shown
from casckpt.state.optimizers import group_differences, is_optimizer
from casckpt.state.scalar_places import ScalarPlace, is_scalar, put_scalar
from casckpt.state.walk import is_checkpointable, is_namedtuple, type_name

Fill = Callable[[Builder], Any]


class Filling(NamedTuple):
    """What to do at one place; `is_in_place` when the live object itself takes the value."""

    fill: Fill
    is_in_place: bool = True


class Fit:
    """The walk. Afterwards all attributes are complete.

    Attributes:
        differences: all that the structure tells.
        scalar_places: live places of scalars, to be compared once the scalars are known.
        entries: live tensors and arrays that take a leaf in place.
        staged: leaves that are needed as values.
        new_leaves: those of them that become new values in plain containers, each with its first path.
        checks: what can only be compared once the scalars are known; each raises MismatchError.
        last: fillings of generators and of objects with `restore_last`, to run after all others.
        skipped_scalars: those that have no place in the live object.
    """

    def __init__(
        self, structure: Structure, copy: Callable[[LiveLeaf], None], *, strict: bool, cast: bool, first_scalar: int = 0
    ) -> None:
        self._structure = structure
        self._copy = copy  # copies an entry, if its block is not direct
        self._strict = strict
        self._cast = cast
        self._scalar = first_scalar
        self.differences: list[Difference] = []
        self.scalar_places: list[ScalarPlace] = []
        self.entries: list[LiveLeaf] = []
        self.staged: set[int] = set()
        self.new_leaves: dict[int, str] = {}
        self.checks: list[Fill] = []
        self.last: list[Fill] = []
        self.skipped_scalars: set[int] = set()

    def fit(self, live: Any, node: Node, path: str) -> Filling:
        """The filling of one place."""
        if callable(getattr(live, "load_state_dict", None)) and is_checkpointable(live):
            return self._checkpointable(live, node, path)
        if node is None:
            return self._scalar_place(live, path)
        if live is None or isinstance(node, Opaque):
            return self._value(node, path)
        if isinstance(node, int):
            return self._leaf(live, node, path)
        if isinstance(node, Rng):
            return self._generator(live, node, path)
        return self._container(live, node, path)

    def differ(self, path: str, expected: str, found: str, accepted_by: str = "") -> Filling:
        self.differences.append(Difference(path, expected, found, accepted_by))
        return Filling(lambda builder: None)

    def _value(self, node: Node, path: str) -> Filling:
        """A place that takes the stored value as a new object; a leaf that goes into a live one too is that one."""
        at, leaves = self._scalar, set[int]()
        self._scalar += _count(node, leaves)
        self.staged |= leaves
        for leaf in leaves:
            self.new_leaves.setdefault(leaf, path)
        return Filling(lambda builder: builder.build_new(node, at), is_in_place=False)

    def _stage(self, node: Node) -> int:
        """Ask for all leaves under a node as values; its first scalar."""
        first = self._scalar
        self._scalar += _count(node, self.staged)
        return first

    def _skip(self, node: Node) -> None:
        """Leave a stored subtree out."""
        count = _count(node, set())
        self.skipped_scalars.update(range(self._scalar, self._scalar + count))
        self._scalar += count

    # --- scalars and leaves ---

    def _scalar_place(self, live: Any, path: str) -> Filling:
        position = self._scalar
        self._scalar += 1
        may_empty = type(live) in (list, deque) and not is_scalar(live) and not _holds_objects(live)
        self.scalar_places.append(ScalarPlace(position, live, path, may_empty))
        return Filling(lambda builder: put_scalar(live, builder.values[position]), is_in_place=False)

    def _leaf(self, live: Any, index: int, path: str, *, is_replaceable: bool = True) -> Filling:
        """A leaf in its live memory; in a plain container, one of another shape may become a new value."""
        leaf = self._structure.leaves[index]
        if leaf.kind == "bytes":
            if type(live) is bytes:
                return self._value(index, path)
            return self.differ(path, "bytes", f"a {type_name(live)}")
        extent = describe_live(live, leaf.kind)
        if extent is None:
            return self.differ(path, shown(leaf), f"a {type_name(live)}")
        _, dtype, shape, strides, _ = extent[0]
        if tuple(shape) != leaf.shape:
            if is_replaceable and not self._strict:
                return self._value(index, path)
            return self.differ(path, shown(leaf), f"{dtype}{list(shape)}", "strict=False" if is_replaceable else "")
        if dtype != leaf.dtype and not self._cast:
            return self.differ(path, shown(leaf), f"{dtype}{list(shape)}", "cast=True")
        if not is_writable(live, leaf, strides):
            return self.differ(path, "memory that can be written", "a read-only or expanded view")
        entry = LiveLeaf(index, live, extent, path)
        self.entries.append(entry)

        def fill(builder: Builder) -> Any:
            self._copy(entry)
            return live

        return Filling(fill)

    # --- containers ---

    def _container(self, live: Any, node: Mapping | Sequence | Record, path: str) -> Filling:
        kind = "namedtuple" if isinstance(node, Record) else node.kind.partition(":")[0]
        if isinstance(node, Mapping):
            return (
                self._mapping(live, node, path) if isinstance(live, dict) else self._differ_kind(live, node, path, kind)
            )
        if isinstance(node, Record):
            if not is_namedtuple(live) or list(type(live)._fields) != node.fields:
                return self._differ_kind(live, node, path, f"a namedtuple of {', '.join(node.fields)}")
        elif type(live).__name__ != kind:
            return self._differ_kind(live, node, path, kind)
        elif not isinstance(live, tuple) and _is_history(live, node):
            return self._history(live, node, path)
        if len(live) != len(node.children):
            return self._differ_kind(live, node, path, f"{len(node.children)} items", f"{len(live)} items")
        fillings = [
            self.fit(item, child, join_path(path, key))
            for item, (key, child) in zip(live, children_of(node), strict=True)
        ]
        if isinstance(live, tuple):
            return _tuple_filling(live, fillings)
        return Filling(lambda builder: _fill_items(live, fillings, builder))

    def _history(self, live: Any, node: Sequence, path: str) -> Filling:
        """A list or deque that takes the snapshot's length: elements that fit are filled, others are new values."""
        if isinstance(live, deque) and live.maxlen != node.maxlen:
            return self._value(node, path)
        fillings = []
        for position, child in enumerate(node.children):
            at = join_path(path, position)
            fillings.append(
                self._element(live[position], child, at) if position < len(live) else self._value(child, at)
            )

        def fill(builder: Builder) -> Any:
            values = [filling.fill(builder) for filling in fillings]
            live.clear()
            live.extend(values)
            return live

        return Filling(fill)

    def _element(self, live: Any, node: Node, path: str) -> Filling:
        if node is None:
            position = self._scalar
            self._scalar += 1
            return Filling(lambda builder: put_scalar(live, builder.values[position]), is_in_place=False)
        trial = Fit(self._structure, self._copy, strict=self._strict, cast=self._cast, first_scalar=self._scalar)
        filling = trial.fit(live, node, path)
        if trial.differences:
            return self._value(node, path)
        self._scalar = trial._scalar
        self.scalar_places += trial.scalar_places
        self.entries += trial.entries
        self.staged |= trial.staged
        for leaf, at in trial.new_leaves.items():
            self.new_leaves.setdefault(leaf, at)
        self.checks += trial.checks
        self.last += trial.last
        return filling

    def _differ_kind(self, live: Any, node: Node, path: str, expected: str, found: str | None = None) -> Filling:
        self._skip(node)
        return self.differ(path, expected, found or f"a {type_name(live)}")

    def _mapping(self, live: dict[Any, Any], node: Mapping, path: str) -> Filling:
        keys = keys_of(node)
        fillings = []
        for key, child in zip(keys, node.children, strict=True):
            at = join_path(path, key)
            if key in live:
                fillings.append((key, self.fit(live[key], child, at)))
            elif self._strict:
                self._skip(child)
                self.differ(at, "a place for it", "nothing of this name", "strict=False")
            else:
                fillings.append((key, self._value(child, at)))
        if self._strict:
            for key in live.keys() - set(keys):
                self.differ(join_path(path, key), "nothing of this name", f"a {type_name(live[key])}", "strict=False")

        def fill(builder: Builder) -> Any:
            for key, filling in fillings:
                value = filling.fill(builder)
                if key not in live or value is not live[key]:
                    live[key] = value
            return live

        return Filling(fill)

    # --- objects with a state of their own ---

    def _generator(self, live: Any, node: Rng, path: str) -> Filling:
        if rng.kind_of(live) != node.kind:
            return self._differ_kind(live, node, path, f"a {node.kind} generator")
        at = self._stage(node)

        def check(builder: Builder) -> None:
            rng.check_fit(node.kind, live, builder.build(node.state, at), path)

        self.checks.append(check)
        self.last.append(lambda builder: rng.put(node.kind, live, builder.build(node.state, at)))
        return Filling(lambda builder: live)

    def _checkpointable(self, live: Any, node: Node, path: str) -> Filling:
        if is_module(live):
            filling = self._module(live, node, path)
        else:
            filling = self._loading(live, node, path)
        if getattr(live, "restore_last", False):
            self.last.append(filling.fill)
            return Filling(lambda builder: live)
        return filling

    def _loading(self, live: Any, node: Node, path: str) -> Filling:
        """An object that takes its whole state as a value."""
        at = self._stage(node)
        if not is_optimizer(live):
            return Filling(lambda builder: _load(live, builder.build(node, at)))
        from casckpt.state import _torch

        groups, groups_at = _child_of(node, at, "param_groups")
        differences = group_differences(live, groups, path)
        if differences:
            self.differences += differences
            return Filling(lambda builder: live)

        def check(builder: Builder) -> None:
            _torch.check_optimizer(live, builder.build(groups, groups_at), path)

        def fill(builder: Builder) -> Any:
            _torch.load_optimizer(live, builder.build(node, at))
            return live

        self.checks.append(check)
        return Filling(fill)

    def _module(self, live: Any, node: Node, path: str) -> Filling:
        """A module: its own tensors in place, the rest of its state through `load_state_dict`."""
        from casckpt.state import _torch

        state = live.state_dict()
        if node is None:
            return self._differ_kind(live, node, path, "a scalar")
        if not isinstance(node, Mapping) or not isinstance(state, dict):
            return self._loading(live, node, path)
        owned = _torch.storages_of(live)
        rest: list[tuple[Any, Node, int]] = []
        fillings = []
        for key, child in zip(keys_of(node), node.children, strict=True):
            is_own = key in state and _torch.is_in(state[key], owned)
            if is_own and isinstance(child, int):
                fillings.append(self._leaf(state[key], child, join_path(path, key), is_replaceable=False))
            elif is_own and (child is None or isinstance(child, Mapping | Sequence)):  # torch would refuse it half-way
                self._differ_kind(state[key], child, join_path(path, key), "a scalar" if child is None else "values")
            elif key in state:
                rest.append((key, child, self._stage(child)))
            else:
                self._skip(child)
                if self._strict:
                    self.differ(join_path(path, key), "a place for it", "nothing of this name", "strict=False")
        if self._strict:
            for key in state.keys() - set(keys_of(node)):
                self.differ(join_path(path, key), "nothing of this name", f"a {type_name(state[key])}", "strict=False")

        def fill(builder: Builder) -> Any:
            for filling in fillings:
                filling.fill(builder)
            if rest:
                live.load_state_dict({key: builder.build(child, at) for key, child, at in rest}, strict=False)
            return live

        return Filling(fill)


def is_module(live: Any) -> bool:
    """Whether a live object is a torch module that loads its state in torch's own way."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(live, torch.nn.Module) and _has_own(live, torch.nn.Module)


def _has_own(live: Any, base: type) -> bool:
    return type(live).load_state_dict is base.load_state_dict  # type: ignore[attr-defined]


def _load(live: Any, state: Any) -> Any:
    live.load_state_dict(state)
    return live


def _child_of(node: Node, first_scalar: int, wanted: str) -> tuple[Node, int]:
    """A mapping's child by key, with the index of its first scalar; an empty list where there is none."""
    if isinstance(node, Mapping):
        for key, child in zip(keys_of(node), node.children, strict=True):
            if key == wanted:
                return child, first_scalar
            first_scalar += _count(child, set())
    return Sequence("list", []), first_scalar


def _count(node: Node, leaves: set[int]) -> int:
    """How many scalars are under a node; adds its leaves to `leaves`."""
    if node is None:
        return 1
    if isinstance(node, int):
        leaves.add(node)
        return 0
    if isinstance(node, Opaque):
        leaves.add(node.leaf)
        return 0
    if isinstance(node, Rng):
        return _count(node.state, leaves)
    return sum(_count(child, leaves) for child in node.children)


def _is_history(live: Any, node: Sequence) -> bool:
    """Whether a live list or deque takes the snapshot's length.

    A list of the same length may be a row of places, and is compared as one. One that holds objects with a state or
    an identity of their own keeps its length, since a new value would not be such an object.
    """
    is_row = isinstance(live, list) and len(live) == len(node.children)
    return not is_row and not _holds_objects(live)


def _holds_objects(live: Any) -> bool:
    """Whether a Checkpointable, a generator or a module's parameter is somewhere in these plain containers."""
    torch = sys.modules.get("torch")
    left, seen = [live], set[int]()
    while left:
        value = left.pop()
        if is_checkpointable(value) or rng.kind_of(value) or (torch and isinstance(value, torch.nn.Parameter)):
            return True
        if isinstance(value, (dict, list, tuple, deque)) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value
    return False


def _fill_items(live: Any, fillings: list[Filling], builder: Builder) -> Any:
    for position, filling in enumerate(fillings):
        value = filling.fill(builder)
        if value is not live[position]:
            live[position] = value
    return live


def _tuple_filling(live: Any, fillings: list[Filling]) -> Filling:
    """A tuple stays the same object if all of its items do; else the parent stores a new one."""

    def fill(builder: Builder) -> Any:
        values = [filling.fill(builder) for filling in fillings]
        if all(value is item for value, item in zip(values, live, strict=True)):
            return live
        return type(live)(*values) if is_namedtuple(live) else tuple(values)

    return Filling(fill, is_in_place=all(filling.is_in_place for filling in fillings))
