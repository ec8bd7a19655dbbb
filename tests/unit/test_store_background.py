"""(S02, S03, S04, S08) Commits in the background: values of the call, order, and failures that nobody can miss."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import casckpt
from casckpt.errors import (
    BusyError,
    ConcurrentMutationError,
    InvalidInputError,
    NotFoundError,
    OutOfSpaceError,
    SaveFailedError,
    StepOrderError,
)
from casckpt.state import _torch
from casckpt.state.staging import Staging
from casckpt.storage.fs import typed_error
from casckpt.storage.process import System
from casckpt.store import background
from casckpt.testing.trees import difference
from casckpt.testing.wrapping import Operation
from tests.unit.stores import UnsyncedFileSystem, open_store

T = TypeVar("T")
GATE_TIMEOUT_S = 200.0


class Gate(UnsyncedFileSystem):
    """Stops before the link that publishes an entry while `is_open` is not set; refuses new files while `is_full`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = threading.Event()
        self.is_open.set()
        self.is_full = False
        self.waiting = threading.Event()

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        if operation.name == "link":
            self.waiting.set()
            assert self.is_open.wait(GATE_TIMEOUT_S), "the gate stayed shut"
        if operation.name in ("create", "link") and self.is_full:
            raise typed_error(OSError(errno.ENOSPC, "full"), operation.name, operation.path)
        return super().perform(operation, act)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def store(store_path: Path, gate: Gate) -> Iterator[Any]:
    with open_store(store_path, system=System(file_system=gate)) as opened:
        yield opened
        gate.is_open.set()


# --- values of the call ---


def test_values_are_those_of_the_call_whatever_happens_afterwards(store: Any, gate: Gate) -> None:
    weight, array, counters = torch.ones(3), np.ones(100_000), {"frames": [1, 2]}
    gate.is_open.clear()
    handle = store.commit_async(1, {"policy": weight, "replay": array, "counters": counters})
    weight.add_(41)
    array[:] = 7
    counters["frames"].append(3)
    gate.is_open.set()
    handle.result()
    expected = {"counters": {"frames": [1, 2]}, "policy": torch.ones(3), "replay": np.ones(100_000)}
    assert difference(expected, store.restore(1)) is None


def test_replaced_storage_is_captured_at_every_call(store: Any) -> None:
    state = {"policy": {"weight": torch.zeros(1000)}}
    for step in range(5):
        state["policy"]["weight"] = torch.full((1000,), float(step))
        store.commit_async(step, state)
    store.wait()
    assert [store.restore(step)["policy"]["weight"][0].item() for step in range(5)] == [0, 1, 2, 3, 4]


def test_state_bumped_in_a_tight_loop_is_one_instant_each_time(store: Any) -> None:
    first, second = torch.zeros(20_000), torch.zeros(3)
    for step in range(30):
        first.add_(1)
        second.add_(1)
        store.commit_async(step, {"first": first, "second": second})
        first.add_(1)
        second.add_(1)
    store.wait()
    for step in range(30):
        found = store.restore(step)
        assert found["first"].unique().tolist() == found["second"].unique().tolist() == [2 * step + 1]


def test_unchanged_state_in_the_background_costs_no_new_bytes(store: Any) -> None:
    state = {"policy": torch.arange(100_000)}
    store.commit_async(1, state).result()
    assert store.commit_async(2, state).result().new_bytes == 0


def test_tensor_that_moves_while_it_is_staged_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(200_000)
    copy = _torch.copy_pieces

    def copy_and_move(*pairs: Any) -> None:
        copy(*pairs)
        weight.add_(1)  # as another thread would in the middle of the copy

    monkeypatch.setattr(_torch, "copy_pieces", copy_and_move)
    with pytest.raises(ConcurrentMutationError, match="policy"):
        store.commit_async(1, {"policy": weight})
    monkeypatch.undo()
    assert store.steps() == []
    assert store.commit_async(1, {"policy": weight}).result().step == 1


# --- order ---


def test_handle_tells_when_it_is_done_and_gives_the_snapshot(store: Any, gate: Gate) -> None:
    gate.is_open.clear()
    handle = store.commit_async(5, {"a": 1}, metrics={"loss": 1.0}, labels={"k": "v"})
    assert not handle.done()
    assert "under way" in repr(handle)
    with pytest.raises(BusyError, match="step 5"):
        handle.result(timeout=0.01)
    gate.is_open.set()
    snapshot = handle.result()
    assert (snapshot.step, snapshot.metrics, snapshot.labels) == (5, {"loss": 1.0}, {"k": "v"})
    assert handle.done()
    assert handle.exception() is None
    assert handle.step == 5
    assert handle.stall_s > 0


def test_nothing_is_published_before_the_commit_point(store: Any, gate: Gate) -> None:
    gate.is_open.clear()
    store.commit_async(1, {"a": 1})
    assert gate.waiting.wait(GATE_TIMEOUT_S)
    with open_store(store.path, read_only=True) as reader:
        assert reader.steps() == []
    gate.is_open.set()
    store.wait()
    assert store.steps() == [1]


def test_restore_of_a_step_under_way_waits_for_it(store: Any, gate: Gate) -> None:
    store.commit(4, {"a": 4})
    gate.is_open.clear()
    store.commit_async(5, {"a": 5})
    assert store.restore("latest") == {"a": 4}  # the newest that is published
    opener = threading.Timer(0.05, gate.is_open.set)
    opener.start()
    assert store.restore(5) == {"a": 5}
    opener.join()
    assert store.restore() == {"a": 5}


def test_annotation_of_a_step_under_way_waits_for_it(store: Any) -> None:
    store.commit_async(5, {"a": 5})
    assert store.annotate(5, metrics={"x": 1}).metrics == {"x": 1}


def test_two_may_be_under_way_and_a_third_waits(store: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.is_open.clear()
    handles = [store.commit_async(step, {"a": np.full(9, step)}) for step in (1, 2)]
    with monkeypatch.context() as patch, pytest.raises(BusyError, match=r"\[1, 2\].*lock_timeout_s"):
        patch.setattr(store._turns, "timeout_s", 0.2)
        store.commit_async(3, {"a": 3})
    opener = threading.Timer(0.05, gate.is_open.set)
    opener.start()
    third = store.commit_async(3, {"a": np.full(9, 3)})
    opener.join()
    assert [handle.result().step for handle in (*handles, third)] == [1, 2, 3]
    assert [store.restore(step)["a"][0] for step in (1, 2, 3)] == [1, 2, 3]


def test_step_not_after_the_one_under_way_is_refused_at_once(store: Any, gate: Gate) -> None:
    gate.is_open.clear()
    store.commit_async(5, {"a": 1})
    for step in (5, 4):
        with pytest.raises(StepOrderError, match="under way"):
            store.commit_async(step, {"a": 2})
    gate.is_open.set()


def test_blocking_commit_waits_for_the_background_and_continues_it(store: Any) -> None:
    store.commit_async(1, {"a": np.zeros(300_000)})
    assert store.commit(2, {"a": np.zeros(300_000)}).parent == store.snapshot(1).id


def test_resume_tag_and_retire_wait_for_the_background(store: Any, gate: Gate) -> None:
    for step, use in enumerate((lambda: store.resume(), lambda: store.tag("t"), lambda: store.retire("latest"))):
        gate.is_open.clear()
        store.commit_async(step, {"a": step})
        opener = threading.Timer(0.02, gate.is_open.set)
        opener.start()
        use()
        opener.join()
    assert store.tags()["t"] == store.snapshot(1).id
    assert store.steps() == [0, 1]


def test_config_and_schema_version_of_a_commit_under_way_are_kept_by_the_next(store: Any, gate: Gate) -> None:
    gate.is_open.clear()
    store.commit_async(1, {"a": 1}, config={"lr": 1}, schema_version=3)
    store.commit_async(2, {"a": 2})
    gate.is_open.set()
    store.wait()
    assert [(store.context(step).config, store.context(step).schema_version) for step in (1, 2)] == [({"lr": 1}, 3)] * 2


def test_many_threads_stage_one_after_the_other(store: Any) -> None:
    """Staging buffers are shared: two threads in them at once would mix two states."""
    lock, done = threading.Lock(), []
    steps = iter(range(100))

    def train() -> None:
        for _ in range(5):
            with lock:  # one order of steps; the staging itself may overlap with the other threads' next call
                step = next(steps)
                handle = store.commit_async(step, {"a": torch.full((200_000,), float(step)), "b": torch.tensor(step)})
            done.append(handle)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(handle.result().step for handle in done) == list(range(20))
    for step in range(20):
        found = store.restore(step)
        assert found["a"].unique().tolist() == [step] == [found["b"].item()]


def test_staging_is_entered_by_one_thread_at_a_time(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most, stage = [], [], Staging.stage

    def counted(self: Any, captured: Any) -> Any:
        inside.append(1)
        most.append(len(inside))
        try:
            threading.Event().wait(0.02)  # give the other thread time to come in
            return stage(self, captured)
        finally:
            inside.pop()

    monkeypatch.setattr(Staging, "stage", counted)
    barrier = threading.Barrier(2)
    errors: list[BaseException | None] = []

    def save(step: int) -> None:
        barrier.wait()
        try:
            errors.append(store.commit_async(step, {"a": step}).exception())
        except StepOrderError as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(step,)) for step in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert [type(error) for error in errors if error is not None] in ([], [StepOrderError])  # step 1 may come second


# --- failures ---


def test_failure_surfaces_at_result_with_its_cause(store: Any, gate: Gate) -> None:
    store.commit(1800, {"a": 1})
    gate.is_full = True
    handle = store.commit_async(1820, {"a": 2})
    with pytest.raises(SaveFailedError, match=r"step 1820.*not committed") as caught:
        handle.result()
    assert isinstance(caught.value.__cause__, OutOfSpaceError)
    assert isinstance(handle.exception(), OutOfSpaceError)
    assert caught.value.step == 1820
    gate.is_full = False
    store.close()  # it was asked for already


def test_failed_step_is_in_no_list_and_training_goes_on(store: Any, gate: Gate) -> None:
    store.commit(1620, {"a": 0})
    store.commit(1800, {"a": 1})
    gate.is_full = True
    handle = store.commit_async(1820, {"a": 2})
    assert handle.exception() is not None
    gate.is_full = False
    assert store.steps() == [1620, 1800]
    assert store.restore() == {"a": 1}
    with pytest.raises(NotFoundError):
        store.restore(1820)
    store.resume(1620)
    assert store.commit(1820, {"a": 3}).branch == "main-1620"
    assert store.snapshot("main").step == 1800


@pytest.mark.parametrize("use", ["commit", "commit_async", "wait", "resume"])
def test_failure_that_nobody_asked_for_surfaces_at_the_next_call(store: Any, gate: Gate, use: str) -> None:
    store.commit(1, {"a": 1})
    gate.is_full = True
    handle = store.commit_async(2, {"a": 2})
    assert handle._done.wait(GATE_TIMEOUT_S)
    gate.is_full = False
    calls: dict[str, Callable[[], Any]] = {
        "commit": lambda: store.commit(3, {"a": 3}),
        "commit_async": lambda: store.commit_async(3, {"a": 3}),
        "wait": lambda: store.wait(),
        "resume": lambda: store.resume(),
    }
    with pytest.raises(SaveFailedError, match="step 2"):
        calls[use]()
    assert store.steps() == [1]
    store.wait()  # told once
    assert store.commit(3, {"a": 3}).step == 3


def test_failure_that_nobody_asked_for_surfaces_at_close_and_the_store_is_closed(store: Any, gate: Gate) -> None:
    gate.is_full = True
    store.commit_async(2, {"a": 2})
    with pytest.raises(SaveFailedError, match="step 2"):
        store.close()
    with pytest.raises(InvalidInputError, match="closed"):
        store.steps()


def test_failures_of_both_saves_under_way_come_in_one_error(store: Any, gate: Gate) -> None:
    store.commit(1, {"a": 1})
    gate.is_open.clear()
    gate.waiting.clear()
    store.commit_async(2, {"a": 2})
    assert gate.waiting.wait(GATE_TIMEOUT_S)
    store.commit_async(3, {"a": 3})
    gate.is_full = True
    gate.is_open.set()
    with pytest.raises(SaveFailedError, match=r"step 2 .*step 3") as caught:
        store.wait()
    assert caught.value.steps == [2, 3]
    gate.is_full = False
    assert store.steps() == [1]
    store.close()


def test_save_after_a_failed_one_continues_the_last_good_snapshot(store: Any, gate: Gate) -> None:
    first = store.commit(1, {"a": 1})
    gate.is_full = True
    failed = store.commit_async(2, {"a": 2})
    assert failed.exception() is not None
    gate.is_full = False
    assert store.commit_async(3, {"a": 3}).result().parent == first.id


def test_handle_still_answers_after_the_store_is_closed(store: Any) -> None:
    handle = store.commit_async(1, {"a": 1})
    store.close()
    assert handle.done()
    assert handle.result().step == 1
    assert "done" in repr(handle)
    with pytest.raises(InvalidInputError, match="closed"):
        store.commit_async(2, {"a": 2})


def test_wrong_arguments_are_refused_at_the_call(store: Any) -> None:
    with pytest.raises(casckpt.UnsupportedStateError) as caught:
        store.commit_async(1, {"a": {"f": print}})
    assert caught.value.path == "a/f"
    with pytest.raises(InvalidInputError):
        store.commit_async(-1, {"a": 1})
    store.wait()
    assert store.steps() == []


def test_save_under_way_when_the_interpreter_ends_is_finished(store_path: Path) -> None:
    code = """if True:
        import sys, numpy as np, casckpt
        store = casckpt.open(sys.argv[1], create=True)
        store.commit_async(1, {"a": np.arange(3_000_000)})
        store.commit_async(2, {"a": np.arange(3_000_000) + 1})
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(store_path)], capture_output=True, text=True, timeout=180
    )
    assert (done.returncode, done.stderr) == (0, "")
    with open_store(store_path, read_only=True) as store:
        assert store.steps() == [1, 2]
        assert store.restore(2)["a"][-1] == 3_000_000


@pytest.mark.few(1)
@pytest.mark.parametrize("ending", ["", "._done.wait()"])
def test_failure_that_nobody_asked_for_before_the_end_is_printed(store_path: Path, ending: str) -> None:
    code = """if True:
        import sys, casckpt
        store = casckpt.open(sys.argv[1], create=True)
        store.commit(1, {"a": 1, "b": 1})
        store.commit_async(2, {"a": 1})ENDING
    """
    code = code.replace("ENDING", ending)
    done = subprocess.run([sys.executable, "-c", code, str(store_path)], capture_output=True, text=True, timeout=180)
    with open_store(store_path, read_only=True) as store:
        assert store.steps() == [1]
    assert done.stderr.startswith("casckpt: The background commit of step 2 failed")
    assert done.stderr.count("\n") == 1


def test_failed_save_is_made_again_as_soon_as_its_result_is_known(
    store_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is held between telling the result and putting the save away."""
    main, is_let_go = threading.current_thread(), threading.Event()

    def hold(*_: object) -> None:
        assert threading.current_thread() is main or is_let_go.wait(GATE_TIMEOUT_S)

    monkeypatch.setattr(background.atexit, "register", hold)
    with casckpt.open(store_path, create=True, system=System(file_system=gate)) as store:
        try:
            gate.is_full = True
            with pytest.raises(SaveFailedError):
                store.commit_async(1, {"policy": {"x": 1}}).result()
            gate.is_full = False
            again = store.commit_async(1, {"policy": {"x": 1}})
        finally:
            is_let_go.set()
        assert again.result().step == 1
