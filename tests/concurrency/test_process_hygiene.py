"""(S24, S41) One store twice in a process, from threads, after fork, in spawned children, under asyncio, in workers.

Everything either works or raises at once. A hang is killed by the suite's timeout.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import casckpt
from casckpt.testing.trees import difference
from tests.concurrency.racers import Racer

# Python 3.12 warns at a fork of a process with threads; that this is survived is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")


def _state(step: int, size: int = 20_000) -> dict[str, Any]:
    return {"counters": {"step": step}, "policy": {"weight": np.arange(size, dtype=np.float32) * (step + 1)}}


def _assert_holds(store: Any, steps: list[int]) -> None:
    assert store.steps() == steps
    for step in steps:
        problem = difference(_state(step), store.restore(step))
        assert problem is None, problem


def test_two_handles_in_one_process_see_each_other(store_path: Path) -> None:
    with casckpt.open(str(store_path), create=True) as one, casckpt.open(str(store_path)) as two:
        one.commit(1, _state(1))
        assert two.steps() == [1]
        two.resume("latest")
        two.commit(2, _state(2))
        _assert_holds(one, [1, 2])
        _assert_holds(two, [1, 2])


def test_closing_one_handle_leaves_the_other_working(store_path: Path) -> None:
    one = casckpt.open(str(store_path), create=True)
    with casckpt.open(str(store_path), run="other") as two:
        one.commit(1, _state(1))
        one.close()
        two.commit(5, _state(5))
        _assert_holds(two, [5])


def test_eight_threads_commit_in_their_own_runs_and_restore_others(store_path: Path) -> None:
    casckpt.open(str(store_path), create=True).close()
    start = threading.Barrier(8)

    def work(me: int) -> None:
        with casckpt.open(str(store_path), run=f"run-{me}") as store:
            start.wait()
            for step in range(4):
                store.commit(step, _state(step))
                _assert_holds(store, list(range(step + 1)))

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, me) for me in range(8)]:
            future.result()
    with casckpt.open(str(store_path)) as store:
        assert len(list(store.timeline(all_runs=True))) == 32
        assert store.verify(read_data=True).ok


def test_eight_threads_restore_through_one_handle_while_it_commits(store_path: Path) -> None:
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(0, _state(0))
        start = threading.Barrier(8)

        def read(me: int) -> None:
            start.wait()
            for _ in range(10):
                problem = difference(_state(0), store.restore(0))
                assert problem is None, problem

        with ThreadPoolExecutor(7) as pool:
            futures = [pool.submit(read, me) for me in range(7)]
            start.wait()
            for step in range(1, 8):
                store.commit(step, _state(step))
            for future in futures:
                future.result()
        _assert_holds(store, list(range(8)))


def test_commit_and_restore_from_asyncio_threads(store_path: Path) -> None:
    async def work(store: Any) -> list[Any]:
        for step in range(3):
            await asyncio.to_thread(store.commit, step, _state(step))
        return await asyncio.gather(*(asyncio.to_thread(store.restore, step) for step in range(3)))

    with casckpt.open(str(store_path), create=True) as store:
        for step, found in enumerate(asyncio.run(work(store))):
            assert difference(_state(step), found) is None


def _exit_code_of_child(action: Any) -> int:
    """Run `action` in a forked child; 0 when it returned, 1 when it raised (with the traceback on stderr)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@needs_fork
def test_forked_child_uses_an_inherited_handle_or_opens_its_own(store_path: Path) -> None:
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, _state(1))

        def inherited() -> None:
            try:
                _assert_holds(store, [1])
            except casckpt.CasckptError as error:
                assert "fork" in str(error)

        def own() -> None:
            with casckpt.open(str(store_path), run="child") as mine:
                mine.commit(3, _state(3))
                _assert_holds(mine, [3])

        assert _exit_code_of_child(inherited) == 0
        assert _exit_code_of_child(own) == 0
        store.commit(2, _state(2))
        _assert_holds(store, [1, 2])
        assert store.verify(read_data=True).ok


@needs_fork
def test_child_forked_while_the_index_is_written_neither_hangs_nor_harms(store_path: Path) -> None:
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, _state(1))

        def own() -> None:
            with casckpt.open(str(store_path), read_only=True) as mine:
                _assert_holds(mine, [1])

        with store._keeper.kv.write():
            assert _exit_code_of_child(own) == 0
        store.commit(2, _state(2))
        _assert_holds(store, [1, 2])


def _spawned(path: str) -> None:
    with casckpt.open(path, run="spawned") as store:
        store.commit(1, _state(1))
        _assert_holds(store, [1])


@pytest.mark.full
def test_spawned_child_commits_beside_an_open_handle(store_path: Path) -> None:
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, _state(1))
        child = multiprocessing.get_context("spawn").Process(target=_spawned, args=(str(store_path),))
        child.start()
        child.join(200)
        assert child.exitcode == 0
        child.close()
        store.commit(2, _state(2))
        assert len(list(store.timeline(all_runs=True))) == 3


@pytest.mark.full
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_restore(store_path: Path, method: str) -> None:
    data = pytest.importorskip("torch.utils.data")

    with casckpt.open(str(store_path), create=True) as store:
        for step in range(4):
            store.commit(step, _state(step))
        loader = data.DataLoader(
            _Steps(str(store_path)),
            batch_size=None,
            num_workers=2,
            multiprocessing_context=method,
            collate_fn=_as_it_is,
        )
        for step, found in zip(range(4), loader, strict=True):
            assert difference(_state(step), found) is None
        store.commit(9, _state(9))


def _as_it_is(item: Any) -> Any:
    return item


class _Steps:
    """A map-style dataset of restored states."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 4

    def __getitem__(self, step: int) -> Any:
        with casckpt.open(self.path, read_only=True) as store:
            return store.restore(step)


FORK_AND_WAIT = """
store = casckpt.open(path)
store.commit(1, {"counters": {"step": 1}})
pid = os.fork()
if pid == 0:
    sys.stdin.readline()   # outlives its parent, with all that it inherited
    os._exit(0)
say(ready=True)
say(child=pid)
sys.stdin.readline()
sys.stdin.readline()
"""

FORK_IN_A_TRANSACTION = FORK_AND_WAIT.replace(
    "pid = os.fork()", "txn = store._keeper.kv.write()\ntxn.__enter__()\npid = os.fork()"
)


@pytest.mark.few(1)
@needs_fork
@pytest.mark.parametrize("code", [FORK_AND_WAIT, FORK_IN_A_TRANSACTION], ids=["idle", "in a transaction"])
def test_child_that_outlives_its_killed_parent_keeps_nothing_locked(store_path: Path, code: str) -> None:
    casckpt.open(str(store_path), create=True).close()
    racer = Racer(code, str(store_path), 0)
    child = 0
    try:
        assert racer.hear() == {"ready": True}
        child = racer.hear()["child"]
        os.kill(racer.pid, signal.SIGKILL)
        racer.process.wait()
        with casckpt.open(str(store_path)) as store:
            os.kill(child, 0)  # still there
            store.resume("latest")
            store.commit(2, {"counters": {"step": 2}})
            assert store.steps() == [1, 2]
            assert store.verify(read_data=True).ok
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        racer.kill()
