"""Commits of a ring on a disk that fails at the n-th operation, once; n = 1, 2, 3 … until the history passes untouched.

A commit that failed is repeated on the same handle. A ring remembers between commits which rows are stored: that must
never make it leave rows out that a failed commit took with it. And what a power cut leaves of such a history.
"""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.errors import CasckptError
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from casckpt.testing.failing import CountingFileSystem, FailingFileSystem, InterruptingFileSystem
from casckpt.testing.invariants import check_depths
from casckpt.testing.recording import RecordingFileSystem, crash_states
from tests.unit.rings import PlainRing, assert_rows

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # a stale index is reported so

CAPACITY, ROWS, WIDTH = 100, 40, 2500  # 100 KB a commit: packs, and a wrap in the third
STEPS = range(1, 5)
MODES: dict[str, tuple[Callable[[int], CountingFileSystem], type[BaseException]]] = {
    "EIO": (lambda n: FailingFileSystem(LocalFileSystem(), fail_at=n, error=errno.EIO), CasckptError),
    "SIGINT": (lambda n: InterruptingFileSystem(LocalFileSystem(), at=n), KeyboardInterrupt),
}


def run(path: Path, fs: CountingFileSystem, expected: type[BaseException], trust: str, is_async: bool) -> PlainRing:
    """Four commits on a bad disk; each that fails is made again."""
    live = PlainRing(CAPACITY, width=WIDTH)
    ring = live.ring(trust=trust)
    with casckpt.open(path, create=True, system=System(file_system=fs)) as store:
        for step in STEPS:
            live.add(ROWS)
            for trial in itertools.count():
                try:
                    if is_async:
                        store.commit_async(step, {"replay": ring}).result()
                    else:
                        store.commit(step, {"replay": ring})
                    break
                except expected:
                    assert fs.was_hit and trial < 2, "an error without a fault"
    return live


def check(path: Path, live: PlainRing) -> None:
    """Every step has its rows, and nothing is damaged."""
    with casckpt.open(path) as store:
        for step in STEPS:
            total = ROWS * step
            view = store.restore(step)["replay"]
            assert (view.first, view.total) == (max(0, total - CAPACITY), total)
            assert_rows(view.rows(view.first, total), live.expected(view.first, total))
        assert store.verify().ok
        check_depths(store)


def sweep(tmp_path: Path, mode: str, trust: str, is_async: bool, stride: int) -> int:
    make, expected = MODES[mode]
    for n in itertools.count(1, stride):
        fs: Any = make(n)
        path = tmp_path / f"{trust}-{n}"
        try:
            live = run(path, fs, expected, trust, is_async)
        except expected:
            assert fs.was_hit  # no store yet, or none that could be opened
            continue
        check(path, live)
        if not fs.was_hit:
            return n
    raise AssertionError("unreachable")


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
def test_some_failing_operations_lose_no_rows_of_a_ring(tmp_path: Path, mode: str) -> None:
    assert sweep(tmp_path, mode, "counter", is_async=False, stride=29) > 30


@pytest.mark.full
@pytest.mark.parametrize(
    ("trust", "is_async", "stride"), [("counter", False, 1), ("digest", False, 4), ("counter", True, 3)]
)
def test_every_failing_operation_loses_no_rows_of_a_ring(
    tmp_path: Path, trust: str, is_async: bool, stride: int
) -> None:
    assert sweep(tmp_path, "EIO", trust, is_async, stride) > 30


@pytest.mark.full
def test_no_power_cut_loses_a_row_of_an_acknowledged_commit(tmp_path: Path) -> None:
    root = tmp_path / "recorded"
    root.mkdir()
    fs = RecordingFileSystem(LocalFileSystem(), str(root))
    live = PlainRing(CAPACITY, width=WIDTH)
    ring = live.ring(trust="counter")
    with casckpt.open(root / "store", create=True, system=System(file_system=fs)) as store:
        for step in STEPS:
            live.add(ROWS)
            store.commit(step, {"replay": ring})
            fs.mark(step)
    states = list(crash_states(fs.log))
    assert len(states) > 100
    for number, state in enumerate(states[::7]):
        folder = tmp_path / str(number)
        folder.mkdir()
        state.write_to(str(folder))
        with casckpt.open(folder / "store", create=True) as store:
            found = store.steps()
            assert found[: len(state.marks)] == list(state.marks), state.label
            for step in found:
                total = ROWS * step
                view = store.restore(step)["replay"]
                assert_rows(view.rows(max(0, total - CAPACITY), total), live.expected(max(0, total - CAPACITY), total))
        shutil.rmtree(folder)
