"""Both `Kv` implementations do the same, and what a dict of dicts does."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from casckpt.errors import InvalidInputError, ReadOnlyError, StorageError
from casckpt.index.kv import SCAN_BATCH, MemoryKv
from casckpt.index.lmdb_kv import LmdbKv, prepare_folder
from casckpt.index.lock import FORK_GATE
from casckpt.index.presence import FolderPresence

TABLES = ("objects", "meta")
AnyKv = MemoryKv | LmdbKv


@pytest.fixture(params=["memory", "lmdb"])
def kv(request: pytest.FixtureRequest, tmp_path) -> Iterator[AnyKv]:
    opened: AnyKv = MemoryKv(TABLES) if request.param == "memory" else LmdbKv(str(tmp_path), TABLES)
    yield opened
    opened.close()


def contents(kv: AnyKv, table: str = "objects") -> list[tuple[bytes, bytes]]:
    with kv.read() as txn:
        return list(txn.scan(table))


def fill(kv: AnyKv, count: int) -> list[bytes]:
    keys = [b"%06d" % n for n in range(count)]
    with kv.write() as txn:
        txn.put_many("objects", [(key, b"v" + key) for key in keys])
    return keys


def test_what_was_put_is_read_back_in_the_order_asked(kv: AnyKv) -> None:
    with kv.write() as txn:
        txn.put("objects", b"b", b"2")
        txn.put_many("objects", [(b"c", b"3"), (b"a", b"first"), (b"a", b"1"), (b"d", b"")])
    with kv.read() as txn:
        assert txn.get("objects", b"a") == b"1"
        assert txn.get("objects", b"d") == b""
        assert txn.get("objects", b"") is None
        assert txn.get("meta", b"a") is None
        assert txn.get_many("objects", [b"c", b"x", b"", b"a", b"c"]) == [b"3", None, None, b"1", b"3"]
        assert (txn.count("objects"), txn.count("meta")) == (4, 0)


def test_a_write_transaction_reads_its_own_changes(kv: AnyKv) -> None:
    fill(kv, 3)
    with kv.write() as txn:
        txn.put("objects", b"new", b"n")
        assert txn.delete("objects", b"000001") is True
        assert txn.delete("objects", b"000001") is False
        assert txn.delete("objects", b"") is False
        assert list(txn.scan("objects")) == [(b"000000", b"v000000"), (b"000002", b"v000002"), (b"new", b"n")]
        assert txn.get_many("objects", [b"new", b"000001"]) == [b"n", None]
        assert txn.count("objects") == 3


def test_a_write_transaction_that_raises_changes_nothing(kv: AnyKv) -> None:
    keys = fill(kv, 5)
    with pytest.raises(KeyError), kv.write() as txn:
        txn.put("objects", keys[0], b"changed")
        txn.delete("objects", keys[1])
        txn.put("meta", b"m", b"x")
        raise KeyError("stop")
    assert contents(kv) == [(key, b"v" + key) for key in keys]
    assert contents(kv, "meta") == []
    with kv.write() as txn:  # and the lock is free again
        txn.put("meta", b"m", b"y")
    assert contents(kv, "meta") == [(b"m", b"y")]


def test_a_read_transaction_sees_the_state_of_its_beginning(kv: AnyKv) -> None:
    fill(kv, 2)
    with kv.read() as before:
        with kv.write() as txn:
            txn.put("objects", b"000000", b"later")
            txn.delete("objects", b"000001")
        assert before.get_many("objects", [b"000000", b"000001"]) == [b"v000000", b"v000001"]
        assert before.count("objects") == 2
    assert contents(kv) == [(b"000000", b"later")]


@pytest.mark.parametrize(
    "count", [0, 1, SCAN_BATCH - 1, SCAN_BATCH, SCAN_BATCH + 1, 2 * SCAN_BATCH, 2 * SCAN_BATCH + 1]
)
def test_scans_of_every_length_around_a_batch_are_complete_and_ordered(kv: AnyKv, count: int) -> None:
    keys = fill(kv, count)
    with kv.read() as txn:
        assert [key for key, _ in txn.scan("objects")] == keys
        assert [key for key, _ in txn.scan("objects", reverse=True)] == keys[::-1]


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (b"", None),
        (b"", b""),
        (b"000003", None),
        (b"000003", b"000007"),
        (b"0000030", b"0000070"),
        (b"000007", b"000003"),
        (b"", b"000000"),
        (b"zz", None),
        (b"", b"zz"),
        (b"000003", b"000003"),
        (b"", b"0" * 600),
    ],
)
def test_scan_bounds_are_inclusive_and_exclusive(kv: AnyKv, start: bytes, stop: bytes | None) -> None:
    keys = fill(kv, 10)
    expected = [key for key in keys if key >= start and (stop is None or key < stop)]
    with kv.read() as txn:
        assert [key for key, _ in txn.scan("objects", start, stop)] == expected
        assert [key for key, _ in txn.scan("objects", start, stop, reverse=True)] == expected[::-1]


def test_keys_of_the_largest_size_are_kept_and_others_refused(kv: AnyKv) -> None:
    largest = b"k" * 510
    with kv.write() as txn:
        txn.put("objects", largest, b"v" * 100_000)
    assert contents(kv) == [(largest, b"v" * 100_000)]
    for key in (b"", b"k" * 511):
        with pytest.raises(InvalidInputError, match="expected 1 to 510"), kv.write() as txn:
            txn.put("objects", key, b"v")
        with pytest.raises(InvalidInputError, match="expected 1 to 510"), kv.write() as txn:
            txn.put_many("objects", [(b"fine", b"v"), (key, b"v")])
    assert len(contents(kv)) == 1


@pytest.mark.parametrize(
    "access",
    [
        lambda txn: txn.get("other", b"k"),
        lambda txn: txn.get_many("other", [b"k"]),
        lambda txn: list(txn.scan("other")),
        lambda txn: txn.count("other"),
        lambda txn: txn.put("other", b"k", b"v"),
        lambda txn: txn.put_many("other", [(b"k", b"v")]),
        lambda txn: txn.delete("other", b"k"),
    ],
)
def test_an_unknown_table_is_refused_by_name(kv: AnyKv, access: Callable) -> None:
    with (
        pytest.raises(InvalidInputError, match="'other' does not exist: expected one of objects, meta"),
        kv.write() as txn,
    ):
        access(txn)


def test_a_write_transaction_inside_another_is_refused_instead_of_waiting_for_itself(kv: AnyKv) -> None:
    with kv.write() as txn:
        with pytest.raises(InvalidInputError, match="would wait for itself"), kv.write():
            pass
        txn.put("meta", b"outer", b"1")
    assert contents(kv, "meta") == [(b"outer", b"1")]


def test_what_the_block_raises_arrives_unchanged(kv: AnyKv) -> None:
    error = OSError(5, "pack unreadable")
    for transaction in (kv.read, kv.write):
        with pytest.raises(OSError, match="pack unreadable") as caught, transaction():
            raise error
        assert caught.value is error


def test_a_transaction_is_refused_after_its_block(kv: AnyKv) -> None:
    fill(kv, 2)
    with kv.read() as reader:
        pass
    with kv.write() as writer:
        pass
    for access in (
        lambda: reader.get("objects", b"k"),
        lambda: writer.put("objects", b"k", b"v"),
        lambda: writer.count("objects"),
    ):
        with pytest.raises(InvalidInputError, match="after its block ended"):
            access()
    assert len(contents(kv)) == 2


def test_increments_from_eight_threads_are_all_counted(kv: AnyKv) -> None:
    def count_up() -> None:
        for _ in range(50):
            with kv.write() as txn:
                txn.put("meta", b"n", b"%d" % (int(txn.get("meta", b"n") or b"0") + 1))

    threads = [threading.Thread(target=count_up) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(kv, "meta") == [(b"n", b"400")]


def test_two_opens_in_one_process_share_one_environment(tmp_path) -> None:
    first, second = LmdbKv(str(tmp_path), TABLES), LmdbKv(str(tmp_path / "."), TABLES)
    fill(first, 3)
    assert len(contents(second)) == 3
    first.close()
    fill(second, 4)
    assert len(contents(second)) == 4
    second.close()
    second.close()
    with pytest.raises(StorageError, match="closed"):
        contents(second)
    with LmdbKv(str(tmp_path), TABLES) as third:
        assert len(contents(third)) == 4


def test_closing_while_a_transaction_runs_waits_for_its_end(tmp_path) -> None:
    kv = LmdbKv(str(tmp_path), TABLES)
    with kv.write() as txn:
        txn.put("meta", b"k", b"v")
        kv.close()
        with LmdbKv(str(tmp_path), TABLES) as other:  # the environment of the running transaction, not a second one
            assert contents(other, "meta") == []
        txn.put("meta", b"l", b"w")
    with LmdbKv(str(tmp_path), TABLES) as other:
        assert contents(other, "meta") == [(b"k", b"v"), (b"l", b"w")]


def test_a_read_only_open_reads_refuses_writes_and_gives_way_to_a_writable_one(tmp_path) -> None:
    with LmdbKv(str(tmp_path), TABLES) as kv:
        fill(kv, 2)
    with LmdbKv(str(tmp_path), TABLES, read_only=True) as reader:
        assert len(contents(reader)) == 2
        with pytest.raises(ReadOnlyError), reader.write():
            pass
        with LmdbKv(str(tmp_path), TABLES) as writer:
            fill(writer, 3)
        assert len(contents(reader)) == 3
        with pytest.raises(ReadOnlyError), reader.write():
            pass


def test_a_missing_folder_is_a_typed_error(tmp_path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        LmdbKv(str(tmp_path / "none"), TABLES)


def test_a_prepared_lock_file_is_taken_as_it_is(tmp_path) -> None:
    prepare_folder(str(tmp_path))
    size = (tmp_path / "lock.mdb").stat().st_size
    with LmdbKv(str(tmp_path), TABLES) as kv:
        fill(kv, 1)
        assert (tmp_path / "lock.mdb").stat().st_size == size >= 126 * 64


KEYS = st.binary(min_size=1, max_size=3)
VALUES = st.binary(max_size=5)
CHANGES = st.lists(st.tuples(st.sampled_from(TABLES), KEYS, st.none() | VALUES), max_size=8)
BOUNDS = st.binary(max_size=3)


class BothAgainstADict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.lmdb = LmdbKv(self.folder.name, TABLES)
        self.memory = MemoryKv(TABLES)
        self.model: dict[str, dict[bytes, bytes]] = {table: {} for table in TABLES}

    @rule(changes=CHANGES, in_bulk=st.booleans(), fail=st.booleans())
    def write(self, changes: list, in_bulk: bool, fail: bool) -> None:
        after = {id(kv): self.change(kv, changes, in_bulk, fail) for kv in (self.lmdb, self.memory)}
        assert after[id(self.lmdb)] == after[id(self.memory)]
        if not fail:
            self.model = after[id(self.lmdb)]

    def change(self, kv: AnyKv, changes: list, in_bulk: bool, fail: bool) -> dict[str, dict[bytes, bytes]]:
        model = {table: dict(entries) for table, entries in self.model.items()}
        with contextlib.suppress(ZeroDivisionError), kv.write() as txn:
            for table, key, value in changes:
                if value is None:
                    assert txn.delete(table, key) == (model[table].pop(key, None) is not None)
                else:
                    model[table][key] = value
                    txn.put_many(table, [(key, value)]) if in_bulk else txn.put(table, key, value)
            assert {table: dict(txn.scan(table)) for table in TABLES} == model
            if fail:
                raise ZeroDivisionError
        return model

    @rule()
    def reopen(self) -> None:
        self.lmdb.close()
        self.lmdb = LmdbKv(self.folder.name, TABLES)

    @rule(table=st.sampled_from(TABLES), start=BOUNDS, stop=st.none() | BOUNDS, keys=st.lists(KEYS, max_size=5))
    def read(self, table: str, start: bytes, stop: bytes | None, keys: list[bytes]) -> None:
        entries = sorted(self.model[table].items())
        expected = [item for item in entries if item[0] >= start and (stop is None or item[0] < stop)]
        for kv in (self.lmdb, self.memory):
            with kv.read() as txn:
                assert list(txn.scan(table, start, stop)) == expected
                assert list(txn.scan(table, start, stop, reverse=True)) == expected[::-1]
                assert txn.get_many(table, keys) == [self.model[table].get(key) for key in keys]

    @invariant()
    def counts_agree(self) -> None:
        for kv in (self.lmdb, self.memory):
            with kv.read() as txn:
                assert {table: txn.count(table) for table in TABLES} == {t: len(e) for t, e in self.model.items()}

    def teardown(self) -> None:
        self.lmdb.close()
        self.folder.cleanup()


TestBothAgainstADict = BothAgainstADict.TestCase
TestBothAgainstADict.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_one_that_nobody_uses_any_more_is_closed_also_by_a_thread_that_is_opening_a_lock(tmp_path) -> None:
    """The garbage collector runs in any thread at any time."""
    kv = LmdbKv(str(tmp_path), TABLES, presence=FolderPresence(str(tmp_path)))
    assert len(list(tmp_path.glob("use-*"))) == 1
    with FORK_GATE:
        assert FORK_GATE.acquire(blocking=False)  # or what follows would wait for ever
        FORK_GATE.release()
        del kv
        assert list(tmp_path.glob("use-*")) == []
