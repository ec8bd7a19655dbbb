"""Rows of a stored segment where they lie: private maps of files, for rows that were stored raw (`Ring(is_raw=True)`).

A map takes no memory of its own until it is written to; the kernel keeps its pages as long as it likes, and shares them
with other processes that read the same rows. Every map was hashed when it was made. It stays good when the file loses
its name (a collector removed the pack) and when the store is closed.

What a map cannot take is a file that is changed in place. Where it is cut short, whoever touches a page that is not
there any more is ended by the operating system; where it is written to, pages may become others. Nothing of casckpt
does that to a file; a copying program or a failing disk may. So every `column` looks at the file first and raises. An
array that was got earlier is not looked at again when it is used: ask `column` each time, or take `RingView.rows`,
which reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from casckpt.errors import CorruptionError, NotFoundError, StorageError
from casckpt.format.structure import Leaf
from casckpt.replay.contract import Column


class Map(Protocol):
    """Private memory over a part of a file."""

    path: str
    memory: memoryview

    def check(self) -> None:
        """Raise `StorageError` if the file is shorter than what is mapped of it, or was written to since."""


class MappedRows:
    """Rows [start, stop) of a ring, at most a segment; see `RingView.mapped`.

    Attributes:
        start, stop: row numbers.
        mapped: the columns that are maps of a file. The others were read into new memory: those that are constant or
            stored in another form already, and all of a commit that was small enough to lie in its timeline entry.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        columns: Mapping[str, Column],
        maps: Mapping[str, tuple[Map, memoryview]],
        read: Mapping[str, Any],
    ) -> None:
        self.start, self.stop = start, stop
        self.mapped = frozenset(maps)
        self._maps = {name: each for name, (each, _) in maps.items()}
        self._arrays = dict(read)
        for name, (_, memory) in maps.items():
            self._arrays[name] = array_over(memory, columns[name], stop - start)

    def column(self, name: str) -> Any:
        """Rows of one column: an array or tensor of shape (stop - start, …), the same one each time.

        Writing to it changes neither the store nor what others see. Data of 64 KiB and more starts at a multiple of
        64 bytes where these are all rows of their segment.

        Raises:
            NotFoundError: no such column.
            CorruptionError: the file was cut short or written to since it was mapped; nothing of it was touched.
        """
        if name not in self._arrays:
            raise NotFoundError(f"no column {name!r}; there are {sorted(self._arrays)}", columns=[name])
        if name in self._maps:
            try:
                self._maps[name].check()
            except StorageError as error:
                raise CorruptionError(f"column {name!r}: {error.message}", path=self._maps[name].path) from error
        return self._arrays[name]

    def columns(self) -> dict[str, Any]:
        """All columns; see `column`."""
        return {name: self.column(name) for name in self._arrays}

    def __len__(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        return f"<rows {self.start} to {self.stop}, mapped: {', '.join(sorted(self.mapped)) or 'none'}>"


def array_over(memory: memoryview, column: Column, row_count: int) -> Any:
    """An array or tensor of rows over writable memory that holds exactly them."""
    shape = (row_count, *column.shape)
    if column.kind == "torch":
        from casckpt.state import _torch

        return _torch.tensor_over(memory, column.dtype, shape)
    from casckpt.state import _numpy

    return _numpy.array_in(memory, 0, Leaf("numpy", 0, 0, column.dtype, shape))
