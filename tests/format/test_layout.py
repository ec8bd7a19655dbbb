"""The layout of payloads, against the prose of docs/design/0001 written out naively byte by byte."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casckpt.format.layout import SCALARS, plan_layout

SMALL = 64 * 1024


def naive_chunks(blocks: list[tuple[int, int]], scalars: int, chunk: int) -> list[list[tuple[int, int]]]:
    """Every chunk as the list of (block, byte position) of its bytes, straight from the prose."""
    sections = [[(SCALARS, position) for position in range(scalars)]]
    for itemsize in sorted({itemsize for size, itemsize in blocks if size < SMALL}):
        chosen = [number for number, (size, its) in enumerate(blocks) if its == itemsize and size < SMALL]
        sections.append([(number, position) for number in chosen for position in range(blocks[number][0])])
    sections += [[(i, position) for position in range(size)] for i, (size, _) in enumerate(blocks) if size >= SMALL]
    return [section[at : at + chunk] for section in sections for at in range(0, len(section), chunk)]


sizes = st.one_of(st.integers(0, 300), st.sampled_from([SMALL - 1, SMALL, SMALL + 1, 70_000]))


@pytest.mark.full
@settings(max_examples=15, deadline=None)
@given(
    blocks=st.lists(st.tuples(sizes, st.sampled_from([1, 2, 4, 8, 12, 16])), max_size=7),
    scalars=st.integers(0, 300),
    chunk=st.sampled_from([1, 7, 64, 4096, 65536, 1 << 20]),
)
def test_parts_and_spans_say_what_the_design_says_for_every_byte(
    blocks: list[tuple[int, int]], scalars: int, chunk: int
) -> None:
    if chunk < 64 and any(size >= SMALL for size, _ in blocks):
        chunk = 4096
    expected = naive_chunks(blocks, scalars, chunk)
    layout = plan_layout(blocks, scalars, chunk)
    assert layout.chunk_count == len(expected)
    assert layout.chunk_sizes == [len(one) for one in expected]
    assert layout.payload_size == scalars + sum(size for size, _ in blocks)
    for number, one in enumerate(expected):
        parts = [(block, at) for block, start, stop in layout.parts(number) for at in range(start, stop)]
        assert parts == one
        assert layout.itemsizes[number] == (1 if one[0][0] == SCALARS else blocks[one[0][0]][1])
    for block in [SCALARS, *range(len(blocks))]:
        found = [
            (chunk_number, offset + i, start + i)
            for chunk_number, offset, start, size in layout.spans(block)
            for i in range(size)
        ]
        truth = [(n, i, at) for n, one in enumerate(expected) for i, (owner, at) in enumerate(one) if owner == block]
        assert found == truth


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_a_large_block_is_cut_at_exactly_the_chunk_size(size: int) -> None:
    layout = plan_layout([(size, 4)], 5, 1 << 20)
    assert layout.chunk_sizes == [5] + [min(1 << 20, size - at) for at in range(0, size, 1 << 20)]


def test_ten_gigabytes_and_five_thousand_blocks_are_planned_in_milliseconds() -> None:
    started = time.process_time()
    layout = plan_layout([(10 << 30, 4)], 100, 1 << 20)
    many = plan_layout([(256, 4)] * 5000, 100, 1 << 20)
    spent_s = time.process_time() - started
    assert layout.parts(10_240) == [(0, (10 << 30) - (1 << 20), 10 << 30)]
    assert layout.spans(0)[-1] == (10_240, 0, (10 << 30) - (1 << 20), 1 << 20)
    assert many.chunk_sizes == [100, 1 << 20, 5000 * 256 - (1 << 20)]
    assert spent_s < 1.0, "measured 3 ms of CPU; work that grows with the square of the count takes many seconds"
