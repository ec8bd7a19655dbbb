"""Rows mapped from the store's files: what is a map, what is not, and files that go away, shrink or are damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from casckpt.errors import CorruptionError, IncompleteError, NotFoundError
from casckpt.replay import Arrays, Ring
from tests.unit.rings import PlainRing, assert_rows
from tests.unit.stores import open_store

WIDTH = 4096


def stored(path: Path, *, commits: tuple[int, ...] = (70, 50), capacity: int = 100, **options: Any) -> PlainRing:
    """A store with a ring of zeros, which any codec would take, that grew by so many rows a commit."""
    live = PlainRing(capacity, width=WIDTH)
    ring = live.ring(is_raw=True, trust="counter", **options)
    with open_store(path) as store:
        for step, rows in enumerate(commits, 1):
            live.add(rows)
            (store.commit_async if step % 2 else store.commit)(step, {"replay": ring})
            store.wait()
    return live


def packs_of(path: Path) -> list[Path]:
    return sorted(path.glob("packs/*/*"), key=lambda each: each.stat().st_mtime_ns)


def test_raw_rows_are_maps_at_multiples_of_64_and_hold_what_was_committed(store_path: Path) -> None:
    live = stored(store_path)
    with open_store(store_path) as store:
        view = store.restore()["replay"]
        seen = []
        for rows in view.mapped():
            assert "obs" in rows.mapped
            assert_rows(rows.columns(), live.expected(rows.start, rows.stop))
            seen.append((rows.start, rows.stop, len(rows)))
            if rows.start > view.first:  # a segment from its first row on
                assert rows.column("obs").ctypes.data % 64 == 0
        assert seen == [(20, 70, 50), (70, 100, 30), (100, 120, 20)]
        assert [rows.start for rows in view.mapped(["done"], newest_first=True)] == [100, 70, 20]
        with pytest.raises(NotFoundError, match="there are"):
            next(view.mapped()).column("reward")


def test_writing_into_a_map_changes_neither_the_store_nor_another_map(store_path: Path) -> None:
    live = stored(store_path)
    before = {pack: pack.read_bytes() for pack in packs_of(store_path)}
    with open_store(store_path) as store:
        view = store.restore()["replay"]
        rows = next(view.mapped())
        rows.column("obs")[:] = 0
        assert not rows.column("obs").any()
        assert_rows(next(view.mapped()).columns(), live.expected(20, 70))
        assert store.verify().ok
    assert {pack: pack.read_bytes() for pack in packs_of(store_path)} == before


def test_rows_that_compress_are_stored_as_they_are_only_when_asked_for(tmp_path: Path) -> None:
    sizes = {}
    for is_raw in (False, True):
        column = np.repeat(np.arange(500, dtype=np.int64), 64).reshape(500, 64)
        ring = Ring(Arrays({"x": column}, {"total": 500}, total="total"), is_raw=is_raw)
        with open_store(tmp_path / str(is_raw)) as store:
            sizes[is_raw] = store.commit(1, {"replay": ring}).stored_bytes
            rows = next(store.restore()["replay"].mapped())
            assert rows.mapped == ({"x"} if is_raw else set())
            np.testing.assert_array_equal(rows.column("x"), column)
    assert sizes[False] < column.nbytes / 4 < column.nbytes <= sizes[True] < column.nbytes + 8192


def test_tensors_are_mapped_with_their_dtype(store_path: Path) -> None:
    column = torch.randn(300, 40, 3).to(torch.bfloat16)
    ring = Ring(Arrays({"x": column, "n": torch.arange(300)}, {"total": 300}, total="total"), is_raw=True)
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        rows = next(store.restore()["replay"].mapped())
        assert rows.mapped >= {"x"}
        assert torch.equal(rows.column("x"), column)
        assert torch.equal(rows.column("n"), torch.arange(300))


def test_what_lies_in_an_entry_or_is_constant_is_read(store_path: Path) -> None:
    live = PlainRing(50)
    live.add(30)
    with open_store(store_path) as store:
        store.commit(1, {"replay": live.ring(is_raw=True)})
        rows = next(store.restore()["replay"].mapped())
        assert rows.mapped == set()
        assert_rows(rows.columns(), live.expected(0, 30))
        large = {"x": np.zeros((200, 1000)), "y": np.random.default_rng(0).random((200, 1000))}
        store.commit(2, {"large": Ring(Arrays(large, {"total": 200}, total="total"), is_raw=True)}, drop=["replay"])
        rows = next(store.restore()["large"].mapped())
        assert rows.mapped == {"y"}
        assert_rows(rows.columns(), {name: column[rows.start : rows.stop] for name, column in large.items()})


def test_ring_that_becomes_raw_keeps_its_old_rows_and_maps_the_new_ones(store_path: Path) -> None:
    live = PlainRing(300, width=WIDTH)
    live.add(100)
    with open_store(store_path) as store:
        store.commit(1, {"replay": live.ring()})
        live.add(100)
        assert store.commit(2, {"replay": live.ring(is_raw=True)}).new_bytes < 110 * WIDTH
        found = store.restore()["replay"]
        assert_rows(found.rows(0, 200), live.expected(0, 200))
        assert "obs" in list(found.mapped())[-1].mapped
        assert store.verify().ok


# --- files that go away ---


def test_map_outlives_the_name_of_its_file_and_the_store(store_path: Path) -> None:
    live = stored(store_path)
    with open_store(store_path) as store:
        rows = next(store.restore()["replay"].mapped())
    for pack in packs_of(store_path):
        pack.unlink()
    assert "obs" in rows.mapped
    assert_rows(rows.columns(), live.expected(20, 70))


def test_file_that_is_not_there_any_more_is_an_error_when_it_is_to_be_mapped(store_path: Path) -> None:
    live = stored(store_path, commits=(30, 40, 50))
    packs_of(store_path)[1].unlink()
    with open_store(store_path) as store:
        pieces = store.restore(3)["replay"].mapped(newest_first=True)
        for start, stop in ((100, 120), (70, 100)):
            assert_rows(next(pieces).columns(), live.expected(start, stop))
        with pytest.raises(IncompleteError, match="rows 30 to 70"):
            next(pieces)


GONE = """
import os, shutil, sys
from pathlib import Path
import casckpt

def replace(pack, data):
    twin = pack.with_name("twin")
    twin.write_bytes(data)
    os.replace(twin, pack)

def overwrite(pack, data):
    with open(pack, "r+b") as file:
        file.write(data)

CHANGES = {
    "unlinked": os.unlink,
    "moved": lambda pack: os.rename(pack, pack.with_name("away")),
    "replaced by a shorter one": lambda pack: replace(pack, b"x"),
    "replaced by another one": lambda pack: replace(pack, bytes(pack.stat().st_size)),
    "cut short": lambda pack: os.truncate(pack, 4096),
    "emptied": lambda pack: os.truncate(pack, 0),
    "copied over": lambda pack: pack.write_bytes(bytes(pack.stat().st_size)),
    "copied over by a shorter one": lambda pack: pack.write_bytes(b"x"),
    "written to": lambda pack: overwrite(pack, bytes(pack.stat().st_size)),
}
path, what, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def change():
    for pack in sorted(path.glob("packs/*/*")):
        CHANGES[what](pack)

def rows_of(pieces):
    told = []
    for rows in pieces:
        assert rows.mapped == {"obs"}
        try:
            told.append(str(int(rows.column("obs").sum(dtype=int))))
        except casckpt.CorruptionError as error:
            told.append("told")
            assert "cut short" in str(error) or "written to since" in str(error), error
    return told

with casckpt.open(path, read_only=True) as store:
    view = store.restore()["replay"]
    if when == "before":
        change()
    try:
        pieces = list(view.mapped(["obs"]))
    except (casckpt.CorruptionError, casckpt.IncompleteError):
        print("refused")
    else:
        if when == "after":
            change()
        print(*rows_of(pieces))
"""
# What is mapped is not touched, or is.
ITS_OWN = ("unlinked", "moved", "replaced by a shorter one", "replaced by another one")
IN_PLACE = ("cut short", "emptied", "copied over", "copied over by a shorter one", "written to")


@pytest.mark.full
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", [*ITS_OWN, *IN_PLACE])
def test_file_that_goes_away_is_rows_or_an_error_and_not_the_end_of_the_process(
    store_path: Path, what: str, when: str
) -> None:
    live = stored(store_path)
    command = [sys.executable, "-c", GONE, store_path, what, when]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    sums = [str(int(live.expected(*each)["obs"].sum(dtype=int))) for each in ((20, 70), (70, 100), (100, 120))]
    if when == "after":
        assert run.stdout.split() == (sums if what in ITS_OWN else ["told"] * 3)
    else:  # a handle may hold a descriptor of what it read before
        assert run.stdout.split() in (["refused"], sums) if what in ITS_OWN else run.stdout.split() == ["refused"]


def test_damage_is_found_before_a_map_is_handed_out(store_path: Path) -> None:
    live = stored(store_path)
    row = live.log[30][0].tobytes()
    (pack,) = [each for each in packs_of(store_path) if row in each.read_bytes()]
    data = bytearray(pack.read_bytes())
    data[data.index(row) + 100] ^= 1
    pack.write_bytes(data)
    with open_store(store_path) as store, pytest.raises(CorruptionError, match=r"rows 0 to 70 \(replay/obs\)"):
        list(store.restore()["replay"].mapped())
