"""Work on a store that breaks off at its n-th operation, n = 1, 2, 3 …, and what must be true of the store afterwards.

A kill is a process that does nothing more: from the n-th operation on, all raise what nobody catches. Names and times
follow from the seed, so that two faults that leave the same files are told to have: they are checked once.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from casckpt.errors import CasckptError
from casckpt.ids import StoreId
from casckpt.index.lifecycle import IndexHome
from casckpt.index.tables import TABLES, read_applied
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from casckpt.testing.failing import CountingFileSystem, FailingFileSystem
from casckpt.testing.recording import RecordingFileSystem, after_power_cut
from tests.unit.stores import UnsyncedFileSystem

Work = Callable[[Path, System], object]
Check = Callable[[Path], None]


class Killed(BaseException):
    """The process is no more."""


class KillingFileSystem(CountingFileSystem):
    """From the chosen operation on nothing happens any more."""

    def strike(self, operation: Any, act: Callable[[], Any]) -> Any:
        raise Killed(str(operation))

    def pass_by(self, operation: Any, act: Callable[[], Any]) -> Any:
        return self.strike(operation, act) if self.was_hit else act()


MODES: dict[str, Callable[[int], CountingFileSystem]] = {
    "killed": lambda n: KillingFileSystem(UnsyncedFileSystem(), at=n),
    "EIO once": lambda n: FailingFileSystem(UnsyncedFileSystem(), fail_at=n, error=errno.EIO),
    "EIO for ever": lambda n: FailingFileSystem(UnsyncedFileSystem(), fail_at=n, error=errno.EIO, is_forever=True),
    "ENOSPC for ever": lambda n: FailingFileSystem(
        UnsyncedFileSystem(), fail_at=n, error=errno.ENOSPC, is_forever=True, has_short_writes=True
    ),
}
SHARED = (
    ("killed", "EIO once"),
    ("EIO for ever", "ENOSPC for ever"),
)  # modes that leave much the same are swept together


def sweep(start: Path, tmp_path: Path, work: Work, check: Check, *, modes: Sequence[str], stride: int = 1) -> int:
    """For each mode a fault at operation 1, 1 + stride and so on, until there is none; returns at how many.

    Args:
        start: the store that the work begins with, each time a copy of it.
        work: the work, on a store and a system whose disk fails.
        check: whether all is well then; it may change the store.
    """
    done, seen = 0, set()
    for mode in modes:
        for n in itertools.count(1, stride):
            path = tmp_path / f"{mode} {n}"
            shutil.copytree(start, path, ignore=shutil.ignore_patterns("index"))
            disk = MODES[mode](n)
            try:
                _break_off(path, work, disk)
                state = _digest(path)
                if state not in seen:
                    check(path)
            except (CasckptError, AssertionError) as error:
                raise AssertionError(f"{mode} at operation {n} ({disk.struck}): {error!r}") from error
            seen.add(state)
            shutil.rmtree(path)
            done += 1
            if not disk.was_hit:
                break
    return done


def _break_off(path: Path, work: Work, disk: CountingFileSystem) -> None:
    system = System(file_system=disk, time_ns=lambda: 10**18, random_bytes=random.Random(1).randbytes)
    try:
        work(path, system)
    except (Killed, CasckptError):
        assert disk.was_hit


def _digest(path: Path) -> bytes:
    """All files of a store with their content; of the index, how far it has come."""
    store_id = StoreId(bytes.fromhex(json.loads((path / "casckpt.json").read_bytes())["store_id"]))
    home = IndexHome(str(path), store_id, TABLES)
    kv = home.open()
    found = hashlib.sha256()
    if kv is not None:
        with kv.read() as txn:
            found.update(repr(read_applied(txn)).encode())
        home.close(kv)
    for folder, names, files in os.walk(path):
        names[:] = sorted(name for name in names if name != "index")
        for name in sorted(files):
            content = Path(folder, name).read_bytes()
            found.update(f"{os.path.relpath(folder, path)}/{name} {len(content)}\0".encode())
            found.update(content)
    return found.digest()


def sweep_power_cuts(
    tmp_path: Path, make: Callable[[Path, System], object], work: Work, finish: Work, check: Check
) -> int:
    """Work killed at operation n may have linked something and not synced its name; another process, with an index of
    its own, finishes it; then the power goes, and with it what was not synced. Returns at how many operations."""
    for n in itertools.count(1):
        root = tmp_path / str(n)
        (root / "cut").mkdir(parents=True)
        disk = RecordingFileSystem(LocalFileSystem(), str(root))
        make(root / "store", System(file_system=disk))
        dying = KillingFileSystem(disk, at=n)
        _break_off(root / "store", work, dying)
        shutil.rmtree(root / "store" / "index")
        finish(root / "store", System(file_system=disk))
        after_power_cut(disk.log).write_to(str(root / "cut"))
        try:
            check(root / "cut" / "store")
        except (CasckptError, AssertionError) as error:
            raise AssertionError(f"killed at operation {n} ({dying.struck}): {error!r}") from error
        shutil.rmtree(root)
        if not dying.was_hit:
            return n
    raise AssertionError("it goes on for ever")
