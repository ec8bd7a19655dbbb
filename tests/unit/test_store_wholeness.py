"""What makes a snapshot not whole, and what does not: only what is known of its content, never a look that failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from casckpt.errors import StorageError, StoreWarning
from casckpt.storage.process import System
from casckpt.store.inspection import Inspection
from casckpt.store.survey import survey
from casckpt.testing.wrapping import Operation
from tests.unit.stores import UnsyncedFileSystem, open_store

T = TypeVar("T")


class Refusing(UnsyncedFileSystem):
    """Refuses one kind of operation on one path with an error, while there is a path."""

    def __init__(self, code: int, operation: str) -> None:
        super().__init__()
        self.path = ""
        self._code = code
        self._operation = operation

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        if self.path and operation.path == self.path and operation.name == self._operation:
            raise StorageError(f"{self.path}: {os.strerror(self._code)}", errno=self._code, path=self.path)
        return super().perform(operation, act)


def noise(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 63, 20_000)


def three_packs(store_path: Path) -> str:
    """A store of three steps, each with a pack of its own; returns the pack of the newest."""
    before: set[Path] = set()
    with open_store(store_path) as store:
        for step in (1, 2, 3):
            store.commit(step, {"net": {"w": noise(step)}})
            packs = set(store_path.glob("packs/*/*"))
            (newest,) = packs - before
            before = packs
    return str(newest)


def target() -> dict[str, Any]:
    return {"net": {"w": np.full(20_000, 7)}}


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("operation", ["open", "size"])
def test_a_look_that_fails_makes_latest_choose_no_older_step(store_path: Path, code: int, operation: str) -> None:
    newest = three_packs(store_path)
    disk = Refusing(code, operation)
    with open_store(store_path, system=System(file_system=disk)) as store:
        disk.path = newest
        live = target()
        with pytest.raises(StorageError) as caught:
            store.resume_into(live)
        assert caught.value.errno == code
        assert (live["net"]["w"] == 7).all()
        disk.path = ""
        snapshot = store.commit(4, {"net": {"w": noise(4)}})  # from step 2 it would open a branch
        assert (snapshot.branch, snapshot.parent) == ("main", store.snapshot(3).id)


@pytest.mark.parametrize("cut", [True, False])
def test_a_pack_that_is_cut_or_gone_is_a_flaw_and_latest_says_so(store_path: Path, cut: bool) -> None:
    newest = three_packs(store_path)
    if cut:
        os.truncate(newest, 100)
    else:
        os.unlink(newest)
    with open_store(store_path) as store, pytest.warns(StoreWarning, match=r"step 3 .* is not whole"):
        live = target()
        assert store.resume_into(live).step == 2
        assert (live["net"]["w"] == noise(2)).all()


def test_the_command_line_sees_the_flaws_that_latest_sees(store_path: Path) -> None:
    newest = three_packs(store_path)
    os.unlink(newest)
    with open_store(store_path) as store, pytest.warns(StoreWarning) as warned:
        rows = Inspection(store).history().rows
        assert [(row.step, row.state) for row in rows] == [(3, "incomplete"), (2, "consistent"), (1, "consistent")]
        store.restore()
    assert rows[0].reason in str(warned[-1].message)


def test_a_look_that_fails_is_raised_by_the_history_and_not_listed_as_damage(store_path: Path) -> None:
    newest = three_packs(store_path)
    disk = Refusing(errno.EMFILE, "open")
    with open_store(store_path, system=System(file_system=disk)) as store:
        disk.path = newest
        with pytest.raises(StorageError):
            Inspection(store).history()
        disk.path = ""
        assert [row.state for row in Inspection(store).history().rows] == ["consistent"] * 3


def test_a_look_that_fails_makes_no_object_unreferenced(store_path: Path) -> None:
    newest = three_packs(store_path)
    disk = Refusing(errno.EMFILE, "open")
    with open_store(store_path, system=System(file_system=disk)) as store:
        disk.path = newest
        with pytest.raises(StorageError):
            survey(store)
        disk.path = ""
        assert survey(store).unreferenced_bytes == 0
