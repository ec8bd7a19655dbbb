"""Packs, timeline, pool, writer and index rows through their own contracts."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from casckpt.codec.level import LEVELS
from casckpt.codec.memory import Limits, Memory
from casckpt.errors import CorruptionError, NotFoundError, StorageError
from casckpt.format.entry import Annotate, Envelope, encode_entry
from casckpt.format.record import CHUNK, STRUCTURE
from casckpt.ids import NO_DIGEST, ObjectId, StoreId, WriteId
from casckpt.index.tables import decode_object
from casckpt.limits import INLINE_LIMIT, PACK_TARGET_SIZE
from casckpt.objects import pool
from casckpt.objects.chunks import ChunkTask
from casckpt.objects.packs import list_packs, pack_path, read_rows
from casckpt.objects.timeline import Timeline
from casckpt.objects.writer import ObjectWriter
from casckpt.storage.process import System
from casckpt.testing.anatomy import dissect
from casckpt.testing.wrapping import Operation
from tests.unit.stores import UnsyncedFileSystem, open_store

STORE = StoreId(b"s" * 16)


@pytest.fixture
def root(tmp_path: Path) -> str:
    for name in ("tmp", "packs", "timeline"):
        (tmp_path / name).mkdir()
    return str(tmp_path)


@pytest.fixture
def system() -> System:
    return System(file_system=UnsyncedFileSystem())


# --- timeline ---


def an_entry(seq: int, note: int = 0, store_id: StoreId = STORE) -> bytes:
    body = Annotate(bytes(32), {"note": note}, {})
    return encode_entry(seq, store_id, Envelope(WriteId(bytes(16)), NO_DIGEST, 1, "host", 1, body), [])


def test_number_is_given_once_and_the_loser_learns_it(root: str, system: System) -> None:
    timeline = Timeline(root, STORE, system)
    assert timeline.append(0, an_entry(0))
    assert not timeline.append(0, an_entry(0, note=1))
    assert timeline.append(0, an_entry(0))  # a lost reply: the same bytes are already there
    assert timeline.read(0).envelope.body == Annotate(bytes(32), {"note": 0}, {})
    assert list((Path(root) / "tmp").iterdir()) == []


def test_one_of_many_threads_gets_each_number(root: str, system: System) -> None:
    timeline, won = Timeline(root, STORE, system), []
    barrier = threading.Barrier(8)

    def race(number: int) -> None:
        for seq in range(20):
            barrier.wait()
            if timeline.append(seq, an_entry(seq, note=number)):
                won.append((seq, number))

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seq for seq, _ in won) == list(range(20))
    for seq, number in won:
        assert timeline.read(seq).envelope.body.metrics == {"note": number}


def test_numbers_are_listed_from_any_start_across_folders(root: str, system: System) -> None:
    timeline = Timeline(root, STORE, system)
    numbers = [0, 1, 998, 999, 1000, 1001, 1999, 2000]
    for seq in numbers:
        timeline.append(seq, an_entry(seq))
    for start in (0, 1, 2, 999, 1000, 1500, 2000, 2001):
        assert timeline.numbers(start) == [seq for seq in numbers if seq >= start]
    assert timeline.path(1999).endswith("/00000000000001/00000000000000001999")
    with pytest.raises(NotFoundError, match="entry 5"):
        timeline.read(5)


def test_entry_of_another_store_or_number_is_no_entry(root: str, system: System) -> None:
    timeline = Timeline(root, STORE, system)
    timeline.append(0, an_entry(0, store_id=StoreId(b"x" * 16)))
    timeline.append(1, an_entry(2))
    for seq in (0, 1):
        with pytest.raises(CorruptionError):
            timeline.read(seq)


def test_entry_that_is_not_read_back_as_written_is_not_published(root: str) -> None:
    class Lying(UnsyncedFileSystem):
        def perform(self, operation: Operation, act: Any) -> Any:
            if operation.name == "write" and operation.file is not None:
                return operation.file.write([operation.data[:-1] + b"?"], operation.offset)
            return super().perform(operation, act)

    timeline = Timeline(root, STORE, System(file_system=Lying()))
    with pytest.raises(CorruptionError, match="Nothing was committed"):
        timeline.append(0, an_entry(0))
    assert timeline.numbers() == []


# --- pool ---


def test_results_come_in_order_and_few_tasks_are_under_way() -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def work(number: int) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0)
        with lock:
            running[0] -= 1
        return number * number

    results = pool.map_ordered(work, range(200), ahead=3)
    assert list(results) == [number * number for number in range(200)]
    assert most[0] <= 3


def test_nothing_runs_any_more_after_a_task_failed() -> None:
    started = []

    def work(number: int) -> int:
        started.append(number)
        if number == 3:
            raise ValueError("three")
        return number

    with pytest.raises(ValueError, match="three"):
        list(pool.map_ordered(work, range(1000), ahead=4))
    count = len(started)
    assert count < 20
    assert pool.submit(len, "ab").result() == 2  # everything before it has ended
    assert len(started) == count


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_background_work_yields_to_the_thread_that_started_it_however_nice_that_is() -> None:
    """Also where the whole process was told to stand back: its saves must not overtake it then."""
    found: list[int] = []

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(15, priority()))
        with pool.background():
            found.extend([priority(), pool.submit(priority).result()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] == 19  # the last there is
    assert found[1] >= 10


# --- writer ---


def tasks(arrays: list[Any], known: ObjectId | None = None) -> list[ChunkTask]:
    return [
        ChunkTask(
            lambda data=array: memoryview(data).cast("B"),
            array.nbytes,
            8,
            known,
            Memory(),
            Limits(LEVELS["balanced"], 20),
        )
        for array in arrays
    ]


def noise(seed: int, size: int) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 63, size // 8)


def writer_in(root: str, system: System, present: frozenset[bytes] = frozenset()) -> ObjectWriter:
    return ObjectWriter(root, STORE, system, lambda ids: [each in present for each in ids], verify="reread")


def test_little_stays_inline_and_more_makes_a_pack(root: str, system: System) -> None:
    for size, is_inline in ((INLINE_LIMIT, True), (INLINE_LIMIT + 8, False)):
        writer = writer_in(root, system)
        ((object_id, is_new),) = writer.add_chunks(tasks([noise(size, size)]))
        written = writer.publish()
        writer.abort()
        assert is_new
        assert (len(written.inline), len(written.packs)) == ((1, 0) if is_inline else (0, 1))
        if not is_inline:
            rows, ref = read_rows(system.file_system, root, written.packs[0].pack_id, STORE)
            assert ([row.object_id for row in rows], ref) == ([object_id], written.packs[0])
    assert list((Path(root) / "tmp").iterdir()) == []


def test_equal_and_present_chunks_are_stored_once(root: str, system: System) -> None:
    first, second = noise(1, 100_000), noise(2, 100_000)
    writer = writer_in(root, system)
    found = writer.add_chunks(tasks([first, second, first]))
    assert [is_new for _, is_new in found] == [True, True, False]
    assert found[0][0] == found[2][0]
    writer.publish()
    writer.abort()
    again = writer_in(root, system, frozenset({found[0][0]}))
    assert [is_new for _, is_new in again.add_chunks(tasks([first, second]))] == [False, True]
    known = writer_in(root, system)
    assert known.add_chunks(tasks([first], known=found[0][0])) == [(found[0][0], False)]
    again.abort()
    known.abort()
    assert list((Path(root) / "tmp").iterdir()) == []


@pytest.mark.full
def test_pack_that_is_full_is_closed_and_the_next_one_begun(root: str, system: System) -> None:
    writer = writer_in(root, system)
    arrays = [noise(number, 1 << 20) for number in range((PACK_TARGET_SIZE >> 20) + 3)]
    found = writer.add_chunks(tasks(arrays))
    written = writer.publish()
    writer.abort()
    assert len(written.packs) == 2
    assert all(ref.size < PACK_TARGET_SIZE + (2 << 20) for ref in written.packs)
    listed = [
        row.object_id for ref in written.packs for row in read_rows(system.file_system, root, ref.pack_id, STORE)[0]
    ]
    assert listed == [object_id for object_id, _ in found]


def test_write_that_lies_is_noticed_before_anything_has_a_name(root: str) -> None:
    class Lying(UnsyncedFileSystem):
        def perform(self, operation: Operation, act: Any) -> Any:
            if operation.name == "write" and operation.file is not None:
                data = bytearray(operation.data)
                data[len(data) // 2] ^= 1
                return operation.file.write([data], operation.offset)
            return super().perform(operation, act)

    writer = writer_in(root, System(file_system=Lying()))
    writer.add_chunks(tasks([noise(1, 200_000)]))
    with pytest.raises(CorruptionError, match="not what was to be written"):
        writer.publish()
    writer.abort()
    assert list(list_packs(UnsyncedFileSystem(), root)) == []
    assert list((Path(root) / "tmp").iterdir()) == []


def test_small_objects_are_stored_once_by_content(root: str, system: System) -> None:
    writer = writer_in(root, system)
    first, second = writer.add_all([(STRUCTURE, b"shape"), (CHUNK, b"shape")])
    assert first == second == blake3(b"shape").digest()
    assert len(writer.publish().inline) == 1
    writer.abort()


def test_records_of_a_pack_are_found_without_its_table(root: str, system: System) -> None:
    writer = writer_in(root, system)
    found = writer.add_chunks(tasks([noise(number, 50_000) for number in range(5)]))
    (ref,) = writer.publish().packs
    writer.abort()
    path = Path(pack_path(root, ref.pack_id))
    path.write_bytes(path.read_bytes()[:-60])
    rows, scanned = read_rows(system.file_system, root, ref.pack_id, STORE)
    assert [row.object_id for row in rows] == [object_id for object_id, _ in found]
    assert scanned.footer_check == b""


# --- counts ---


@pytest.fixture
def store(store_path: Path) -> Iterator[Any]:
    with open_store(store_path, chunk_size=4096) as opened:
        yield opened


def counts(store: Any) -> dict[bytes, int]:
    with store._keeper.kv.read() as txn:
        found = {key: decode_object(row)[0] for key, row in txn.scan("objects")}
    return {object_id: count for object_id, count in found.items() if count}


@pytest.mark.full
def test_counts_are_those_of_the_files_after_every_kind_of_entry(store: Any) -> None:
    """An edge counts once per live unique owner, by an independent walk over the files."""
    array = noise(1, 1100 * 4096)
    acts = (
        lambda: store.commit(1, {"a": {"x": noise(2, 9000)}, "b": {"x": noise(2, 9000)}}),
        lambda: store.commit(2, {"a": {"x": noise(2, 9000)}}, inherit=["b"]),
        lambda: store.commit(3, {"a": {"x": array}}, drop=["b"]),
        lambda: store.commit(4, {"a": {"x": array}}, config={"lr": 1}),
        lambda: store.annotate(4, metrics={"m": 1}),
        lambda: store.tag("good", 4),
        lambda: store.retire(3),
        lambda: store.retire(1),
        lambda: store.resume(2, allow_mixed=True) and store.commit(5, {"a": {"x": array[:100]}, "b": 1}),
        lambda: store.retire("main"),
    )
    for act in acts:
        act()
        assert counts(store) == dissect(store.path).counts()
    before = counts(store)
    store._keeper.rebuild()
    assert counts(store) == before


def test_error_of_the_disk_keeps_its_number_and_path(root: str) -> None:
    class Refusing(UnsyncedFileSystem):
        def perform(self, operation: Operation, act: Any) -> Any:
            if operation.name == "create":
                raise StorageError("no", path=operation.path, errno=errno.EROFS)
            return super().perform(operation, act)

    with pytest.raises(StorageError) as caught:
        Timeline(root, STORE, System(file_system=Refusing())).append(0, an_entry(0))
    assert caught.value.errno == errno.EROFS
    assert "/tmp/" in caught.value.facts["path"]
