"""A small index is left dense by whoever closes it last, with the same rows; else it is left as it was."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from casckpt import limits
from casckpt.index import lifecycle
from casckpt.index.kv import Kv
from casckpt.index.lifecycle import IndexHome
from casckpt.index.lmdb_kv import LmdbKv
from tests.unit.test_index_lifecycle import STORE, TABLES, home_of

STEPS = 40


def grow(kv: Kv) -> None:
    """Rows in random places, a few at a time, as commits add them."""
    for step in range(STEPS):
        rows = [(pow(7, step * 10 + each, 65_537).to_bytes(4, "big") * 8, b"row %d" % step * 10) for each in range(10)]
        with kv.write() as txn:
            txn.put_many("objects", rows)
            txn.put("meta", b"step", b"%d" % step)


def grown(store: Path) -> tuple[IndexHome, LmdbKv]:
    home = home_of(store)
    kv = home.rebuild(lambda kv: None)
    assert kv is not None
    grow(kv)
    return home, kv


def rows_of(kv: Kv) -> dict[str, list[tuple[bytes, bytes]]]:
    with kv.read() as txn:
        return {table: list(txn.scan(table)) for table in TABLES}


def data_size(store: Path) -> int:
    (data,) = store.glob("index/*/data.mdb")
    return data.stat().st_size


def test_closing_leaves_the_same_rows_in_less_than_half_of_the_pages(tmp_path: Path) -> None:
    home, kv = grown(tmp_path)
    rows, size = rows_of(kv), data_size(tmp_path)
    home.close(kv)
    assert not kv.is_open
    assert data_size(tmp_path) < size / 2
    assert [path.name for path in sorted((tmp_path / "index").iterdir())] == ["2", "build.lock", "current"]
    again = home_of(tmp_path)
    found = again.open()
    assert found is not None, again.reason
    assert rows_of(found) == rows
    with found.read() as txn:
        assert {table: txn.count(table) for table in TABLES} == {table: len(each) for table, each in rows.items()}
    again.close(found)
    assert (tmp_path / "index/2").exists(), "it was dense already"


def test_index_that_another_handle_has_open_is_left_to_it(tmp_path: Path) -> None:
    home, kv = grown(tmp_path)
    other = home_of(tmp_path)
    shared = other.open()
    assert shared is not None
    size = data_size(tmp_path)
    home.close(kv)
    assert data_size(tmp_path) == size
    other.close(shared)
    assert data_size(tmp_path) < size / 2, "the last one does it"


OPENER = """
import sys
from casckpt.ids import StoreId
from casckpt.index.lifecycle import IndexHome
home = IndexHome(sys.argv[1], StoreId(bytes(range(16))), ("objects", "meta"), boot_id=lambda: "this boot")
kv = home.open()
print("open" if kv is not None else home.reason, flush=True)
sys.stdin.read()
"""


def test_index_that_another_process_has_open_is_left_to_it(tmp_path: Path) -> None:
    home, kv = grown(tmp_path)
    size = data_size(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", OPENER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        home.close(kv)
        assert not kv.is_open
        assert data_size(tmp_path) == size
        process.communicate("")


def test_large_index_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, kv = grown(tmp_path)
    size = data_size(tmp_path)
    monkeypatch.setattr(limits, "INDEX_COMPACTED_MAX", size - 1)
    home.close(kv)
    assert data_size(tmp_path) == size


def test_index_of_a_home_that_only_reads_is_left_as_it_is(tmp_path: Path) -> None:
    _, kv = grown(tmp_path)
    kv.close()
    size = data_size(tmp_path)
    reader = home_of(tmp_path, read_only=True)
    found = reader.open()
    assert found is not None
    reader.close(found)
    assert data_size(tmp_path) == size


@pytest.mark.parametrize("at", ["prepare_folder", "_replace_file", "identity"])
def test_whatever_fails_leaves_the_index_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """A full disk before the copy is filled, before it is published, and while the pointer is written."""
    home, kv = grown(tmp_path)
    rows = rows_of(kv)

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, at, fail)
        home.close(kv)
    assert not kv.is_open
    again = home_of(tmp_path)
    found = again.open()
    assert found is not None, again.reason
    assert rows_of(found) == rows
    found.close()


def test_pointer_to_another_generation_stays(tmp_path: Path) -> None:
    """Somebody rebuilt it meanwhile: what this handle has is not copied over that."""
    home, kv = grown(tmp_path)
    other = IndexHome(str(tmp_path), STORE, TABLES, boot_id=lambda: "this boot")
    with other.new_generation() as building:
        with building.kv.write() as txn:
            txn.put("meta", b"who", b"other")
        building.complete()
    building.kv.close()
    home.close(kv)
    found = home_of(tmp_path).open()
    assert found is not None
    assert rows_of(found)["meta"] == [(b"who", b"other")]
    found.close()
