"""(S26) Every length and count of every structure set to 0, -1, 2^31 and 2^63 - 1, with all checksums made right again.

An attacker can recompute checksums. What must hold: nothing is allocated from a number that was not compared with the
bytes at hand, the answer is quick, and whatever restores is what was committed.
"""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

import casckpt
from casckpt.digest import check16, digest
from casckpt.errors import CasckptError
from casckpt.format.pack import TRAILER_SIZE
from casckpt.testing.trees import difference
from casckpt.testing.workload import HISTORY, Rehearsal, tree

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")

FORGED = (0, -1, 1 << 31, (1 << 63) - 1)
MEMORY_MAX = 64 << 20


class Field(NamedTuple):
    """An unsigned little-endian number in a file: where it is, and how checks are made right after it was changed."""

    name: str
    offset: int
    size: int
    mend: Callable[[bytearray], None]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("intact") / "store"
    with Rehearsal(lambda run: casckpt.open(str(path), create=True, run=run)) as rehearsal:
        for act in HISTORY:
            rehearsal.perform(act)
    shutil.rmtree(path / "index")
    return path


def _mend_entry(data: bytearray) -> None:
    data[48:64] = check16(bytes(data[:48]))
    data[-32:] = digest(bytes(data[:-32]))


def _entry_fields(data: bytes) -> Iterator[Field]:
    yield Field("number", 8, 8, _mend_entry)
    yield Field("body size", 16, 8, _mend_entry)
    yield Field("inline size", 24, 8, _mend_entry)
    body_size, inline_size = struct.unpack_from("<QQ", data, 16)
    if inline_size:
        yield from _record_fields(64 + body_size, data, _mend_entry)


def _record_fields(at: int, data: bytes, mend_outer: Callable[[bytearray], None]) -> Iterator[Field]:
    (header_size,) = struct.unpack_from("<I", data, at + 4)

    def mend(changed: bytearray) -> None:
        end = at + header_size
        changed[at + 80 : at + 96] = check16(bytes(changed[at : at + 80]) + bytes(changed[at + 96 : end]))
        mend_outer(changed)

    places = (("header size", 4, 4), ("base count", 10, 1), ("params size", 12, 4), ("plain size", 16, 8))
    for name, offset, size in (*places, ("stored size", 24, 8)):
        yield Field(f"record {name}", at + offset, size, mend)


def _mend_trailer(data: bytearray) -> None:
    data[-16:] = check16(bytes(data[-TRAILER_SIZE:-16]))


def _pack_fields(data: bytes) -> Iterator[Field]:
    end = len(data) - TRAILER_SIZE
    for name, offset in (("footer offset", 8), ("footer size", 16), ("record count", 24)):
        yield Field(name, end + offset, 8, _mend_trailer)
    yield from _record_fields(64, data, lambda changed: None)


def _forge(data: bytes, field: Field, number: int) -> bytes:
    changed = bytearray(data)
    value = number % (1 << 8 * field.size)
    changed[field.offset : field.offset + field.size] = value.to_bytes(field.size, "little")
    field.mend(changed)
    return bytes(changed)


def _footer_rows(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Packs whose footer has one number of one row forged, with the footer written again and its checks right."""
    offset, size = struct.unpack_from("<QQ", data, len(data) - TRAILER_SIZE + 8)
    rows = msgspec.msgpack.decode(data[offset : offset + size])
    for column, name in ((1, "offset"), (2, "header size"), (3, "stored size"), (4, "plain size")):
        for number in FORGED:
            forged = [list(row) for row in rows]
            forged[0][column] = number
            footer = msgspec.msgpack.encode(forged)
            trailer = bytearray(data[-TRAILER_SIZE:])
            trailer[16:24] = struct.pack("<Q", len(footer))
            trailer[48:64] = check16(footer)
            trailer[64:] = check16(bytes(trailer[:64]))
            yield f"row {name} = {number}", data[:offset] + footer + bytes(trailer)


def _forgeries(store: Path) -> Iterator[tuple[str, Path, bytes]]:
    for path in sorted(store.glob("timeline/*/*"))[:4]:  # create, commits of both kinds, annotate
        for field in _entry_fields(path.read_bytes()):
            for number in FORGED:
                yield f"{path.name} {field.name} = {number}", path, _forge(path.read_bytes(), field, number)
    for path in sorted(store.glob("packs/*/*"))[:1]:  # all have the same structure
        for field in _pack_fields(path.read_bytes()):
            for number in FORGED:
                yield f"{path.name[:8]} {field.name} = {number}", path, _forge(path.read_bytes(), field, number)
        for name, data in _footer_rows(path.read_bytes()):
            yield f"{path.name[:8]} {name}", path, data
    path = store / "casckpt.json"
    for number in (*FORGED, 1 << 70):
        document = msgspec.json.decode(path.read_bytes())
        yield f"chunk size {number}", path, msgspec.json.encode({**document, "chunk_size": min(number, 1 << 64)})


def _check(label: str, folder: Path) -> None:
    tracemalloc.start()
    try:
        with casckpt.open(str(folder)) as store:
            for snapshot in store.timeline(all_runs=True):
                try:
                    found = store.restore(snapshot.id)
                except CasckptError:
                    continue
                problem = difference(tree(snapshot.run, snapshot.step), found)
                assert problem is None, f"wrong data restored: {problem}"
            store.verify(read_data=True)
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < MEMORY_MAX, f"{peak} bytes allocated"
    except Exception as error:
        raise AssertionError(f"{label}: {error!r}") from error
    finally:
        tracemalloc.stop()


def _sweep(intact: Path, tmp_path: Path, stride: int) -> int:
    count = 0
    for label, path, data in list(_forgeries(intact))[::stride]:
        if data == path.read_bytes():
            continue  # the number was that already
        copy = tmp_path / str(count)
        shutil.copytree(intact, copy)
        (copy / path.relative_to(intact)).write_bytes(data)
        _check(label, copy)
        shutil.rmtree(copy)
        count += 1
    return count


def test_some_forged_lengths_are_bounded_and_never_give_wrong_data(intact: Path, tmp_path: Path) -> None:
    assert _sweep(intact, tmp_path, 29) > 3


@pytest.mark.full
def test_every_forged_length_is_bounded_and_never_gives_wrong_data(intact: Path, tmp_path: Path) -> None:
    assert _sweep(intact, tmp_path, 1) > 120
