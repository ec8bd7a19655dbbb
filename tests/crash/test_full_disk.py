"""(d, S15) A small file system filled to the last byte, and one mounted read-only. Needs root for the mounts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import casckpt
from casckpt.errors import OutOfSpaceError, ReadOnlyError, StorageError
from casckpt.testing.invariants import check_snapshots
from casckpt.testing.workload import HISTORY, Rehearsal, tree

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounting a file system needs Linux and root"
    ),
    pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning"),  # an index that cannot be written is reported
]

SIZE = 16 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _fill(folder: Path) -> Path:
    """Take every byte that is left."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with open(filler, "ab", buffering=0) as file, pytest.raises(OSError):
        file.write(bytes(1))
        file.write(bytes(4096))
    return filler


def _history(path: str) -> Rehearsal:
    with Rehearsal(lambda run: casckpt.open(path, create=True, run=run)) as rehearsal:
        for act in HISTORY:
            rehearsal.perform(act)
    return rehearsal


def _big(step: int) -> dict[str, dict[str, np.ndarray]]:
    return {"policy": {"weight": np.random.default_rng(step).integers(0, 1 << 62, size=(1 << 20) // 8 * 6)}}


def test_commit_on_a_full_disk_says_how_much_it_needs_and_works_once_there_is_room(disk: Path) -> None:
    path = str(disk / "store")
    oracle = _history(path)
    with casckpt.open(path, run="big") as store:
        store.commit(1, _big(1))
        filler = _fill(disk)
        with pytest.raises(OutOfSpaceError) as caught:
            store.commit(2, _big(2))
        assert caught.value.needed_bytes >= 6 << 20  # type: ignore[attr-defined]
        check_snapshots(store, oracle.acknowledged, {**oracle.possible, ("big", 1): _big(1)})
        assert os.listdir(f"{path}/tmp") == [], "the failed commit's temporary files are gone"
        filler.unlink()
        store.commit(2, _big(2))
        assert store.verify(read_data=True).ok
    with casckpt.open(path) as store:
        check_snapshots(store, oracle.acknowledged, {**oracle.possible, ("big", 1): _big(1), ("big", 2): _big(2)})


def test_full_disk_in_the_middle_of_a_pack_leaves_no_part_of_it(disk: Path) -> None:
    path = str(disk / "store")
    with casckpt.open(path, create=True) as store:
        store.commit(1, _big(1))
        used = _used(disk)
        with pytest.raises(OutOfSpaceError):
            store.commit(2, {"policy": {"weight": np.random.default_rng(9).integers(0, 1 << 62, size=(24 << 20) // 8)}})
        assert _used(disk) - used <= 256 << 10
        assert store.steps() == [1]


@pytest.mark.parametrize("index", ["kept", "deleted"])
def test_opening_listing_and_restoring_on_a_full_disk_need_no_free_byte(disk: Path, index: str) -> None:
    path = str(disk / "store")
    oracle = _history(path)
    if index == "deleted":
        subprocess.run(["rm", "-r", f"{path}/index"], check=True)
    _fill(disk)
    for read_only in (False, True):
        with casckpt.open(path, read_only=read_only) as store:
            check_snapshots(store, oracle.acknowledged, oracle.possible)
            assert store.verify(read_data=True).ok


@pytest.mark.parametrize("index", ["kept", "deleted"])
def test_read_only_media_list_and_restore(disk: Path, index: str) -> None:
    path = str(disk / "store")
    oracle = _history(path)
    if index == "deleted":
        subprocess.run(["rm", "-r", f"{path}/index"], check=True)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with casckpt.open(path, read_only=True) as store:
        check_snapshots(store, oracle.acknowledged, oracle.possible)
        assert store.verify(read_data=True).ok
        with pytest.raises(ReadOnlyError):
            store.commit(99, tree("main", 99))
    with contextlib.suppress(StorageError, ReadOnlyError), casckpt.open(path) as store:
        # Asked for writing: refused at once, or opened and refused at the first write.
        check_snapshots(store, oracle.acknowledged, oracle.possible)
        with pytest.raises((StorageError, ReadOnlyError)):
            store.commit(99, tree("main", 99))


def _used(disk: Path) -> int:
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize
