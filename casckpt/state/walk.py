"""One traversal of a live value: nodes of the tree, scalars in wire form, and leaves, all in tree order.

Types are dispatched by a table that learns torch's and numpy's types once those libraries are loaded; a state without
them never imports them. The trail of keys down to the current value is kept for messages only.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from casckpt.errors import UnsupportedStateError
from casckpt.format.scalars import Unwritable, lower
from casckpt.format.structure import Mapping, Node, Opaque, Record, Rng, Sequence, join_path, lower_keys
from casckpt.limits import LEAF_COUNT_MAX, TREE_DEPTH_MAX
from casckpt.state import rng
from casckpt.state.values import to_foreign

BYTES_LEAF_SIZE = 4096  # longer bytes objects are blocks: shared by chunks, and not copied into the scalar block
PLAIN = {int, float, bool, str, bytes, complex, type(None)}  # a sequence of only these is one scalar
ROW_LENGTH_MIN = 8  # fewer tensors in one container are not worth a survey
FACTORIES: dict[str, Any] = {
    "None": None,
    **{kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool, bytes, collections.deque)},
}


def is_plain_sequence(value: Any) -> bool:
    """Whether a list, tuple or deque is one scalar rather than a container."""
    return set(map(type, value)) <= PLAIN


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and isinstance(getattr(type(value), "_fields", None), tuple)


def is_checkpointable(value: Any) -> bool:
    """Whether an object (not a class) stands for what its `state_dict()` returns."""
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


def type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


@dataclass(frozen=True)
class LazyArray:
    """A numpy array that is not there yet: `read(start, stop)` gives those bytes of its C-order form when asked."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[int, int], memoryview]


@dataclass
class Kept:
    """What keeps the memory of a walked value alive, and recognises what did not change since."""

    objects: list[Any] = field(default_factory=list)  # by leaf; of a staged copy, the one buffer
    extents: list[Any] = field(default_factory=list)  # by leaf
    versions: dict[int, int] = field(default_factory=dict)  # leaf → torch's version counter; of a staged copy, none
    surveys: dict[int, Any] = field(default_factory=dict)  # first leaf → how a row of tensors lay, see `Walk._row`


class Walk:
    """Walks one component. After `node(value)`, `scalars`, `objects`, `extents` and `versions` hold what was met.

    `known` is what an earlier walk left: rows of tensors that still lie as they lay then are not described again.
    """

    def __init__(self, component: str, allow_pickle: bool = False, known: Kept | None = None) -> None:
        self.component = component
        self.allow_pickle = allow_pickle
        self.scalars: list[Any] = []
        self.objects: list[Any] = []
        self.extents: list[Any] = []
        self.versions: dict[int, int] = {}  # leaf → torch's version counter, of those that have one
        self.surveys: dict[int, Any] = {}
        self._known = known or Kept()
        self._leaf_of: dict[int, int] = {}
        self._trail: list[Any] = []
        self._open: set[int] = set()
        self._handlers = _current_handlers()

    def node(self, value: Any) -> Node:
        handler = self._handlers.get(type(value))
        return self._other(value) if handler is None else handler(self, value)

    def refuse(self, value: Any, reason: str) -> UnsupportedStateError:
        """The error that names the current path."""
        path = self.component
        for key in self._trail:
            path = join_path(path, key)
        return UnsupportedStateError(f"{path}: {reason}", path=path, type_name=type_name(value))

    # --- leaves ---

    def _plain(self, value: Any) -> Node:
        self.scalars.append(value)
        return None

    def _scalar(self, value: Any) -> Node:
        try:
            self.scalars.append(lower(value, to_foreign))
        except Unwritable as error:
            raise self.refuse(value, f"{error} (in a {type_name(value)}) cannot be stored") from None
        except ValueError as error:
            raise self.refuse(value, str(error)) from None
        return None

    def _bytes(self, value: bytes) -> Node:
        return self._plain(value) if len(value) < BYTES_LEAF_SIZE else self._bytes_leaf(value)

    def _bytes_leaf(self, value: bytes) -> int:
        number = self._leaf_of.get(id(value))
        if number is not None:
            return number
        return self.leaf(value, (("bytes", "", (len(value),), None, 0), None if value else -1, 0, 0, True))

    def _lazy(self, value: LazyArray) -> int:
        low = None if prod(value.shape) else -1
        return self.leaf(value, (("numpy", value.dtype, value.shape, None, 0), low, 0, 0, True))

    def tensor(self, value: Any, door: Any) -> int:
        """The leaf of a tensor, and its version counter."""
        number = self.array(value, door.describe)
        if number not in self.versions and not value.is_inference():
            self.versions[number] = value._version
        return number

    def _row(self, tensors: list[Any], door: Any) -> list[Node] | None:
        """The leaves of many tensors at once, if they lie as the known walk found them at this place; else None.

        Asking all tensors one question after the other, in C loops, costs a fifth of asking each all questions.
        """
        surveyed = door.survey(tensors)
        if surveyed is None:
            return None
        first = len(self.objects)
        survey, versions = surveyed
        self.surveys[first] = survey
        ids = dict.fromkeys(map(id, tensors))
        is_new = len(ids) == len(tensors) and self._leaf_of.keys().isdisjoint(ids)
        if not is_new or self._known.surveys.get(first) != survey:
            return None
        numbers = range(first, first + len(tensors))
        self._leaf_of.update(zip(ids, numbers, strict=True))
        self.objects += tensors
        self.extents += self._known.extents[first : first + len(tensors)]
        self.versions.update(zip(numbers, versions, strict=True))
        return list(numbers)

    def array(self, value: Any, describe: Callable[[Any], Any]) -> int:
        """The leaf of an array, described by its door; the same object is the same leaf."""
        number = self._leaf_of.get(id(value))
        if number is not None:
            return number
        try:
            return self.leaf(value, describe(value))
        except ValueError as error:
            if isinstance(error, UnsupportedStateError):
                raise
            raise self.refuse(value, str(error)) from None

    def leaf(self, value: Any, extent: Any) -> int:
        number = self._leaf_of[id(value)] = len(self.objects)
        if number >= LEAF_COUNT_MAX:
            raise self.refuse(value, f"more than {LEAF_COUNT_MAX} leaves in one component; split it")
        self.objects.append(value)
        self.extents.append(extent)
        return number

    # --- containers ---

    def _enter(self, value: Any) -> None:
        if id(value) in self._open:
            raise self.refuse(value, "the tree contains itself here; break the cycle before the commit")
        if len(self._open) >= TREE_DEPTH_MAX:
            raise self.refuse(value, f"nested more than {TREE_DEPTH_MAX} levels deep")
        self._open.add(id(value))

    def _mapping(self, value: Any, kind: str = "dict") -> Node:
        keys = list(value)
        try:
            stored_keys = lower_keys(keys)
        except ValueError as error:
            self._trail.append(keys[error.args[1]])
            raise self.refuse(keys[error.args[1]], error.args[0]) from None
        return Mapping(kind, stored_keys, self._children(value, keys, value.values()))

    def _children(self, value: Any, keys: Any, children: Any) -> list[Node]:
        self._enter(value)
        if len(value) >= ROW_LENGTH_MIN and "torch" in _doors_open:
            from casckpt.state import _torch

            row = list(children)
            numbers = self._row(row, _torch) if _torch.LEAF_TYPES.issuperset(map(type, row)) else None
            if numbers is not None:
                self._open.discard(id(value))
                return numbers
        trail, find = self._trail, self._handlers.get
        trail.append(None)
        nodes: list[Node] = []
        for key, child in zip(keys, children, strict=True):
            trail[-1] = key
            handler = find(type(child))
            nodes.append(self._other(child) if handler is None else handler(self, child))
        trail.pop()
        self._open.discard(id(value))
        return nodes

    def _sequence(self, value: Any) -> Node:
        if is_plain_sequence(value):
            return self._scalar(value)
        kind: Any = type(value).__name__
        return Sequence(kind, self._children(value, range(len(value)), value), getattr(value, "maxlen", None))

    def _default_mapping(self, value: collections.defaultdict[Any, Any]) -> Node:
        for name, factory in FACTORIES.items():
            if factory is value.default_factory:
                return self._mapping(value, f"defaultdict:{name}")
        reason = f"the default factory {value.default_factory!r} cannot be stored; use a built-in type or a dict"
        raise self.refuse(value, reason)

    # --- everything that has no handler of its own ---

    def _other(self, value: Any) -> Node:
        kind = rng.kind_of(value)
        if kind is not None:
            return Rng(kind, self.node(rng.tree_of(kind, value)))
        if is_checkpointable(value):
            self._enter(value)
            node = self.node(value.state_dict())
            self._open.discard(id(value))
            return node
        if is_namedtuple(value):
            fields = list(type(value)._fields)
            return Record(type(value).__name__, fields, self._children(value, fields, value))
        try:
            is_foreign = to_foreign(value) is not None
        except ValueError as error:
            raise self.refuse(value, str(error)) from None
        return self._scalar(value) if is_foreign else self._opaque(value)

    def _opaque(self, value: Any) -> Node:
        name = type_name(value)
        if not self.allow_pickle:
            reason = (
                f"objects of type {name} cannot be stored. Give it state_dict() and load_state_dict(), store its "
                "parts, or pass allow_pickle=True at commit and at restore"
            )
            raise self.refuse(value, reason)
        import pickle

        try:
            data = pickle.dumps(value, protocol=4)
        except MemoryError:
            raise  # it says nothing of the object
        except Exception as error:  # whatever the object's own reduce raises, the leaf is the news
            why = f"{type(error).__name__}: {error}"
            raise self.refuse(value, f"objects of type {name} cannot be pickled ({why})") from error
        return Opaque(name, self._bytes_leaf(data))


_Handler = Callable[[Walk, Any], Node]
_handlers: dict[type, _Handler] = {
    **dict.fromkeys((float, bool, type(None)), Walk._plain),
    **dict.fromkeys((int, str, complex, set, frozenset), Walk._scalar),
    bytes: Walk._bytes,
    LazyArray: Walk._lazy,
    **dict.fromkeys((list, tuple, collections.deque), Walk._sequence),
    dict: Walk._mapping,
    collections.OrderedDict: lambda walk, value: walk._mapping(value, "OrderedDict"),
    collections.Counter: lambda walk, value: walk._mapping(value, "Counter"),
    collections.defaultdict: Walk._default_mapping,
}
_doors_open: set[str] = set()


def _current_handlers() -> dict[type, _Handler]:
    """The table, with the types of the libraries that are loaded by now."""
    if "numpy" in sys.modules and "numpy" not in _doors_open:
        from casckpt.state import _numpy

        for kind in _numpy.LEAF_TYPES:
            _handlers[kind] = lambda walk, value: walk.array(value, _numpy.describe)
        _doors_open.add("numpy")
    if "torch" in sys.modules and "torch" not in _doors_open:
        from casckpt.state import _torch

        for tensor_type in _torch.LEAF_TYPES:
            _handlers[tensor_type] = lambda walk, value: walk.tensor(value, _torch)
        _doors_open.add("torch")
    return _handlers
