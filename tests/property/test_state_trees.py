"""Random state trees come back bit for bit, judged by numpy and torch themselves and by nothing of casckpt."""

from __future__ import annotations

import collections
import math
import pickle
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from casckpt.errors import CasckptError, UnsupportedStateError
from casckpt.format.structure import decode_structure
from casckpt.state import Assembly, capture, leaf_places, opaque_paths

# torch warns once that complex32 is experimental when one is made, by the test as well as by a restore
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

TORCH_DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16"),
        *("float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
]


def restore(value: Any, *, only: list[str] | None = None, allow_pickle: bool = False) -> Any:
    """Through bytes and back, as a store does it, in pieces that do not fit any item size."""
    captured = capture("c", value, allow_pickle=allow_pickle)
    structure = decode_structure(captured.structure_bytes)
    assembly = Assembly(structure, "c", only=only)
    for block, memory in assembly.blocks.items():
        assert len(memory) == structure.blocks[block][0] == captured.blocks.size(block)
        for start in range(0, len(memory), 4099):
            stop = min(start + 4099, len(memory))
            memory[start:stop] = captured.blocks.view(block, start, stop)
    return assembly.tree(captured.scalars, allow_pickle)


def torch_bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit."""
    if isinstance(a, torch.Tensor):
        return (
            type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
            and a.requires_grad == b.requires_grad and torch_bits(a) == torch_bits(b)
        )  # fmt: skip
    if isinstance(a, np.ndarray) and a.dtype.names and type(b) is np.ndarray and a.dtype == b.dtype:
        # By field: where NumPy copies items that do not lie side by side, what is between fields is anything.
        return a.shape == b.shape and all(same(a[name], b[name]) for name in a.dtype.names)
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, tuple) and hasattr(a, "_fields"):
        return a._fields == b._fields and all(map(same, a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        default = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return default and list(map(repr, a)) == list(map(repr, b)) and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0) and all(map(same, a, b))
    return bool(a == b)


floats = st.floats(width=64) | st.sampled_from(
    [-0.0, 5e-324, struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf8\xff")[0]]
)
texts = st.text(max_size=8) | st.sampled_from(["\ud800", "a/b~c", ""])
keys = st.recursive(
    texts | st.integers(-(1 << 70), 1 << 70) | st.booleans() | st.none() | st.floats(allow_nan=False),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
scalars = st.one_of(
    st.integers(-(1 << 200), 1 << 200), floats, st.complex_numbers(), texts, st.binary(max_size=20), st.none(),
    st.booleans(), st.sets(st.integers() | texts, max_size=4),
    st.frozensets(st.tuples(texts, st.integers()), max_size=3),
    st.sampled_from([
        np.float32(1.5), np.int8(-3), np.datetime64("2020-01-02", "D"), np.str_("ü"), np.bool_(True),
        np.longdouble(1) / 3, torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1"), np.dtype("<M8[us]"),
    ]),
)  # fmt: skip
arrays = hnp.arrays(
    dtype=st.one_of(
        hnp.scalar_dtypes(),
        hnp.unicode_string_dtypes(max_len=4),
        hnp.byte_string_dtypes(max_len=4),
        st.sampled_from([np.dtype([("a", ">i2"), ("b", "<f8", (2,)), ("c", "S3")], align=True)]),
    ),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    fill=st.nothing(),
)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    noise = random.Random(draw(st.integers(0, 1 << 30))).randbytes(math.prod(shape) * dtype.itemsize)
    if dtype == torch.bool:
        noise = bytes(byte & 1 for byte in noise)
    flat = torch.frombuffer(bytearray(noise), dtype=dtype) if noise else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    axes = draw(st.permutations(range(len(shape))))
    tensor = tensor.permute(axes)
    for axis in range(tensor.dim()):
        step = draw(st.sampled_from([1, 1, 1, 2]))
        tensor = tensor[(slice(None),) * axis + (slice(draw(st.integers(0, 1)), None, step),)]
    how = draw(st.sampled_from(["as is", "expanded", "conjugate", "parameter", "negative"]))
    if how == "expanded" and tensor.dim():
        return tensor[..., None].expand(*tensor.shape, 3)
    if how == "conjugate" and dtype in (torch.complex64, torch.complex128):
        return tensor.conj()
    if how == "negative" and dtype in (torch.complex64, torch.complex128):
        return tensor.conj().imag
    if how == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=dtype.is_floating_point and draw(st.booleans()))
    return tensor


@st.composite
def strided_arrays(draw: Any) -> np.ndarray[Any, Any]:
    array = draw(arrays | arrays.map(np.copy).map(as_void))
    for axis in range(array.ndim):
        array = array[(slice(None),) * axis + (slice(None, None, draw(st.sampled_from([1, 1, -1, 2, -2]))),)]
    return draw(st.sampled_from([array, array.T]))


def as_void(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view(f"V{array.itemsize}") if array.ndim and array.itemsize else array


Point = collections.namedtuple("Point", "x y")
trees = st.recursive(
    scalars | tensors() | strided_arrays() | st.binary(min_size=4090, max_size=4100),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(lambda items: collections.deque(items, 7)),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda items: collections.defaultdict(list, items)),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(trees)
def test_every_tree_comes_back_in_type_and_in_every_bit(tree: Any) -> None:
    back = restore(tree)
    assert same(tree, back)
    again = capture("c", back)
    assert again.structure_bytes == capture("c", restore(back)).structure_bytes, "a restored state is a fixed point"
    assert capture("c", tree).scalars == capture("c", tree).scalars


@settings(max_examples=30, deadline=None)
@given(trees)
def test_the_parts_that_only_names_are_the_parts_of_the_whole(tree: Any) -> None:
    state = {"first": torch.arange(3), "tree": tree, "last": np.arange(4)}
    assert same(restore(state, only=["c/last"]), {"last": state["last"]})
    assert same(restore(state, only=["c/tree", "c/first"]), {"first": state["first"], "tree": tree})


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.sampled_from([1, 2, 3])), min_size=1, max_size=6))
def test_views_share_memory_afterwards_exactly_where_their_extents_overlapped(cuts: list[tuple[int, int, int]]) -> None:
    base = np.arange(80, dtype=np.int32)
    over = torch.from_numpy(base)
    views: list[Any] = []
    for number, (start, length, step) in enumerate(cuts):
        owner: Any = over if number % 2 else base
        views.append(owner[start : start + length * step : step])
    back = restore(views)
    assert all(same(a, b) for a, b in zip(views, back, strict=True))
    spans = [(start, start + (length - 1) * step) for start, length, step in cuts]
    for i, one in enumerate(back):
        for j, other in enumerate(back):
            overlap = np.shares_memory(np.asarray(views[i]), np.asarray(views[j]))
            shared = np.shares_memory(np.asarray(one), np.asarray(other))
            assert not overlap or shared
            if not linked(spans, i, j):
                assert not shared


def linked(spans: list[tuple[int, int]], i: int, j: int) -> bool:
    """Whether two extents are connected by a chain of overlapping ones."""
    reached = {i}
    while True:
        more = {k for k, (a, b) in enumerate(spans) for r in reached if a <= spans[r][1] and spans[r][0] <= b} - reached
        if not more:
            return j in reached
        reached |= more


HOSTILE = pickle.dumps(type("Bomb", (), {"__reduce__": lambda self: (pytest.fail, ("a pickle was executed",))})())


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["scalar", "long", "array", "tensor", "key", "text"]))
def test_a_pickle_as_any_leaf_is_only_bytes(place: str) -> None:
    numbers = np.frombuffer(HOSTILE, np.uint8)
    state: dict[Any, Any] = {
        "scalar": {"x": HOSTILE},
        "long": {"x": HOSTILE + bytes(5000)},
        "array": {"x": numbers},
        "tensor": {"x": torch.tensor(list(HOSTILE), dtype=torch.uint8)},
        "key": {HOSTILE: 1},
        "text": {"x": HOSTILE.decode("latin-1")},
    }[place]
    assert same(restore(state, allow_pickle=True), state)
    assert opaque_paths(capture("c", state, allow_pickle=True).structure, "c") == []


def test_an_opaque_object_is_listed_and_never_unpickled_without_leave() -> None:
    class_like = {"good": torch.ones(2), "bad": Bomb()}
    with pytest.raises(UnsupportedStateError, match="c/bad") as caught:
        capture("c", class_like)
    assert caught.value.path == "c/bad"
    captured = capture("c", class_like, allow_pickle=True)
    assert opaque_paths(captured.structure, "c") == ["c/bad"]
    with pytest.raises(UnsupportedStateError, match="c/bad"):
        Assembly(captured.structure, "c").tree(captured.scalars)
    part = Assembly(captured.structure, "c", only=["c/good"])
    part.blocks[0][:] = captured.blocks.view(0, 0, 8)
    assert part.tree(captured.scalars)["good"].tolist() == [1, 1]


class Bomb:
    """Says when its pickle is run."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was executed",)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_flipped_byte_of_a_structure_never_moves_another_leafs_values(data: Any) -> None:
    """S30: either it is refused, or the untouched leaves still read as they were under their own names."""
    state = {f"k{number}": np.full(3 + number, number, np.int16) for number in range(5)}
    captured = capture("c", state)
    damaged = bytearray(captured.structure_bytes)
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    try:
        structure = decode_structure(bytes(damaged))
        assembly = Assembly(structure, "c")
        sizes_agree = structure.blocks == captured.structure.blocks  # else the chunks would not match the layout
        for block, memory in assembly.blocks.items() if sizes_agree else ():
            memory[:] = captured.blocks.view(block, 0, len(memory))
        back = assembly.tree(captured.scalars)
    except CasckptError:
        return
    if not sizes_agree:
        return
    whole = {place.path: captured.structure.leaves[place.leaf or 0] for place in leaf_places(captured.structure, "c")}
    for place in leaf_places(structure, "c"):
        if place.leaf is not None and structure.leaves[place.leaf] == whole.get(place.path):
            assert same(back[place.path[2:]], state[place.path[2:]])
