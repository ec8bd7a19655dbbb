"""The one door to pyarrow: rows of a ring as record batches, and files of them that need no casckpt.

A column of numbers becomes an Arrow array of them; one whose rows have a shape becomes a fixed-size list of the row's
elements in C order. What Arrow has not is stored by its bits: bool as uint8, bf16 and fp8 as unsigned integers, times
as int64, anything else as fixed-size binary. The field's metadata says what it was: `kind`, `dtype` and `shape` (JSON);
the schema's says where the ring stood, under `casckpt`.

Nothing is copied: the arrays lie over the memory that the rows were read into. A dataset's fragments are files of Arrow
IPC that exist while they are read: Arrow asks for the bytes of one, and gets the segment, read and framed then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.dataset as datasets  # type: ignore[import-untyped]
import pyarrow.fs as filesystems  # type: ignore[import-untyped]
import pyarrow.parquet as parquet  # type: ignore[import-untyped]

from casckpt.replay.contract import Column

FORMATS = ("arrow", "parquet")
_NUMPY = {
    **{f"<{kind}{size}": f"{name}{8 * size}" for kind, name in (("i", "int"), ("u", "uint")) for size in (2, 4, 8)},
    **{"|i1": "int8", "|u1": "uint8", "|b1": "uint8", "<f2": "float16", "<f4": "float32", "<f8": "float64"},
}
_TORCH = {
    **{f"{kind}{size}": f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64)},
    **{"float16": "float16", "float32": "float32", "float64": "float64", "bool": "uint8", "bfloat16": "uint16"},
}

RawBatch = tuple[int, Mapping[str, memoryview]]  # rows, bytes of each column


def reader(columns: Mapping[str, Column], batches: Iterable[RawBatch], facts: Mapping[str, int]) -> Any:
    """A `RecordBatchReader` over rows, one batch for each given; `facts` go into the schema's metadata."""
    schema = schema_of(columns, facts)
    return pa.RecordBatchReader.from_batches(schema, _record_batches(columns, batches, schema))


def dataset(
    columns: Mapping[str, Column], starts: Sequence[int], read: Callable[[int], RawBatch], facts: Mapping[str, int]
) -> Any:
    """A `Dataset` of one fragment for each piece that starts at a row of `starts`; `read` gives it, from any thread."""
    schema, form = schema_of(columns, facts), datasets.IpcFileFormat()

    def make(start: int) -> Any:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema) as writer:
            for batch in _record_batches(columns, [read(start)], schema):
                writer.write_batch(batch)
        return sink.getvalue()

    files = filesystems.PyFileSystem(_SegmentFiles(make))
    fragments = [form.make_fragment(f"{start}.arrow", files) for start in starts]
    return datasets.FileSystemDataset(fragments, schema, form, files)


class _SegmentFiles(filesystems.FileSystemHandler):  # type: ignore[misc]
    """Segments as files named by their first row, which are made when they are opened and cannot be changed."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def get_type_name(self) -> str:
        return "casckpt-ring"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[Any]:
        return [filesystems.FileInfo(path, filesystems.FileType.File) for path in paths]

    def open_input_file(self, path: str) -> Any:
        return pa.BufferReader(self._make(int(path.removesuffix(".arrow"))))

    def _refuse(self, *arguments: Any) -> Any:
        raise NotImplementedError("a dataset of a stored ring is read by its fragments, and not changed")

    open_input_stream = open_output_stream = open_append_stream = get_file_info_selector = _refuse
    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = move = copy_file = _refuse


def schema_of(columns: Mapping[str, Column], facts: Mapping[str, int]) -> Any:
    """The Arrow schema of a ring's columns."""
    fields = []
    for name, column in columns.items():
        said = {"kind": column.kind, "dtype": column.dtype, "shape": json.dumps(list(column.shape))}
        fields.append(pa.field(name, _type_of(column), nullable=False, metadata=said))
    return pa.schema(fields, metadata={"casckpt": json.dumps({"ring": 1, **facts})})


def write(path: str, batches: Any, file_format: str) -> int:
    """Write a reader's batches as a file, synced; returns the rows. Memory: one batch, and what Parquet encodes of it.

    Raises:
        FileExistsError: there is such a file.
    """
    row_count = 0
    with open(path, "xb") as file:
        is_arrow = file_format == "arrow"
        sink = pa.ipc.new_file(file, batches.schema) if is_arrow else parquet.ParquetWriter(file, batches.schema)
        with sink as writer:
            for batch in batches:
                writer.write_batch(batch)
                row_count += batch.num_rows
        file.flush()
        os.fsync(file.fileno())
    return row_count


def _element_type(column: Column) -> Any:
    known = (_NUMPY if column.kind == "numpy" else _TORCH).get(column.dtype)
    if known is not None:
        return getattr(pa, known)()
    size = column.row_size // max(1, prod(column.shape))
    if column.dtype.startswith(("<M8", "<m8")):
        return pa.int64()
    return pa.uint8() if column.dtype.startswith("float8") else pa.binary(max(size, 1))


def _type_of(column: Column) -> Any:
    element = _element_type(column)
    return pa.list_(pa.field("item", element, nullable=False), prod(column.shape)) if column.shape else element


def _record_batches(columns: Mapping[str, Column], batches: Iterable[RawBatch], schema: Any) -> Iterator[Any]:
    for row_count, memory in batches:
        arrays = [_array(column, row_count, memory.get(name)) for name, column in columns.items()]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(column: Column, row_count: int, memory: memoryview | None) -> Any:
    buffer = pa.py_buffer(b"" if memory is None else memory)
    count = row_count * prod(column.shape)
    values = pa.Array.from_buffers(_element_type(column), count, [None, buffer])
    if not column.shape:
        return values
    kind = _type_of(column)
    return pa.FixedSizeListArray.from_buffers(kind, row_count, [None], children=[values])
