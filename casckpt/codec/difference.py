"""Codec 4: what a chunk adds to one base of the same size.

Items (1, 2, 4 or 8 bytes) are unsigned integers, whatever they mean; the difference is new minus old, modulo. Floats
that move a little differ by a small integer, and adding a *bias* of 0x80 in every byte turns a small difference of
either sign into constant high bytes: one operation where zigzag takes three, and the size is the same.

    dense   (method 0): the biased difference of every item, as a standalone form (codecs 0-3)
    sparse  (method 1): gaps between changed items, and their biased differences, each as a standalone form

    params   item size u8 · method u8 · bias, item size bytes LE ·
             dense:  codec u8 · parameters of that form
             sparse: changed items u32 LE · gap width u8 (1, 2, 4) ·
                     gaps: codec u8 · payload size u32 LE · size of parameters u8 · parameters ·
                     differences: codec u8 · parameters
    payload  dense:  that of the form, of as many bytes as the chunk has
             sparse: that of the gaps · that of the differences
             The bytes after the last whole item stand as they are: at the end of the dense form's plain bytes,
             or at the end of the sparse payload.

At most half of the items are changed in the sparse method, which bounds what a decoder allocates. A base that is `out`
itself is replaced in place. Standalone forms
bring everything else: the choice by trial on a sample, constant and incompressible planes, the profiles of zstd.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

import numpy as np

from casckpt.codec import changes, choose, kernels, raw, zstd
from casckpt.codec.changes import Changes
from casckpt.codec.contract import DIFFERENCE, Buffer, Decoder, Encoded, Hint, damaged
from casckpt.codec.forms import (
    BASE_ID_SIZE,
    decode_part,
    encode_part,
    integers_in,
    plan_part,
    proven,
    sample_of,
    size_of,
)
from casckpt.codec.lanes import Array
from casckpt.errors import InvalidInputError

METHOD_DENSE, METHOD_SPARSE = 0, 1

_ITEM_SIZES = (1, 2, 4, 8)

_ALWAYS_SPARSE = 1 / 16  # of the items: a plane of them costs Huffman coding a bit per item, gaps a third of that
_SPARSE_MAX = 1 / 2
_WORDS_MAX = 0.9  # of the words: beyond, more than half of the items have changed in all data that is not contrived
_SPARSE_GAIN = 0.9  # of the dense size, where both are tried: the sparse method is slower there
_SAMPLE_CREDIT = 0.95  # a sample of 16 KiB carries as many Huffman tables as the chunk

_HEAD = struct.Struct("<BB")
_SPARSE_HEAD = struct.Struct("<IBBIB")  # count, gap width, and of the gaps: codec, payload size, size of parameters


@dataclass(frozen=True, slots=True)
class Plan:
    """What a leaf's trials found. Fields that are None have not been tried since the last round of trials."""

    itemsize: int
    is_sparse: bool | None = None  # which method won where both were tried
    bias: int = 0  # of the dense method
    dense: choose.Plan | None = None
    dense_ratio: float = 0.0  # size after the dense method, as a share of the chunk
    gaps: choose.Plan | None = None
    differences: choose.Plan | None = None


def encode_difference(
    plain: memoryview, base: memoryview, itemsize: int, hint: Hint | None = None, *, ceiling: int
) -> Encoded | None:
    """The difference to `base`, if it is worth naming a base.

    Args:
        plain: the chunk: C-contiguous, one byte per item of the view.
        base: plain bytes of the base. Must stay unchanged until this returns.
        itemsize: bytes per number. 16 is treated as 8, and others by their largest divisor among 1, 2, 4 and 8.
        hint: what paid last for this leaf's differences; updated. Not one that standalone encodings use.
        ceiling: bytes that parameters, payload and the base's id must stay under: what the chunk takes otherwise, less
            what a base has to save.

    Returns:
        The encoding, which decodes to `plain` by proof; its base is `base`. None when it does not stay under
        `ceiling`, or the sizes differ. Raw with `rejected` when the proof or the library failed.

    Deterministic for equal input, hint state and library versions. Releases the GIL in the heavy parts. Costs per MiB
    0.3-1 ms when few items change, else 0.2 ms and what the standalone encoding of the difference costs, twice every
    TRIAL_INTERVAL uses. Memory: three chunks.

    Raises:
        InvalidInputError: `itemsize` is not positive.
    """
    if itemsize < 1:
        raise InvalidInputError(f"item size {itemsize}, expected at least 1", itemsize=itemsize)
    if len(plain) != len(base):
        return None
    size = gcd(itemsize, _ITEM_SIZES[-1])
    plan = hint.recall() if hint is not None else None
    if not isinstance(plan, Plan) or plan.itemsize != size:
        plan = Plan(size)
    try:
        encoded, plan = encode_unproven(plain, base, plan, ceiling - BASE_ID_SIZE)
    except zstd.ZstdError:  # the library failed, of which memory is the usual reason; raw needs none
        return raw.encode(plain, rejected="zstd")
    if hint is not None:
        hint.learn(plan)
    if encoded is None or size_of(encoded) >= ceiling - BASE_ID_SIZE:
        return None
    return proven(plain, (base,), encoded, "difference")


def encode_unproven(plain: memoryview, base: memoryview, plan: Plan, ceiling: int) -> tuple[Encoded | None, Plan]:
    """The form by the method that suits, and what was learned. Both methods where only a trial can tell.

    The caller proves it, and compares its size with `ceiling`, which only spares attempts that cannot stay under it.

    Raises:
        zstandard.ZstdError: the library failed.
    """
    found = _find_few(plain, base, plan)
    if found is None:
        return _dense(plain, base, plan, ceiling)
    is_clear = len(found.gaps) <= _ALWAYS_SPARSE * (len(plain) // plan.itemsize)
    if is_clear or plan.is_sparse:
        return _sparse(plain, found, plan)
    sparse, plan = _sparse(plain, found, plan)
    dense, plan = _dense(plain, base, plan, ceiling)
    plan = replace(plan, is_sparse=dense is None or size_of(sparse) < _SPARSE_GAIN * size_of(dense))
    return (sparse if plan.is_sparse else dense), plan


def _find_few(plain: memoryview, base: memoryview, plan: Plan) -> Changes | None:
    """The changes, unless too many items differ for the sparse method, or as many as lost to the dense one before."""
    per_word = changes.WORD_SIZE // plan.itemsize
    word_max = _WORDS_MAX if plan.is_sparse is not False else min(_WORDS_MAX, _ALWAYS_SPARSE * per_word)
    return changes.find(plain, base, plan.itemsize, word_max, int(_SPARSE_MAX * (len(plain) // plan.itemsize)))


# --- dense ---


def _dense(plain: memoryview, base: memoryview, plan: Plan, ceiling: int) -> tuple[Encoded | None, Plan]:
    """The dense form, or None when a sample or the last use says that it misses the ceiling."""
    size = plan.itemsize
    if plan.dense is None:
        plan = _try_biases(sample_of(integers_in(plain, size)) - sample_of(integers_in(base, size)), plan)
    if plan.dense_ratio * len(plain) >= ceiling:
        return None, plan
    whole = len(plain) // size * size
    buffer = np.empty(len(plain), np.uint8)
    difference = buffer[:whole].view(f"<u{size}")
    _subtract(integers_in(plain, size), integers_in(base, size), plan.bias, difference)
    buffer[whole:] = np.frombuffer(plain[whole:], np.uint8)
    form = encode_part(buffer.data, size, plan.dense)
    params = _HEAD.pack(size, METHOD_DENSE) + plan.bias.to_bytes(size, "little") + bytes((form.codec,)) + form.params
    encoded = Encoded(DIFFERENCE, 1, params, form.payload, form.stored_size)
    return encoded, replace(plan, dense_ratio=size_of(encoded) / len(plain))


def _subtract(new: Array, old: Array, bias: int, out: Array) -> None:
    if kernels.IS_THERE:
        kernels.subtract(new, old, bias, out)
        return
    np.subtract(new, old, out=out)
    out += out.dtype.type(bias)


def _try_biases(sample: Array, plan: Plan) -> Plan:
    """The better bias for a sample of differences: of either sign, the balanced one; of decaying moments, none."""
    tried = []
    for bias in (_balanced(plan.itemsize), 0):
        biased = (sample + sample.dtype.type(bias)).view(np.uint8).data
        dense = choose.choose(biased, plan.itemsize)
        ratio = encode_part(biased, plan.itemsize, dense).stored_size / len(biased)
        tried.append(replace(plan, bias=bias, dense=dense, dense_ratio=_SAMPLE_CREDIT * ratio))
    return min(tried, key=lambda each: each.dense_ratio)


def _balanced(itemsize: int) -> int:
    return int.from_bytes(b"\x80" * itemsize, "little")


# --- sparse ---


def _sparse(plain: memoryview, found: Changes, plan: Plan) -> tuple[Encoded, Plan]:
    size = plan.itemsize
    width = found.gaps.itemsize
    bias = _balanced(size)
    gaps_plain = found.gaps.view(np.uint8).data
    differences_plain = (found.differences + found.differences.dtype.type(bias)).view(np.uint8).data
    plan = replace(
        plan,
        gaps=plan_part(gaps_plain, width, plan.gaps),
        differences=plan_part(differences_plain, size, plan.differences),
    )
    gaps = encode_part(gaps_plain, width, plan.gaps)
    differences = encode_part(differences_plain, size, plan.differences)
    params = b"".join(
        (
            _HEAD.pack(size, METHOD_SPARSE),
            bias.to_bytes(size, "little"),
            _SPARSE_HEAD.pack(len(found.gaps), width, gaps.codec, gaps.stored_size, len(gaps.params)),
            gaps.params,
            bytes((differences.codec,)),
            differences.params,
        )
    )
    payload = b"".join((gaps.payload, differences.payload, plain[len(plain) // size * size :]))
    return Encoded(DIFFERENCE, 1, params, payload, len(payload)), plan


# --- decoding ---


def _decode(params: bytes, payload: memoryview, bases: Sequence[Buffer], out: memoryview) -> None:
    base = memoryview(bases[0]).cast("B")
    if len(base) != len(out):
        raise damaged("difference", f"a base of {len(base)} bytes for {len(out)} bytes")
    size, method = _HEAD.unpack(params[: _HEAD.size].ljust(_HEAD.size, b"\0"))
    position = _HEAD.size + size
    if size not in _ITEM_SIZES or method not in (METHOD_DENSE, METHOD_SPARSE) or position >= len(params):
        raise damaged("difference", f"item size {size}, method {method}, {len(params)} bytes of parameters")
    bias = int.from_bytes(params[_HEAD.size : position], "little")
    if method == METHOD_DENSE:
        base = memoryview(bytes(base)) if bases[0] is out else base
        _decode_dense(params[position:], payload, base, _Items(size, bias), out)
    else:
        _decode_sparse(params[position:], payload, None if bases[0] is out else base, _Items(size, bias), out)


class _Items(NamedTuple):
    """What items are: their size, and the bias of their differences."""

    size: int
    bias: int


def _decode_dense(params: bytes, payload: memoryview, base: memoryview, kind: _Items, out: memoryview) -> None:
    decode_part(params[0], params[1:], payload, out, "difference")
    items, old = integers_in(out, kind.size), integers_in(base, kind.size)
    if kernels.IS_THERE:
        kernels.add(items, old, kind.bias, items)
        return
    items += old
    items -= items.dtype.type(kind.bias)


def _decode_sparse(params: bytes, payload: memoryview, base: memoryview | None, kind: _Items, out: memoryview) -> None:
    """`base` is None where `out` holds it already."""
    items = integers_in(out, kind.size)
    if len(params) < _SPARSE_HEAD.size:
        raise damaged("difference", f"{len(params)} bytes of parameters after the bias")
    count, width, codec, gaps_size, gaps_params_size = _SPARSE_HEAD.unpack_from(params)
    gaps_end = _SPARSE_HEAD.size + gaps_params_size
    tail_start = len(payload) - len(out) % kind.size
    if count > _SPARSE_MAX * len(items) or width not in changes.GAP_WIDTHS:
        raise damaged("difference", f"{count} of {len(items)} items changed, gaps of {width} bytes")
    if gaps_end >= len(params) or gaps_size > tail_start:
        raise damaged("difference", f"{len(params)} bytes of parameters and {len(payload)} of payload are too few")
    gaps = np.empty(count, f"<u{width}")
    differences = np.empty(count, items.dtype)
    gaps_params = params[_SPARSE_HEAD.size : gaps_end]
    decode_part(codec, gaps_params, payload[:gaps_size], gaps.view(np.uint8).data, "difference")
    stored = payload[gaps_size:tail_start]
    values = differences.view(np.uint8).data
    decode_part(params[gaps_end], params[gaps_end + 1 :], stored, values, "difference")
    differences -= items.dtype.type(kind.bias)
    if base is not None:
        raw.copy_into(out, base)
    out[len(items) * kind.size :] = payload[tail_start:]
    if not changes.add(items, Changes(gaps, differences)):
        raise damaged("difference", "gaps that are 0 or lead outside")


def base_of(params: bytes, payload: memoryview, plain: memoryview) -> bytearray:
    """The base of a record, from the record and the plain bytes that it decodes to.

    New less what is added to zeros is old. What stands behind the last whole item is the new chunk's own: of
    a base it says nothing, so it is taken over, and the caller compares the digest.

    Raises:
        CorruptionError: the record is damaged.
    """
    added = bytearray(len(plain))
    _decode(params, payload, (bytes(len(plain)),), memoryview(added))
    old = bytearray(plain)
    items = integers_in(memoryview(old), params[0])
    items -= integers_in(memoryview(added), params[0])
    return old


DECODERS = {1: Decoder("difference", _decode, range(1, 2))}
