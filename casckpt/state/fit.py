"""A live object walked beside a stored tree: what fits where, and every difference.

The walk touches nothing. It returns *fillings*: given a `Builder`, a filling puts its part of the snapshot into the
live object and returns what stands at that place afterwards: the same object where it could be filled in place, or a
new value that the parent container stores.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from casckpt.format.structure import (
    Leaf,
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
from casckpt.state.inplace import LiveLeaf, describe_live
from casckpt.state.values import StoredEnum, to_foreign
from casckpt.state.walk import is_checkpointable, is_namedtuple, is_plain_sequence, type_name

Fill = Callable[[Builder], Any]


class Filling(NamedTuple):
    """What to do at one place; `is_in_place` when the live object itself takes the value."""

    fill: Fill
    is_in_place: bool = True


class Difference(NamedTuple):
    """Something that the snapshot and the live object do not agree on."""

    path: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, found {self.found}"


class Fit:
    """The walk. Afterwards `differences`, `entries`, `staged` and `checks` are complete.

    Attributes:
        entries: live tensors and arrays that take a leaf in place.
        staged: leaves that are needed as values.
        checks: what can only be compared once the scalars are known; each raises MismatchError.
        last: fillings of generators and of objects with `restore_last`, to run after all others.
        skipped_scalars: those that have no place in the live object.
    """

    def __init__(self, structure: Structure, copy: Callable[[int], None], *, strict: bool, cast: bool) -> None:
        self._structure = structure
        self._copy = copy  # copies entry n, if its block is not direct
        self._strict = strict
        self._cast = cast
        self._scalar = 0
        self.differences: list[Difference] = []
        self.entries: list[LiveLeaf] = []
        self.staged: set[int] = set()
        self.checks: list[Fill] = []
        self.last: list[Fill] = []
        self.skipped_scalars: set[int] = set()

    def fit(self, live: Any, node: Node, path: str) -> Filling:
        """The filling of one place."""
        if callable(getattr(live, "load_state_dict", None)) and is_checkpointable(live):
            return self._checkpointable(live, node, path)
        if node is None:
            return self._scalar_place(live, path)
        if isinstance(node, int):
            return self._leaf(live, node, path)
        if isinstance(node, Rng):
            return self._generator(live, node, path)
        if isinstance(node, Opaque):
            return self._value(node)
        return self._container(live, node, path)

    def differ(self, path: str, expected: str, found: str) -> Filling:
        self.differences.append(Difference(path, expected, found))
        return Filling(lambda builder: None)

    def _value(self, node: Node) -> Filling:
        """A place that takes the stored value as a new object."""
        at = self._stage(node)
        return Filling(lambda builder: builder.build(node, at), is_in_place=False)

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
        if not _is_scalar(live):
            return self.differ(path, "a scalar", f"a {type_name(live)}")
        return Filling(lambda builder: _put_scalar(live, builder.values[position]), is_in_place=False)

    def _leaf(self, live: Any, index: int, path: str) -> Filling:
        leaf = self._structure.leaves[index]
        if leaf.kind == "bytes":
            return self._value(index) if type(live) is bytes else self.differ(path, "bytes", f"a {type_name(live)}")
        extent = describe_live(live, leaf.kind)
        if extent is None:
            return self.differ(path, _shown(leaf), f"a {type_name(live)}")
        _, dtype, shape, strides, _ = extent[0]
        if tuple(shape) != leaf.shape or (dtype != leaf.dtype and not self._cast):
            return self.differ(path, _shown(leaf), f"{dtype}{list(shape)}")
        if not _is_writable(live, leaf, strides):
            return self.differ(path, "memory that can be written", "a read-only or expanded view")
        number = len(self.entries)
        self.entries.append(LiveLeaf(index, live, extent, path))

        def fill(builder: Builder) -> Any:
            self._copy(number)
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
        if len(live) != len(node.children):
            return self._differ_kind(live, node, path, f"{len(node.children)} items", f"{len(live)} items")
        fillings = [
            self.fit(item, child, join_path(path, key))
            for item, (key, child) in zip(live, children_of(node), strict=True)
        ]
        if isinstance(live, tuple):
            return _tuple_filling(live, fillings)
        return Filling(lambda builder: _fill_items(live, fillings, builder))

    def _differ_kind(self, live: Any, node: Node, path: str, expected: str, found: str | None = None) -> Filling:
        self._skip(node)
        return self.differ(path, expected, found or f"a {type_name(live)}")

    def _mapping(self, live: dict[Any, Any], node: Mapping, path: str) -> Filling:
        keys = keys_of(node)
        fillings = []
        for key, child in zip(keys, node.children, strict=True):
            if key in live:
                fillings.append((key, self.fit(live[key], child, join_path(path, key))))
            else:
                self._skip(child)
                if self._strict:
                    self.differ(join_path(path, key), "a place for it", "nothing of this name")
        if self._strict:
            for key in live.keys() - set(keys):
                self.differ(join_path(path, key), "nothing of this name", f"a {type_name(live[key])}")

        def fill(builder: Builder) -> Any:
            for key, filling in fillings:
                value = filling.fill(builder)
                if value is not live[key]:
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
        if not isinstance(node, Mapping) or not isinstance(state, dict):
            return self._loading(live, node, path)
        owned = _torch.storages_of(live)
        rest: list[tuple[Any, Node, int]] = []
        fillings = []
        for key, child in zip(keys_of(node), node.children, strict=True):
            if key in state and isinstance(child, int) and _torch.is_in(state[key], owned):
                fillings.append(self.fit(state[key], child, join_path(path, key)))
            elif key in state:
                rest.append((key, child, self._stage(child)))
            else:
                self._skip(child)
                if self._strict:
                    self.differ(join_path(path, key), "a place for it", "nothing of this name")
        if self._strict:
            for key in state.keys() - set(keys_of(node)):
                self.differ(join_path(path, key), "nothing of this name", f"a {type_name(state[key])}")

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


def is_optimizer(live: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(live, torch.optim.Optimizer)


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


def _is_scalar(live: Any) -> bool:
    if type(live) in (list, tuple, deque):
        return is_plain_sequence(live)
    if live is None or type(live) in (int, float, bool, str, bytes, complex, set, frozenset):
        return True
    try:
        return to_foreign(live) is not None
    except ValueError:
        return False


def _put_scalar(live: Any, value: Any) -> Any:
    """What stands at a scalar's place afterwards: a live list, set or deque keeps its identity."""
    if isinstance(live, enum.Enum) and type(value) is StoredEnum:
        return value.resolve(type(live))
    if type(live) is type(value) is list:
        live[:] = value
    elif type(live) is type(value) is set:
        live.clear()
        live.update(value)
    elif type(live) is type(value) is deque and live.maxlen == value.maxlen:
        live.clear()
        live.extend(value)
    else:
        return value
    return live


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


def _is_writable(live: Any, leaf: Leaf, strides: tuple[int, ...] | None) -> bool:
    """Whether every element can be written on its own, or is repeated in the snapshot as it is here."""
    if leaf.kind == "numpy" and not live.flags.writeable:
        return False
    stored = leaf.strides or (1,) * len(leaf.shape)
    return strides is None or all(
        stride or size == 1 or not kept for size, stride, kept in zip(leaf.shape, strides, stored, strict=True)
    )


def _shown(leaf: Leaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
