"""Which rows are stored together: pure decisions about ranges of row numbers, and about groups of segments.

A *segment* is a range of rows that was stored by one commit and never changes. Segments of a ring follow each other
without a gap; the oldest may begin below the first row that the ring still holds. Where there are many, runs of them
are listed by *groups*, and these by groups again, so that a commit lists a few dozen parts however many segments there
are. A group whose first rows are gone is taken apart again: a ring never refers to a whole segment of rows that it does
not hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from casckpt.limits import GROUP_LEVEL_MAX, SEGMENT_SHARE, SEGMENT_SIZE_MAX, SEGMENT_SIZE_MIN

GROUP_SIZE = 32  # parts under one group: a commit lists at most twice as many of each level, 2.6 KiB


class Range(NamedTuple):
    """Rows [start, stop), and the step that stored them; None while they are not stored."""

    start: int
    stop: int
    step: int | None = None

    @property
    def row_count(self) -> int:
        return self.stop - self.start


def rows_per_segment(row_size: int, capacity: int) -> int:
    """The most rows that one segment gets, for rows of `row_size` bytes.

    A sixteenth of the ring, so that a segment that is mostly gone holds little; but within bounds of bytes.
    """
    least, most = SEGMENT_SIZE_MIN // row_size, SEGMENT_SIZE_MAX // row_size
    return max(1, min(max(capacity // SEGMENT_SHARE, least), most))


def cut(start: int, stop: int, row_count_max: int, wrap: int) -> Iterator[Range]:
    """The rows [start, stop) in ranges of at most `row_count_max`, none of which goes across row `wrap`."""
    while start < stop:
        upto = min(stop, start + row_count_max)
        if start < wrap < upto:
            upto = wrap
        yield Range(start, upto)
        start = upto


@dataclass(frozen=True)
class Node:
    """A segment or a group as it lies in the store.

    Attributes:
        manifest: its address.
        start: its first row.
        row_count: how many it has.
        step: the step that stored the last of them.
        level: 0 for a segment, else one more than that of its parts.
        children: the parts of a group; empty for a segment.
    """

    manifest: bytes
    start: int
    row_count: int
    step: int
    level: int = 0
    children: tuple[Node, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.row_count

    def segments(self) -> Iterator[Node]:
        """Itself, or all segments below it."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.segments()


def kept(nodes: Sequence[Node], first: int, stop: int) -> list[Node]:
    """The parts that have rows of [first, stop), groups taken apart where they begin below `first` or end above."""
    found: list[Node] = []
    for node in nodes:
        if node.stop <= first or node.start >= stop:
            continue
        if node.children and (node.start < first or node.stop > stop):
            found += kept(node.children, first, stop)
        else:
            found.append(node)
    return found


def grouped(nodes: Sequence[Node], make: Callable[[Sequence[Node]], bytes]) -> list[Node]:
    """The same rows in fewer parts: runs at the newer end that have grown to twice GROUP_SIZE give up their first half.

    `make` stores a group of parts and returns its address.
    """
    found = list(nodes)
    for level in range(GROUP_LEVEL_MAX):
        stop = len(found)
        while stop and found[stop - 1].level < level:
            stop -= 1
        start = stop
        while start and found[start - 1].level == level:
            start -= 1
        while stop - start >= 2 * GROUP_SIZE:
            members = tuple(found[start : start + GROUP_SIZE])
            rows = sum(node.row_count for node in members)
            group = Node(make(members), members[0].start, rows, members[-1].step, level + 1, members)
            found[start : start + GROUP_SIZE] = [group]
            start, stop = start + 1, stop - GROUP_SIZE + 1
    return found


def rebuilt(parts: Sequence[Node], nodes: Sequence[Node], make: Callable[[Sequence[Node]], bytes]) -> list[Node]:
    """Segments under the groups of `parts`, which held the same rows: a group that has all of its own stays as it is.

    `nodes` are in order; those before and after all parts stay by themselves.
    """
    starts = [node.start for node in nodes]
    found: list[Node] = []
    done = 0
    for part in parts:
        first, last = bisect_left(starts, part.start, done), bisect_left(starts, part.stop, done)
        found += nodes[done:first]
        mine, done = nodes[first:last], last
        if not part.children or not mine:
            found += mine
        elif list(part.segments()) == list(mine):
            found.append(part)
        else:
            children = tuple(rebuilt(part.children, mine, make))
            rows = sum(node.row_count for node in children)
            step = max(node.step for node in children)
            found.append(Node(make(children), children[0].start, rows, step, part.level, children))
    return [*found, *nodes[done:]]
