"""Structures and scalar blocks: canonical, and hostile ones refused before anything is allocated from them."""

from __future__ import annotations

import resource
import struct
from math import prod
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casckpt.errors import CorruptionError, UnsupportedFormatError
from casckpt.format.dtypes import itemsize_of
from casckpt.format.scalars import Foreign, decode_scalars, encode_scalars
from casckpt.format.structure import (
    Leaf,
    Mapping,
    Opaque,
    Place,
    Record,
    Rng,
    Sequence,
    Structure,
    decode_structure,
    encode_structure,
    leaf_places,
    opaque_paths,
)

BITS_31, BITS_63 = 1 << 31, (1 << 63) - 1


def sample() -> list[Any]:
    """A valid structure as plain lists, the way an attacker sees it: every kind of node once."""
    structure = Structure(
        1,
        Mapping(
            "dict",
            ["a", 7, "b/~", "n", "p", "r", "o", "d"],
            [
                0,
                None,
                Sequence("list", [1, None, 0]),
                Mapping("defaultdict:list", [], []),
                Record("P", ["x", "y"], [2, None]),
                Rng("python", Mapping("dict", ["state"], [None])),
                Opaque("some.Type", 3),
                Sequence("deque", [4, None], 5),
            ],
        ),
        [
            Leaf("torch", 0, 0, "float32", (2, 3), (1, 2), 3),
            Leaf("torch", 0, 8, "int16", (4,)),
            Leaf("numpy", 1, 16, "<f8", (3,), (-8,)),
            Leaf("bytes", 2, 0, "", (5000,)),
            Leaf("numpy", -1, 0, "<U0", (3,)),
        ],
        [(24, 4), (24, 8), (5000, 1)],
    )
    plain: list[Any] = msgspec.msgpack.decode(encode_structure(structure))
    return plain


def decode(plain: Any) -> Structure:
    return decode_structure(msgspec.msgpack.encode(plain))


def test_a_structure_is_what_was_encoded_and_every_leaf_has_its_path() -> None:
    structure = decode(sample())
    assert decode_structure(encode_structure(structure)) == structure
    assert list(leaf_places(structure, "c")) == [
        Place("c/a", 0, None),
        Place("c/7", None, 0),
        Place("c/b~1~0/0", 1, None),
        Place("c/b~1~0/1", None, 1),
        Place("c/b~1~0/2", 0, None),
        Place("c/n", None, None),
        Place("c/p/x", 2, None),
        Place("c/p/y", None, 2),
        Place("c/r", None, 3),
        Place("c/o", 3, None, True),
        Place("c/d/0", 4, None),
        Place("c/d/1", None, 4),
    ]
    assert opaque_paths(structure, "c") == ["c/o"]


def number_places(value: Any, at: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    if type(value) is int:
        return [at]
    if type(value) is list:
        return [place for i, item in enumerate(value) for place in number_places(item, (*at, i))]
    return []


def put(value: Any, at: tuple[int, ...], new: Any) -> None:
    for index in at[:-1]:
        value = value[index]
    value[at[-1]] = new


@pytest.mark.few(60)
@pytest.mark.parametrize("at", number_places(sample()))
@pytest.mark.parametrize("forged", [0, -1, BITS_31, BITS_63, -BITS_63 - 1, 1 << 63])
def test_a_forged_number_is_refused_or_means_the_same_bounds(at: tuple[int, ...], forged: int) -> None:
    plain = sample()
    put(plain, at, forged)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        structure = decode(plain)
    except (CorruptionError, UnsupportedFormatError):
        structure = None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024, "KiB"
    if structure is not None:
        for leaf in structure.leaves:  # the independent check: every element's bytes lie inside the block
            itemsize = itemsize_of(leaf.kind, leaf.dtype)
            if leaf.block < 0:
                continue
            scale = itemsize if leaf.kind == "torch" else 1
            unit = 1 if leaf.kind == "torch" else itemsize
            strides = leaf.strides or tuple(unit * prod(leaf.shape[axis + 1 :]) for axis in range(len(leaf.shape)))
            corners = [0]
            for size, stride in zip(leaf.shape, strides, strict=True):
                corners = [c + o for c in corners for o in (0, (size - 1) * stride * scale)]
            assert all(0 <= leaf.offset + c <= structure.blocks[leaf.block][0] - itemsize for c in corners)


@pytest.mark.parametrize(
    ("at", "forged"),
    [
        ((0,), 2),  # version
        ((1, 1), "frozendict"),
        ((1, 2), ["a", "a", "b/~", "n", "p", "r", "o", "d"]),  # duplicate key
        ((1, 2), ["a", 7]),
        ((1, 2, 0), {"x": 1}),
        ((1, 2, 0), "k" * 5000),
        ((1, 3, 0), 1),  # leaves out of order
        ((1, 3, 0), [9, "x"]),
        ((1, 3, 2, 1), "set"),
        ((1, 3, 3, 1), "defaultdict:os.system"),
        ((1, 3, 4, 1), "class"),
        ((1, 3, 4, 1), "a; import os"),
        ((1, 3, 4, 2), ["x", "x"]),
        ((1, 3, 5, 1), "java"),
        ((1, 3, 6, 2), 1),  # opaque without bytes
        ((1, 3, 7, 3), 1),  # deque shorter than its items
        ((2, 0, 0), "jax"),
        ((2, 0, 3), "object"),
        ((2, 2, 3), "O"),
        ((2, 2, 3), "|O8"),
        ((2, 2, 3), "{}"),
        ((2, 2, 3), '{"aligned":false,"fields":[["x",4,"<f8",null]],"itemsize":8}'),  # field outside its record
        ((2, 0, 5), [1]),  # strides of another rank
        ((2, 0, 5), [-1, 2]),
        ((2, 1, 6), 2),  # an integer that requires gradients
        ((2, 2, 6), 1),
        ((2, 0, 4), [1] * 65),
        ((2, 4, 1), 0),  # an empty leaf in a block
        ((3, 0), [24, 0]),
        ((3,), [[24, 4], [24, 8], [5000, 1], [1, 1]]),  # a block that nobody uses
        ((3,), [[24, 4], [24, 8]]),
    ],
)
def test_what_no_encoder_writes_is_refused(at: tuple[int, ...], forged: Any) -> None:
    plain = sample()
    put(plain, at, forged)
    with pytest.raises((CorruptionError, UnsupportedFormatError)):
        decode(plain)


def test_depth_is_bounded_on_both_sides_of_the_limit() -> None:
    def nested(levels: int) -> bytes:
        tree: Any = None
        encoded = b"\xc0"
        for _ in range(levels):
            encoded = msgspec.msgpack.encode([1, "list", msgspec.Raw(b"\x91" + encoded), None])
        tree = msgspec.Raw(encoded)
        return msgspec.msgpack.encode([1, tree, [], []])

    assert decode_structure(nested(256)).leaves == []
    for levels in (257, 10_000):
        with pytest.raises(CorruptionError):
            decode_structure(nested(levels))


@pytest.mark.parametrize("count", [0xFFFFFFFF, 0x7FFFFFFF])
@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"])
def test_a_claimed_length_beyond_the_bytes_is_refused_without_allocating(head: bytes, count: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = head + struct.pack(">I", count) + b"\x01"
    for bad in (data, b"\x91" + data, b"\x94\x01" + data):
        with pytest.raises(CorruptionError):
            decode_structure(bad)
        with pytest.raises(CorruptionError):
            decode_scalars(bad)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024, "KiB"


def test_every_truncation_of_a_structure_is_refused() -> None:
    whole = msgspec.msgpack.encode(sample())
    for length in range(len(whole)):
        with pytest.raises(CorruptionError):
            decode_structure(whole[:length])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_refused_or_is_canonical(noise: bytes) -> None:
    try:
        values = decode_scalars(noise)
    except CorruptionError:
        return
    assert encode_scalars(values) == noise


def test_scalar_blocks_have_the_bytes_that_the_format_says() -> None:
    """Worked by hand from the MessagePack specification."""
    assert encode_scalars([1, True, None, "a", b"b"]).hex() == "9501c3c0a161c40162"
    assert encode_scalars([-0.0]).hex() == "91cb8000000000000000"
    assert encode_scalars([1 << 64]).hex() == "91c70901010000000000000000"
    assert encode_scalars([1j]).hex() == "91d80200000000000000003ff0000000000000"
    assert encode_scalars([(1,)]).hex() == "91d5049101"
    assert encode_scalars([{2, 1}]).hex() == "91c70305920102"
    assert encode_scalars([Foreign("k", 1)]).hex() == "91d60892a16b01"


@pytest.mark.parametrize(
    "bad",
    [
        "91d5010001",  # a small integer as a big one
        "91c70305920201",  # a set out of order
        "91c70305920101",  # a set with a member twice
        "9181a16101",  # a map
        "91d6ff00000001",  # a timestamp
        "91d40901",  # an unknown extension
        "91cd0001",  # a long form of a small number
        "91d60792009101",  # a deque longer than its bound
        "01",
    ],
)
def test_a_scalar_block_in_another_form_is_refused(bad: str) -> None:
    with pytest.raises(CorruptionError):
        decode_scalars(bytes.fromhex(bad))


def test_deeply_nested_extensions_are_refused() -> None:
    encoded = b"\x90"
    for _ in range(200):
        encoded = msgspec.msgpack.encode([msgspec.msgpack.Ext(4, encoded)])
    with pytest.raises(CorruptionError):
        decode_scalars(encoded)
