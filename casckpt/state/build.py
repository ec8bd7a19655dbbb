"""From stored parts to values: memory for blocks, leaves in that memory, and the tree around them.

`Assembly` is the restore that returns values. It allocates memory for the blocks that the wanted leaves need, lets the
store fill it, and then builds the tree over it. The memory is new: nothing that is handed out aliases the store, and
leaves that shared a block share it again.

`LeafMemory` and `Builder` are its two halves; targets that are restored in place use them for what has to be staged.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from casckpt.errors import CorruptionError, NotFoundError, UnsupportedStateError
from casckpt.format.dtypes import itemsize_of
from casckpt.format.scalars import decode_scalars
from casckpt.format.structure import Leaf, Mapping, Node, Opaque, Record, Rng, Structure, keys_of, leaf_places
from casckpt.format.structure import Sequence as SequenceNode
from casckpt.state import rng
from casckpt.state.values import from_foreign
from casckpt.state.walk import FACTORIES

_ALIGNMENT = 16  # the largest item of torch; fresh memory is aligned at least so
_SKIPPED = object()


class LeafMemory:
    """Memory for the blocks of some leaves, and those leaves as tensors, arrays and bytes over it.

    Attributes:
        blocks: writable memory by block index, to be filled before `leaf` is called for bytes, or used for others.
    """

    def __init__(self, structure: Structure, wanted: Collection[int], device: Any = None) -> None:
        self._leaves = structure.leaves
        self._device = device
        self._made: dict[int, Any] = {}
        self._buffers: dict[int, Any] = {}
        self._pads: dict[int, int] = {}
        self.blocks: dict[int, memoryview] = {}
        members: dict[int, list[Leaf]] = {}
        for index in sorted(wanted):
            leaf = structure.leaves[index]
            if leaf.block >= 0:
                members.setdefault(leaf.block, []).append(leaf)
        for block, leaves in members.items():
            self._allocate(block, structure.blocks[block][0], leaves)

    def _allocate(self, block: int, size: int, leaves: list[Leaf]) -> None:
        kinds = {leaf.kind for leaf in leaves}
        pad = self._pads[block] = _pad_of(leaves)
        if "torch" in kinds:
            from casckpt.state import _torch

            buffer: Any = _torch.allocate(pad + size)
            memory = _torch.memory_of(buffer)
        elif "numpy" in kinds:
            from casckpt.state import _numpy

            buffer = _numpy.allocate(pad + size)
            memory = memoryview(buffer)
        else:
            buffer = bytearray(pad + size)
            memory = memoryview(buffer)
        self._buffers[block] = buffer
        self.blocks[block] = memory[pad:]

    def leaf(self, index: int) -> Any:
        """The object of a leaf; the same one each time."""
        if index not in self._made:
            self._made[index] = self._make(self._leaves[index])
        return self._made[index]

    def _make(self, leaf: Leaf) -> Any:
        start = self._pads.get(leaf.block, 0) + leaf.offset
        if leaf.kind == "bytes":
            return bytes(self.blocks[leaf.block][leaf.offset : leaf.offset + leaf.shape[0]]) if leaf.shape[0] else b""
        if leaf.kind == "numpy":
            from casckpt.state import _numpy

            buffer = self._buffers.get(leaf.block)
            return _numpy.array_in(None if buffer is None else _plain_memory(buffer), start, leaf)
        from casckpt.state import _torch

        buffer = self._buffers.get(leaf.block)
        if buffer is not None and self._device is not None:
            buffer = self._moved(leaf.block)
        return _torch.tensor_in(buffer, start, leaf, self._device)

    def _moved(self, block: int) -> Any:
        """The block's buffer on the wanted device; moved once, and kept apart from arrays that stay on the CPU."""
        key = -1 - block
        if key not in self._buffers:
            self._buffers[key] = self._buffers[block].to(self._device)
        return self._buffers[key]


def _plain_memory(buffer: Any) -> Any:
    """A block's buffer as something that numpy makes arrays in; a tensor as the array that shares its memory."""
    return buffer.numpy() if hasattr(buffer, "numpy") else buffer


def _pad_of(leaves: list[Leaf]) -> int:
    """Bytes to leave free before a block so that each tensor starts at a multiple of its item size."""
    offsets = [(leaf.offset, itemsize_of("torch", leaf.dtype)) for leaf in leaves if leaf.kind == "torch"]
    for pad in range(_ALIGNMENT):
        if all((pad + offset) % itemsize == 0 for offset, itemsize in offsets):
            return pad
    raise CorruptionError("structure: tensors that share memory cannot all be aligned. Run `casckpt verify`.")


class Builder:
    """Builds values from nodes, given the leaves and the scalars.

    `live_leaves` are the objects of leaves that are filled in place: new values beside them refer to these objects.
    """

    def __init__(
        self,
        memory: LeafMemory,
        values: list[Any],
        chosen: list[bool] | None = None,
        live_leaves: dict[int, Any] | None = None,
    ) -> None:
        self._memory = memory
        self.values = values
        self._chosen = chosen  # by place, in tree order; None: all
        self._live_leaves = live_leaves or {}
        self._find_leaf = memory.leaf
        self._place = 0
        self._scalar = 0

    def build(self, node: Node, first_scalar: int = 0) -> Any:
        """The value of a node whose first scalar has this index. Opaque leaves run their pickle."""
        self._scalar = first_scalar
        self._place = 0
        return self._node(node)

    def build_new(self, node: Node, first_scalar: int) -> Any:
        """The value of a node as part of a live tree: a leaf that is filled in place is that live object."""
        self._find_leaf = self._live_or_stored
        try:
            return self.build(node, first_scalar)
        finally:
            self._find_leaf = self._memory.leaf

    def _live_or_stored(self, index: int) -> Any:
        return self._live_leaves[index] if index in self._live_leaves else self._memory.leaf(index)

    def _node(self, node: Node) -> Any:
        if node is None:
            self._scalar += 1
            return self.values[self._scalar - 1] if self._is_chosen() else _SKIPPED
        if isinstance(node, int):
            return self._find_leaf(node) if self._is_chosen() else _SKIPPED
        if isinstance(node, Opaque):
            return self._unpickle(node) if self._is_chosen() else _SKIPPED
        if isinstance(node, Rng):
            state = self._node(node.state)
            return _SKIPPED if state is _SKIPPED else rng.make(node.kind, state)
        if not node.children and not self._is_chosen():
            return _SKIPPED
        children = [self._node(child) for child in node.children]
        if isinstance(node, Mapping):
            pairs = [(key, value) for key, value in zip(keys_of(node), children, strict=True) if value is not _SKIPPED]
            return _SKIPPED if children and not pairs else _mapping(node.kind, pairs)
        if any(child is _SKIPPED for child in children):
            names = node.fields if isinstance(node, Record) else range(len(children))
            part = {name: child for name, child in zip(names, children, strict=True) if child is not _SKIPPED}
            return part or _SKIPPED
        return (
            named_tuple(node.name, tuple(node.fields))(*children) if isinstance(node, Record) else _row(node, children)
        )

    def _is_chosen(self) -> bool:
        self._place += 1
        return self._chosen is None or self._chosen[self._place - 1]

    def _unpickle(self, node: Opaque) -> Any:
        import pickle

        return pickle.loads(self._memory.leaf(node.leaf))  # noqa: S301 - reached with allow_pickle=True alone


def _mapping(kind: str, pairs: list[tuple[Any, Any]]) -> Any:
    if kind == "dict":
        return dict(pairs)
    if kind == "OrderedDict":
        return collections.OrderedDict(pairs)
    if kind == "Counter":
        return collections.Counter(dict(pairs))
    return collections.defaultdict(FACTORIES[kind.partition(":")[2]], pairs)


def _row(node: SequenceNode, children: list[Any]) -> Any:
    if node.kind == "list":
        return children
    return tuple(children) if node.kind == "tuple" else collections.deque(children, node.maxlen)


@lru_cache(maxsize=1024)
def named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """A namedtuple class of this name with these fields; equal ones are one class."""
    return collections.namedtuple(name, fields, rename=True)


def read_scalars(structure: Structure, encoded: bytes | memoryview) -> list[Any]:
    """The values of a component's scalar block.

    Raises:
        CorruptionError: damaged, or of another number than the structure has scalars.
    """
    values = decode_scalars(encoded, from_foreign)
    expected = sum(place.scalar is not None for place in leaf_places(structure, ""))
    if len(values) != expected:
        raise CorruptionError(
            f"scalar block: {len(values)} values, the structure has {expected}. Run `casckpt verify`."
        )
    return values


def refuse_opaque(paths: list[str]) -> UnsupportedStateError:
    """The error for opaque leaves that are wanted without `allow_pickle`."""
    return UnsupportedStateError(
        f"{', '.join(paths[:5])}: stored as a pickle, which runs code when it is read. Pass allow_pickle=True if you "
        "trust this store, or leave these paths out with only=[…]",
        path=paths[0],
        paths=paths,
    )


class Assembly:
    """A component, or some of its leaves, restored as values.

    Fill every memoryview of `blocks`, then call `tree`.

    Args:
        structure: decoded, and its layout compared with the chunks that exist.
        component: the first part of its leaf paths.
        only: leaf paths, or paths of containers for all that is in them. Dicts then hold the wanted keys only; of
            another container that is wanted in part comes a dict from position or field to value.
        device: where tensors go; arrays stay on the CPU.

    Raises:
        NotFoundError: a path in `only` that the component does not have.
    """

    def __init__(
        self, structure: Structure, component: str = "", *, only: Sequence[str] | None = None, device: Any = None
    ) -> None:
        self._structure = structure
        places = list(leaf_places(structure, component))
        self._chosen = None if only is None else _choose([place.path for place in places], only)
        wanted = [place for number, place in enumerate(places) if self._chosen is None or self._chosen[number]]
        self.leaf_paths = [place.path for place in wanted]
        self._opaque = [place.path for place in wanted if place.is_opaque]
        self._memory = LeafMemory(structure, {place.leaf for place in wanted if place.leaf is not None}, device)
        self.blocks = self._memory.blocks

    def tree(self, scalars: bytes | memoryview, allow_pickle: bool = False) -> Any:
        """The value, over the filled memory.

        Raises:
            UnsupportedStateError: an opaque leaf is wanted and `allow_pickle` is false; nothing was run.
            CorruptionError: the scalar block, or a generator's state, is not what the structure needs.
        """
        if self._opaque and not allow_pickle:
            raise refuse_opaque(self._opaque)
        values = read_scalars(self._structure, scalars)
        built = Builder(self._memory, values, self._chosen).build(self._structure.tree)
        return {} if built is _SKIPPED else built


def _choose(paths: list[str], only: Sequence[str]) -> list[bool]:
    chosen = [False] * len(paths)
    for wanted in only:
        inside = wanted + "/"
        hits = [number for number, path in enumerate(paths) if path == wanted or path.startswith(inside)]
        if not hits:
            raise NotFoundError(f"{wanted}: no such leaf. `casckpt show` lists the leaves.", path=wanted)
        for number in hits:
            chosen[number] = True
    return chosen
