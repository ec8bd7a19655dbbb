"""The structure of a component: its tree with everything but values, an object of its own that commits share.

A tree is made of *nodes*. Two of them are bare: an integer is a leaf (its index in `leaves`), and `None` is a scalar,
whose value is the next one of the scalar block (see `scalars`) in tree order. The others are containers. The same
leaf index may stand at several places: one object, at several paths.

Leaves lie in *blocks*, runs of memory. Offsets are bytes from the start of the block to the leaf's first element;
strides are in elements for torch and in bytes for numpy (as in the two libraries), and `None` for C order. A leaf
without elements has block -1. Leaves and blocks are numbered by first use in tree order, which makes the encoding
canonical: the same state has the same bytes whatever its addresses.

No class, module or function is named anywhere in a form that a reader would import. Decoding checks every number
before anything is allocated from it. This file imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from keyword import iskeyword
from math import prod
from typing import Any, Literal, NamedTuple, Union

import msgspec

from casckpt.errors import CorruptionError
from casckpt.format import wire
from casckpt.format.dtypes import itemsize_of
from casckpt.format.scalars import encode_value, lower, raise_value
from casckpt.limits import KEY_SIZE_MAX, LEAF_COUNT_MAX, RANK_MAX, TREE_DEPTH_MAX

VERSION = 1
PARAMETER, REQUIRES_GRAD = 1, 2  # bits of Leaf.flags, torch only
PLANE_SIZE_MAX = 64
_SIZE_MAX = (1 << 63) - 1
_FACTORIES = ("None", "list", "dict", "set", "tuple", "int", "float", "str", "bool", "bytes", "deque")
MAPPINGS = ("dict", "OrderedDict", "Counter", *(f"defaultdict:{name}" for name in _FACTORIES))
RNGS = ("python", "torch", "numpy.Generator", "numpy.BitGenerator", "numpy.RandomState")

Node = Union[int, None, "Mapping", "Sequence", "Record", "Rng", "Opaque"]


class Leaf(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor ("torch"), array ("numpy") or long bytes object ("bytes", shape [length], no dtype)."""

    kind: Literal["torch", "numpy", "bytes"]
    block: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    flags: int = 0


class Mapping(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A dict of one of the kinds in `MAPPINGS`, in its own order. Keys are in wire form."""

    kind: str
    keys: list[Any]
    children: list[Node]


class Sequence(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A list, a tuple, or a deque with its bound."""

    kind: Literal["list", "tuple", "deque"]
    children: list[Node]
    maxlen: int | None = None


class Record(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A namedtuple: its class's bare name, its fields, their values."""

    name: str
    fields: list[str]
    children: list[Node]


class Rng(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A random generator of one of the kinds in `RNGS`, with its state as a plain tree."""

    kind: str
    state: Node


class Opaque(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A pickle, read only when the reader asks for it: the type's name, for people, and its bytes as a leaf."""

    type_name: str
    leaf: int


class Structure(msgspec.Struct, frozen=True, array_like=True):
    """Tree, leaves and blocks (size in bytes, item size for codecs) of one component."""

    version: int
    tree: Node
    leaves: list[Leaf]
    blocks: list[tuple[int, int]]


class Place(NamedTuple):
    """One leaf of a tree: its path, and its index in `leaves` or, for a scalar, in the scalar block.

    An empty container is a place with neither.
    """

    path: str
    leaf: int | None
    scalar: int | None
    is_opaque: bool = False


def encode_structure(structure: Structure) -> bytes:
    """Canonical bytes. Costs about 0.3 µs per leaf."""
    return wire.encode(structure)


def decode_structure(encoded: bytes | memoryview) -> Structure:
    """The structure in `encoded`, with every bound checked.

    The sizes of blocks are claims: compare `plan_layout(...).chunk_sizes` with the chunks that exist before memory
    is allocated for them.

    Raises:
        UnsupportedFormatError: a newer version.
        CorruptionError: not canonical, or a number that contradicts another.
    """
    structure = wire.decode(Structure, encoded, "structure")
    wire.check_version(structure.version, VERSION, "structure")
    try:
        _check_leaves(structure)
        _Checker(structure).run()
    except ValueError as error:
        raise CorruptionError(f"structure: {error}. Run `casckpt verify`.") from None
    return structure


def _check_leaves(structure: Structure) -> None:
    if len(structure.leaves) > LEAF_COUNT_MAX:
        raise ValueError(f"{len(structure.leaves)} leaves, at most {LEAF_COUNT_MAX} are allowed")
    used = 0
    for number, leaf in enumerate(structure.leaves):
        try:
            _check_leaf(leaf, structure.blocks)
        except ValueError as error:
            raise ValueError(f"leaf {number}: {error}") from None
        if leaf.block > used or (leaf.block == used == len(structure.blocks)):
            raise ValueError(f"leaf {number}: block {leaf.block} is out of order")
        used += leaf.block == used
    if used != len(structure.blocks):
        raise ValueError(f"{len(structure.blocks)} blocks, {used} of them used")
    for size, itemsize in structure.blocks:
        if not 0 < size <= _SIZE_MAX or not 1 <= itemsize <= PLANE_SIZE_MAX:
            raise ValueError(f"a block of {size} bytes with item size {itemsize}")


def _check_leaf(leaf: Leaf, blocks: list[tuple[int, int]]) -> None:
    itemsize = itemsize_of(leaf.kind, leaf.dtype)
    shape = leaf.shape
    if len(shape) > RANK_MAX or any(not 0 <= size <= _SIZE_MAX for size in shape):
        raise ValueError(f"shape {shape!r:.100}")
    if leaf.flags & ~(PARAMETER | REQUIRES_GRAD) or (leaf.flags and leaf.kind != "torch"):
        raise ValueError(f"flags {leaf.flags}")
    if leaf.flags & REQUIRES_GRAD and not leaf.dtype.startswith(("float", "bfloat", "complex")):
        raise ValueError(f"a {leaf.dtype} tensor cannot require gradients")
    if leaf.kind == "bytes" and (len(shape) != 1 or leaf.strides is not None):
        raise ValueError("bytes have one dimension and no strides")
    if prod(shape) > _SIZE_MAX:
        raise ValueError(f"shape {shape!r:.100} has too many elements")
    if prod(shape) * itemsize == 0:
        if leaf.block != -1 or leaf.offset or leaf.strides is not None:
            raise ValueError("an empty leaf has no block, offset or strides")
        return
    if not 0 <= leaf.block < len(blocks):
        raise ValueError(f"block {leaf.block} of {len(blocks)}")
    low, high = leaf_extent(leaf)
    if low < 0 or high > blocks[leaf.block][0]:
        raise ValueError(f"bytes [{low}, {high}) lie outside its block of {blocks[leaf.block][0]} bytes")


def leaf_extent(leaf: Leaf) -> tuple[int, int]:
    """The bytes of its block that a non-empty leaf spans, holes included, as [start, stop).

    Raises:
        ValueError: strides that do not fit the shape.
    """
    itemsize = itemsize_of(leaf.kind, leaf.dtype)
    if leaf.strides is None:
        return leaf.offset, leaf.offset + prod(leaf.shape) * itemsize
    if len(leaf.strides) != len(leaf.shape):
        raise ValueError(f"{len(leaf.strides)} strides for {len(leaf.shape)} dimensions")
    scale = itemsize if leaf.kind == "torch" else 1
    if any(abs(stride) > _SIZE_MAX or (stride < 0 and leaf.kind == "torch") for stride in leaf.strides):
        raise ValueError("strides out of bounds")
    low = high = leaf.offset
    for size, stride in zip(leaf.shape, leaf.strides, strict=True):
        reach = (size - 1) * stride * scale
        if reach < 0:
            low += reach
        else:
            high += reach
    return low, high + itemsize


class _Checker:
    """Walks a decoded tree once: depth, keys, counts, order of leaves."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._leaf_count = len(structure.leaves)
        self._next_leaf = 0
        self._nodes_left = LEAF_COUNT_MAX

    def run(self) -> None:
        self._node(self._structure.tree, 0)
        if self._next_leaf != self._leaf_count:
            raise ValueError(f"{self._leaf_count} leaves, {self._next_leaf} of them in the tree")

    def _node(self, node: Node, depth: int) -> None:
        self._nodes_left -= 1
        if depth > TREE_DEPTH_MAX or self._nodes_left < 0:
            raise ValueError(f"deeper than {TREE_DEPTH_MAX} levels or more than {LEAF_COUNT_MAX} nodes")
        if node is None:
            return
        if isinstance(node, int):
            self._leaf(node)
        elif isinstance(node, Opaque):
            self._leaf(node.leaf)
            if self._structure.leaves[node.leaf].kind != "bytes":
                raise ValueError("an opaque node without bytes")
        elif isinstance(node, Rng):
            if node.kind not in RNGS:
                raise ValueError(f"unknown generator {node.kind!r:.60}")
            self._node(node.state, depth + 1)
        else:
            self._container(node)
            for child in node.children:
                self._node(child, depth + 1)

    def _leaf(self, index: int) -> None:
        if not 0 <= index <= self._next_leaf or index >= self._leaf_count:
            raise ValueError(f"leaf {index} is out of order or range")
        self._next_leaf += index == self._next_leaf

    def _container(self, node: Mapping | Sequence | Record) -> None:
        if isinstance(node, Mapping):
            if node.kind not in MAPPINGS or len(node.keys) != len(node.children):
                raise ValueError(f"a {node.kind!r:.60} of {len(node.keys)} keys and {len(node.children)} values")
            keys = keys_of(node)
            if len(set(keys)) != len(keys):
                raise ValueError("duplicate keys")
        elif isinstance(node, Record):
            if len(set(node.fields)) != len(node.fields) or len(node.fields) != len(node.children):
                raise ValueError("a namedtuple's fields and values do not match")
            if not all(is_field_name(name) for name in [node.name, *node.fields]):
                raise ValueError("a namedtuple's names are not names")
        elif node.maxlen is not None and (node.kind != "deque" or not len(node.children) <= node.maxlen <= _SIZE_MAX):
            raise ValueError("a bound that does not fit")


def is_field_name(name: str) -> bool:
    """Whether a namedtuple may have this name."""
    return name.isidentifier() and not iskeyword(name) and len(name) <= KEY_SIZE_MAX


def check_key(key: Any) -> None:
    """Refuse what cannot be a dict key in a state: only str, int, bool, None, float, bytes and tuples of them can.

    Raises:
        ValueError: what is wrong with it.
    """
    kind = type(key)
    if kind is tuple:
        for part in key:
            check_key(part)
    elif kind not in (str, int, bool, float, bytes) and key is not None:
        raise ValueError(f"dict keys may be str, int, float, bool, None, bytes or tuples of them, not {kind.__name__}")


def lower_keys(keys: list[Any]) -> list[Any]:
    """Keys in wire form.

    Raises:
        ValueError: a key that cannot be stored; its position is the second argument.
    """
    if set(map(type, keys)) <= {str} and all(map(str.isascii, keys)) and max(map(len, keys), default=0) <= KEY_SIZE_MAX:
        return keys
    lowered = []
    for position, key in enumerate(keys):
        try:
            check_key(key)
            lowered.append(lower(key))
            if len(encode_value(lowered[-1])) > KEY_SIZE_MAX:
                raise ValueError(f"a key of more than {KEY_SIZE_MAX} bytes")
        except ValueError as error:
            raise ValueError(str(error), position) from None
    return lowered


def keys_of(node: Mapping) -> list[Any]:
    """A mapping's keys as Python values.

    Raises:
        ValueError: a key that `lower_keys` never makes (of a structure that is being decoded).
    """
    if set(map(type, node.keys)) <= {str, int} and max(map(len, map(str, node.keys)), default=0) <= KEY_SIZE_MAX:
        return node.keys
    try:
        keys = [raise_value(key) for key in node.keys]
    except CorruptionError as error:
        raise ValueError(str(error)) from None
    if lower_keys(keys) != node.keys:
        raise ValueError("a key not in canonical form")
    return keys


def join_path(parent: str, key: Any) -> str:
    """The path of `key` under `parent`, with `~` and `/` in it written `~0` and `~1`."""
    text = key if type(key) is str else repr(key)
    return f"{parent}/{text.replace('~', '~0').replace('/', '~1')}"


def children_of(node: Mapping | Sequence | Record) -> Iterator[tuple[Any, Node]]:
    """(key, field or position; child) of a container."""
    if isinstance(node, Mapping):
        return zip(keys_of(node), node.children, strict=True)
    if isinstance(node, Record):
        return zip(node.fields, node.children, strict=True)
    return enumerate(node.children)


def leaf_places(structure: Structure, component: str) -> Iterator[Place]:
    """Every leaf and scalar of a component with its path, in tree order.

    A leaf used twice comes twice. All parts of a generator's state have the generator's path.
    """
    scalar = 0
    pending: list[tuple[str, Node, bool]] = [(component, structure.tree, False)]
    while pending:
        path, node, is_inside = pending.pop()
        if node is None:
            yield Place(path, None, scalar)
            scalar += 1
        elif isinstance(node, int):
            yield Place(path, node, None)
        elif isinstance(node, Opaque):
            yield Place(path, node.leaf, None, is_opaque=True)
        elif isinstance(node, Rng):
            pending.append((path, node.state, True))
        elif not node.children:
            yield Place(path, None, None)
        elif is_inside:
            pending += reversed([(path, child, True) for child in node.children])
        else:
            pending += reversed([(join_path(path, key), child, False) for key, child in children_of(node)])


def opaque_paths(structure: Structure, component: str = "") -> list[str]:
    """Paths of the leaves that only `allow_pickle=True` reads."""
    return [place.path for place in leaf_places(structure, component) if place.is_opaque]
