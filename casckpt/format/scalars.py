"""The scalar block: every value of a state that is not memory, as one self-describing MessagePack array.

Plain values are their MessagePack selves. What MessagePack lacks travels in extension types (`Tag`): integers beyond
64 bits, complex numbers, text with lone surrogates, tuples, sets, deques, and *foreign* values (numpy scalars, enum
members, torch sizes, dtypes and devices), which this file knows only as `Foreign(kind, payload)`: it imports neither
numpy nor torch, and turning a foreign value back into an object is the state layer's business.

The *wire form* of a value is what msgspec encodes without help: the value itself, or an `Ext`. Dict keys in a
structure are kept in wire form too. Encoding is canonical: sets are sorted by their members' encodings, every value
has one encoding, and decoding refuses any other, so that equal states have equal bytes.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from casckpt.errors import CorruptionError

Ext = msgspec.msgpack.Ext
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_DEPTH_MAX = 32  # tuples in sets in tuples …; deeper ones are refused on both sides


class Tag:
    """MessagePack extension codes of the scalar block; numbers are for ever."""

    BIG_INT = 1  # signed big-endian two's complement, shortest
    COMPLEX = 2  # two IEEE doubles, big-endian
    SURROGATES = 3  # UTF-8 with surrogates passed through
    TUPLE = 4
    SET = 5
    FROZENSET = 6
    DEQUE = 7  # [maxlen or nil, [items]]
    FOREIGN = 8  # [kind, payload]


class Foreign(msgspec.Struct, frozen=True, array_like=True):
    """A value that only the state layer can make: its kind, and a payload of plain values (lists, not tuples)."""

    kind: str
    payload: Any

    def __hash__(self) -> int:
        return hash((self.kind, encode_value(self.payload)))


_encoder = msgspec.msgpack.Encoder()
encode_value: Callable[[Any], bytes] = _encoder.encode
ForeignOf = Callable[[Any], "Foreign | None"]
Revive = Callable[[Foreign], Any]


class Unwritable(Exception):
    """A value that the scalar block has no form for; the caller knows its path."""


def _nothing_foreign(value: Any) -> Foreign | None:
    return value if type(value) is Foreign else None


def lower(value: Any, foreign: ForeignOf = _nothing_foreign, depth: int = 0) -> Any:
    """The wire form of `value`.

    Raises:
        Unwritable: nothing represents it.
    """
    kind = type(value)
    if kind is float or kind is bool or value is None or kind is bytes:
        return value
    if kind is int:
        return value if _INT_MIN <= value <= _INT_MAX else Ext(Tag.BIG_INT, _big_int_bytes(value))
    if kind is str:
        return value if value.isascii() else _lower_text(value)
    if kind is complex:
        return Ext(Tag.COMPLEX, struct.pack(">dd", value.real, value.imag))
    if depth >= _DEPTH_MAX:
        raise Unwritable("nested too deeply")
    if kind is list:
        return _lower_items(value, foreign, depth)
    if kind is tuple:
        return Ext(Tag.TUPLE, encode_value(_lower_items(value, foreign, depth)))
    if kind is deque:
        return Ext(Tag.DEQUE, encode_value([value.maxlen, _lower_items(value, foreign, depth)]))
    if kind is set or kind is frozenset:
        items = sorted(encode_value(lower(item, foreign, depth + 1)) for item in value)
        return Ext(Tag.SET if kind is set else Tag.FROZENSET, _array_of(items))
    found = foreign(value)
    if found is None:
        raise Unwritable(f"{kind.__module__}.{kind.__qualname__}")
    return Ext(Tag.FOREIGN, encode_value([found.kind, lower(found.payload, foreign, depth + 1)]))


def _lower_items(values: Iterable[Any], foreign: ForeignOf, depth: int) -> list[Any]:
    return [lower(value, foreign, depth + 1) for value in values]


def _lower_text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return Ext(Tag.SURROGATES, value.encode("utf-8", "surrogatepass"))
    return value


def _big_int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)


def _array_of(encoded: list[bytes]) -> bytes:
    count = len(encoded)
    if count < 16:
        head = bytes([0x90 | count])
    elif count < 1 << 16:
        head = b"\xdc" + count.to_bytes(2, "big")
    else:
        head = b"\xdd" + count.to_bytes(4, "big")
    return head + b"".join(encoded)


def encode_scalars(values: list[Any], foreign: ForeignOf = _nothing_foreign) -> bytes:
    """The scalar block of `values`, in tree order.

    Raises:
        Unwritable: a value has no form here (its position is the exception's second argument).
    """
    wire = []
    for position, value in enumerate(values):
        try:
            wire.append(lower(value, foreign))
        except Unwritable as error:
            raise Unwritable(error.args[0], position) from None
    return encode_value(wire)


def decode_scalars(data: bytes | memoryview, revive: Revive | None = None) -> list[Any]:
    """The values of a scalar block; `revive` turns each `Foreign` into its object (without it they stay `Foreign`).

    Memory is bounded by a small multiple of the input: lengths are checked against the bytes that are there.

    Raises:
        CorruptionError: not the canonical encoding of any list of values.
    """
    values = _decode(data)
    if type(values) is not list:
        raise CorruptionError(f"scalar block: expected an array, found {type(values).__name__}")
    plain = [raise_value(value) for value in values]
    if encode_scalars(plain) != bytes(data):
        raise CorruptionError("scalar block: not in canonical form")
    return plain if revive is None else [raise_value(value, revive) for value in values]


def _decode(data: bytes | memoryview) -> Any:
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise CorruptionError(f"scalar block: {error}") from None


def raise_value(wire: Any, revive: Revive | None = None, depth: int = 0) -> Any:
    """The value of a wire form, the inverse of `lower`.

    Raises:
        CorruptionError: a form that `lower` never makes.
    """
    kind = type(wire)
    if kind is float or kind is int or kind is bool or wire is None or kind is str or kind is bytes:
        return wire
    if depth > _DEPTH_MAX:
        raise CorruptionError("scalar block: nested too deeply")
    if kind is list:
        return [raise_value(item, revive, depth + 1) for item in wire]
    if kind is not Ext:
        raise CorruptionError(f"scalar block: unexpected {kind.__name__}")
    try:
        return _raise_extension(wire.code, bytes(wire.data), revive, depth)
    except (struct.error, UnicodeDecodeError, TypeError, ValueError) as error:
        raise CorruptionError(f"scalar block: extension {wire.code}: {error}") from None


def _raise_extension(code: int, data: bytes, revive: Revive | None, depth: int) -> Any:
    if code == Tag.BIG_INT:
        return int.from_bytes(data, "big", signed=True)
    if code == Tag.COMPLEX:
        return complex(*struct.unpack(">dd", data))
    if code == Tag.SURROGATES:
        return data.decode("utf-8", "surrogatepass")
    inner = _decode(data)
    if type(inner) is not list:
        raise CorruptionError(f"scalar block: extension {code} holds no array")
    if code == Tag.FOREIGN:
        name, payload = inner
        found = Foreign(name, raise_value(payload, revive, depth + 1))
        if type(name) is not str:
            raise CorruptionError("scalar block: a foreign value without a kind")
        return found if revive is None else revive(found)
    if code == Tag.DEQUE:
        maxlen, inner = inner
        items = [raise_value(item, revive, depth + 1) for item in inner]
        if maxlen is not None and (type(maxlen) is not int or maxlen < len(items)):
            raise CorruptionError("scalar block: a deque longer than its bound")
        return deque(items, maxlen)
    items = [raise_value(item, revive, depth + 1) for item in inner]
    if code == Tag.TUPLE:
        return tuple(items)
    if code == Tag.SET:
        return set(items)
    if code == Tag.FROZENSET:
        return frozenset(items)
    raise CorruptionError(f"scalar block: unknown extension {code}")
