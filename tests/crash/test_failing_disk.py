"""(c, S01, S20) The n-th file operation fails, once or for ever, or SIGINT arrives there, or a write lies.

n = 1, 2, 3 … until the history passes untouched. A failure prints n and the operation.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.errors import CasckptError, OutOfSpaceError, StorageError
from casckpt.storage.fs import LocalFileSystem, replace_file
from casckpt.storage.process import System
from casckpt.testing.failing import (
    CountingFileSystem,
    FailingFileSystem,
    InterruptingFileSystem,
    LyingFileSystem,
)
from casckpt.testing.invariants import check_promises, check_store, check_usable
from casckpt.testing.trees import difference
from casckpt.testing.workload import HISTORIES, HISTORY, TRAINING, Rehearsal, tree
from casckpt.testing.wrapping import READING

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # a stale index is reported so

QUICK_STRIDES, THOROUGH_STRIDE = {"every kind of entry": 59, "training": 89}, 5
FULL_STRIDES = {"every kind of entry": 1, "training": 5}  # its operations are many and alike
MODES: dict[str, Callable[[int], FailingFileSystem]] = {
    "EIO once": lambda n: FailingFileSystem(LocalFileSystem(), fail_at=n, error=errno.EIO),
    "EIO for ever": lambda n: FailingFileSystem(LocalFileSystem(), fail_at=n, error=errno.EIO, is_forever=True),
    "ENOSPC once": lambda n: FailingFileSystem(LocalFileSystem(), fail_at=n, error=errno.ENOSPC, has_short_writes=True),
    "ENOSPC for ever": lambda n: FailingFileSystem(
        LocalFileSystem(), fail_at=n, error=errno.ENOSPC, has_short_writes=True, is_forever=True
    ),
}


def _opener(path: str, fs: Any) -> Callable[[str], Any]:
    return lambda run: casckpt.open(path, create=True, run=run, system=System(file_system=fs))


def _operation_count(path: Path, history: str) -> int:
    fs = CountingFileSystem(LocalFileSystem())
    with Rehearsal(_opener(str(path), fs)) as rehearsal:
        for act in HISTORIES[history]:
            rehearsal.perform(act)
    return fs.count


def _check(path: str, oracle: Rehearsal, number: int) -> None:
    """Every fifth store is checked with all that takes long (rebuilt index, read-only, all data verified)."""
    (check_store if number % THOROUGH_STRIDE == 0 else check_promises)(path, oracle)


def _run(path: str, fs: CountingFileSystem, expected: type[BaseException], number: int, history: str) -> None:
    """The history on a bad disk. An act that fails is repeated on the same handle; from where that fails too, the
    disk counts as broken for good, and the rest is done on a good one."""
    bad, good = Rehearsal(_opener(path, fs)), Rehearsal(_opener(path, LocalFileSystem()))
    good.acknowledged, good.possible, good.done = bad.acknowledged, bad.possible, bad.done  # one oracle
    with bad, good:
        for at, act in enumerate(HISTORIES[history]):
            try:
                bad.perform(act)
                continue
            except expected:
                assert fs.was_hit, "an error without a fault"
            try:
                bad.perform(act)
            except expected:
                bad.close()
                check_promises(path, good)
                for left in HISTORIES[history][at:]:
                    good.perform(left)
                break
    _check(path, good, number)
    assert [act.name for act in good.done] == [act.name for act in HISTORIES[history]]


@pytest.mark.few(2)
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("mode", MODES)
def test_some_failing_operations_cost_nothing_that_was_acknowledged(tmp_path: Path, mode: str, history: str) -> None:
    _sweep(tmp_path, mode, history, QUICK_STRIDES[history])


@pytest.mark.full
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("mode", MODES)
def test_every_failing_operation_costs_nothing_that_was_acknowledged(tmp_path: Path, mode: str, history: str) -> None:
    _sweep(tmp_path, mode, history, FULL_STRIDES[history])


def _sweep(tmp_path: Path, mode: str, history: str, stride: int) -> None:
    for number, n in enumerate(range(1, _operation_count(tmp_path / "counted", history) + 1, stride)):
        fs = MODES[mode](n)
        wanted = OutOfSpaceError if mode.startswith("ENOSPC") else StorageError
        try:
            _run(str(tmp_path / str(n)), fs, wanted, number, history)
            check_usable(str(tmp_path / str(n)), HISTORIES[history][0].run)
        except Exception as error:
            raise AssertionError(f"{mode} at operation {n} ({fs.struck}): {error!r}") from error
        assert fs.was_hit


def _interrupted(path: str, fs: CountingFileSystem, number: int, history: str) -> None:
    rehearsal = Rehearsal(_opener(path, fs))
    with rehearsal:
        for act in HISTORIES[history]:
            try:
                rehearsal.perform(act)
            except KeyboardInterrupt:
                rehearsal.perform(act)
    _check(path, rehearsal, number)


def _sweep_interrupts(tmp_path: Path, history: str, stride: int) -> None:
    count = _operation_count(tmp_path / "counted", history)
    for number, n in enumerate(range(1, count + 1, stride)):
        fs = InterruptingFileSystem(LocalFileSystem(), at=n)
        try:
            _interrupted(str(tmp_path / str(n)), fs, number, history)
        except BaseException as error:
            raise AssertionError(f"SIGINT at operation {n} ({fs.struck}): {error!r}") from error
        assert fs.was_hit


@pytest.mark.few(1)
@pytest.mark.parametrize("history", HISTORIES)
def test_some_interrupts_leave_no_half_snapshot_and_the_next_commit_works(tmp_path: Path, history: str) -> None:
    _sweep_interrupts(tmp_path, history, QUICK_STRIDES[history])


@pytest.mark.full
@pytest.mark.parametrize("history", HISTORIES)
def test_every_interrupt_leaves_no_half_snapshot_and_the_next_commit_works(tmp_path: Path, history: str) -> None:
    _sweep_interrupts(tmp_path, history, FULL_STRIDES[history])


def test_interrupted_replacement_of_a_file_leaves_one_whole_file_and_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "mark"
    target.write_bytes(b"old")
    for n in itertools.count(1):
        fs = InterruptingFileSystem(LocalFileSystem(), at=n)
        with contextlib.suppress(KeyboardInterrupt):
            replace_file(fs, str(tmp_path / "temporary"), str(target), [b"new"])
        if not fs.was_hit:
            break
        assert list(tmp_path.iterdir()) == [target], fs.struck
        assert target.read_bytes() == b"old", fs.struck
    assert n == 5  # made, written, synced, renamed
    assert target.read_bytes() == b"new"


@pytest.mark.few(4)
@pytest.mark.parametrize("position", [0.0, 0.0008, 0.3, 0.9, 0.995, 0.9999])  # headers, payloads, footer, trailer
@pytest.mark.parametrize("lie", ["flip", "lose"])
def test_write_that_lies_into_a_pack_is_caught_before_the_commit(tmp_path: Path, lie: str, position: float) -> None:
    act = HISTORY[0]
    path = str(tmp_path / "store")
    casckpt.open(path, create=True).close()  # the store's own first files are written, and checked, elsewhere
    fs = LyingFileSystem(LocalFileSystem(), lie_at=1, lie=lie, position=position)
    with Rehearsal(_opener(path, fs)) as rehearsal:
        with pytest.raises(CasckptError):
            rehearsal.perform(act)
        assert fs.struck is not None and len(fs.struck.data) > 20_000, "the first write is the pack's"
        assert not rehearsal.acknowledged
        rehearsal.perform(act)
    check_store(path, rehearsal)


@pytest.mark.full
def test_reads_that_fail_raise_and_change_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    with Rehearsal(_opener(path, LocalFileSystem())) as oracle:
        for act in (*HISTORY[:4], *TRAINING[:3]):
            oracle.perform(act)
    fs = CountingFileSystem(LocalFileSystem(), operations=READING)
    _read_everything(path, fs)
    for n in range(1, fs.count + 1):
        bad = FailingFileSystem(LocalFileSystem(), fail_at=n, error=errno.EIO, operations=READING)
        with contextlib.suppress(CasckptError):
            _read_everything(path, bad)
        assert bad.was_hit, n
    check_store(path, oracle)


def _read_everything(path: str, fs: CountingFileSystem) -> None:
    with casckpt.open(path, system=System(file_system=fs)) as store:
        for snapshot in store.timeline(all_runs=True):
            problem = difference(tree(snapshot.run, snapshot.step), store.restore(snapshot.id))
            assert problem is None, problem
