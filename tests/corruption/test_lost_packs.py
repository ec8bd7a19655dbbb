"""(S07, S08, S37) Data that was lost is passed over by "latest", stored again by the next commit, and never reused."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.errors import SaveFailedError, StorageError
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from casckpt.testing.failing import FailingFileSystem
from casckpt.testing.trees import difference
from casckpt.testing.workload import tree

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # what is passed over is reported so


def _packs(path: Path) -> list[Path]:
    return sorted((path / "packs").glob("*/*"))


def _flip_the_middle(pack: Path) -> None:
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)


LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": os.unlink,
    "cut in half": lambda pack: os.truncate(pack, pack.stat().st_size // 2),
    "cut by one byte": lambda pack: os.truncate(pack, pack.stat().st_size - 1),
    "empty": lambda pack: os.truncate(pack, 0),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_lost_pack_is_not_reused_by_the_next_commit(store_path: Path, loss: str, is_reopened: bool) -> None:
    store = casckpt.open(str(store_path), create=True)
    store.commit(1, tree("main", 1))
    LOSSES[loss](_packs(store_path)[0])
    if is_reopened:
        store.close()
        store = casckpt.open(str(store_path))
    with store:
        state = {**tree("main", 1), "counters": {"step": 2}}
        snapshot = store.commit(2, state)
        assert len(_packs(store_path)) == (1 if loss == "deleted" else 2), "the weights are stored again"
        assert difference(state, store.restore(snapshot.id)) is None
        healed = store.restore(1, only=["optimizer", "policy"])
        assert difference({key: tree("main", 1)[key] for key in healed}, healed) is None, (
            "the same objects, whole again"
        )
    shutil.rmtree(store_path / "index")
    with casckpt.open(str(store_path)) as store:
        assert difference(state, store.restore("latest")) is None


@pytest.mark.parametrize("how", ["verify", "restore"])
def test_rot_that_was_found_is_stored_again(store_path: Path, how: str) -> None:
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, tree("main", 1))
        _flip_the_middle(_packs(store_path)[0])
        if how == "verify":
            assert not store.verify(read_data=True).ok
        else:
            with pytest.raises(casckpt.CorruptionError):
                store.restore(1)
        state = {**tree("main", 1), "counters": {"step": 2}}
        store.commit(2, state)
        assert difference(state, store.restore(2)) is None
        assert difference(tree("main", 1), store.restore(1)) is None, "step 1 is healed by the new record"


def _states() -> tuple[dict[str, Any], dict[str, Any]]:
    return tree("main", 1), tree("main", 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("keeps_index", [True, False])
def test_newest_files_cut_to_any_length_leave_the_newest_whole_snapshot_as_latest(
    store_path: Path, tmp_path: Path, keeps_index: bool
) -> None:
    first, second = _states()
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, first)
        before = set(store_path.rglob("*"))
        store.commit(2, second)
    newest = [path for path in set(store_path.rglob("*")) - before if path.is_file() and "index" not in path.parts]
    assert len(newest) == 2, "a pack and an entry"
    for path in sorted(newest):
        size = path.stat().st_size
        for number, length in enumerate([0, 1, 63, 64, size // 2, size - 33, size - 1]):
            copy = tmp_path / f"{path.name[:6]}-{number}"
            shutil.copytree(store_path, copy, ignore=shutil.ignore_patterns("index"))
            if keeps_index:
                casckpt.open(str(copy)).close()
            os.truncate(copy / path.relative_to(store_path), length)
            with casckpt.open(str(copy)) as store:
                latest = store.snapshot("latest").step
                found = store.restore("latest")
                assert difference(first if latest == 1 else second, found) is None
                assert latest == 1 or "packs" in path.parts, f"{path.name} cut to {length}: entry lost, step 2 listed"
                assert not store.verify(read_data=True).ok
                store.resume("latest")
                assert difference(first, store.restore(store.commit(9, first).id)) is None


def test_failed_background_save_is_not_a_step_and_training_goes_on(store_path: Path) -> None:
    fs = FailingFileSystem(LocalFileSystem(), fail_at=1, error=errno.EIO, operations={"link"})
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1620, tree("main", 1))
        store.commit(1800, tree("main", 3))
    with casckpt.open(str(store_path), system=System(file_system=fs)) as store:
        handle = store.commit_async(1820, tree("main", 6))
        with pytest.raises((SaveFailedError, StorageError)):
            handle.result(60)
        assert fs.was_hit
        assert store.steps() == [1620, 1800]
        assert store.snapshot("latest").step == 1800
        store.resume(1620)
        assert store.commit(1700, tree("main", 9)).parent == store.snapshot("main@1620").id
        assert store.steps() == [1620, 1700]
