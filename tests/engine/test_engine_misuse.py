"""What loops do to an engine that nobody meant them to: threads, forks, providers that hang, memory that moves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from casckpt.engine.engine import CheckpointEngine
from casckpt.engine.strategy import Recent, SaveStrategy
from casckpt.errors import AlreadyExistsError, BusyError, InvalidInputError, MismatchError, NotFoundError
from tests.engine.clocks import GATE_TIMEOUT_S, Clock, Disk, open_timed
from tests.unit.stores import open_store

EVERY = SaveStrategy(every_steps=1)


class Hanging:
    """A provider that does not come back until it is let go, on whatever thread asks it."""

    def __init__(self) -> None:
        self.is_free, self.is_asked = threading.Event(), threading.Event()
        self.is_free.set()

    def __call__(self) -> dict[str, int]:
        self.is_asked.set()
        assert self.is_free.wait(GATE_TIMEOUT_S), "the provider was never let go"
        return {"n": 1}


def in_thread(name: str, call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, name=name)
    thread.start()
    return thread


# --- what hangs ---


def test_provider_that_hangs_is_named_to_whoever_waits_for_it(store_path: Path, clock: Clock, disk: Disk) -> None:
    provider = Hanging()
    with open_timed(store_path, clock, disk, lock_timeout_s=0.05) as store:
        engine = CheckpointEngine(store, clock=clock)
        engine.register("policy", provider, load=lambda state: None)
        provider.is_free.clear(), provider.is_asked.clear()
        trainer = in_thread("trainer", lambda: engine.save(7))
        try:
            assert provider.is_asked.wait(GATE_TIMEOUT_S)
            with pytest.raises(BusyError, match="staging of step 7 in thread 'trainer'") as caught:
                store.commit_async(8, {"other": {"a": 1}})
            assert caught.value.holder == "staging of step 7 in thread 'trainer'"
        finally:
            provider.is_free.set()
            trainer.join()
        engine_steps = [each.step for each in engine.list_checkpoints()] if store.wait() is None else []
        assert engine_steps == [7]


def test_close_ends_at_its_deadline_names_the_steps_and_may_be_called_again(
    store: Any, clock: Clock, disk: Disk
) -> None:
    engine = CheckpointEngine(store, clock=clock)
    engine.register("counters", {"n": 1}, EVERY)
    disk.is_open.clear()
    engine.step(1), engine.step(2)
    for call in (engine.wait, engine.close, store.close):
        with pytest.raises(BusyError, match=r"steps \[1, 2\]|step 1 "):
            call(timeout_s=0.01)
    disk.is_open.set()
    engine.close()
    assert store.steps() == [1, 2]
    with pytest.raises(InvalidInputError, match="closed"):
        engine.step(3)


# --- threads and processes ---


def test_two_threads_that_save_are_one_too_many_and_the_first_goes_on(store: Any, clock: Clock) -> None:
    engine = CheckpointEngine(store, clock=clock)
    engine.register("counters", {"n": 1}, EVERY)
    count, refused, gate = 8, [], threading.Barrier(8)

    def save(step: int) -> None:
        gate.wait(GATE_TIMEOUT_S)
        try:
            engine.save(step)
        except InvalidInputError as error:
            refused.append(str(error))
        gate.wait(GATE_TIMEOUT_S)  # all live until all have tried: the one that trains may be followed when it ended

    threads = [in_thread(f"saver-{step}", lambda step=step: save(step)) for step in range(1, count + 1)]
    for thread in threads:
        thread.join()
    assert len(refused) == count - 1
    assert all("only the thread that trains" in text for text in refused)
    assert len(store.wait() or store.steps()) == 1


FORKING = """
import os, sys, threading
import casckpt
from casckpt.testing.wrapping import WrappedFileSystem
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System

gate, is_held = threading.Event(), threading.Event()


class Held(WrappedFileSystem):
    def perform(self, operation, act):
        if operation.name == "link" and threading.current_thread().name == "casckpt-commit":
            is_held.set()
            gate.wait()
        return act()


with casckpt.open(sys.argv[1], create=True, system=System(file_system=Held(LocalFileSystem()))) as store:
    with casckpt.CheckpointEngine(store) as engine:
        engine.register("counters", {"n": 1})
        engine.save(1)
        is_held.wait()
        child = os.fork()  # while a save is under way, whose thread the child does not have
        if not child:
            for call in (lambda: engine.save(2), lambda: engine.step(2), engine.restore):
                try:
                    call()
                except casckpt.InvalidInputError as error:
                    assert f"process {os.getppid()}" in str(error), error
                else:
                    sys.exit(3)
            engine.wait()
            sys.exit(0)  # through both `with` blocks, which wait for nothing here
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.set()
        engine.save(2)
    print(store.steps())
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_child_forked_in_the_middle_of_a_save_is_refused_and_ends_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=False,
        timeout=GATE_TIMEOUT_S * 4,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[1, 2]\n", "", 0)


# --- memory that moves under a save ---


MOVES: dict[str, Any] = {
    "resized": lambda state: state["w"].resize_(10),
    "other storage": lambda state: state["w"].set_(torch.full((1000,), 5.0)),
    "replaced": lambda state: state.update(w=torch.full((1000,), 6.0)),
    "gone": lambda state: state.pop("w"),
    "grown": lambda state: state["w"].resize_(5000).fill_(7.0),
    "other dtype": lambda state: state.update(w=torch.ones(1000, dtype=torch.int16)),
}


@pytest.mark.parametrize("how", MOVES)
def test_tensor_that_moves_while_its_save_is_under_way_is_stored_as_it_was_and_next_as_it_is(
    store: Any, clock: Clock, disk: Disk, how: str
) -> None:
    engine = CheckpointEngine(store, clock=clock)
    state = {"w": torch.arange(1000.0), "keep": torch.ones(3)}
    engine.register("policy", state, EVERY)
    disk.is_open.clear()
    engine.step(1)
    MOVES[how](state)
    live = {name: tensor.clone() for name, tensor in state.items()}
    engine.step(2)
    state.clear()
    disk.is_open.set()
    engine.wait()
    first, second = store.restore(1)["policy"], store.restore(2)["policy"]
    assert torch.equal(first["w"], torch.arange(1000.0)) and torch.equal(first["keep"], torch.ones(3))
    assert second.keys() == live.keys()
    for name, tensor in live.items():
        assert second[name].dtype == tensor.dtype and torch.equal(second[name], tensor)


# --- values of other libraries ---


def test_numbers_of_numpy_and_torch_are_taken_for_what_they_are(store_path: Path, clock: Clock) -> None:
    strategy = SaveStrategy(every_steps=np.int64(2), every_seconds=np.float32(1.5))
    assert strategy == SaveStrategy(every_steps=2, every_seconds=1.5)
    assert [type(value) for value in (strategy.every_steps, strategy.every_seconds)] == [int, float]
    assert Recent(rows=np.uint8(3)) == Recent(rows=3)
    with open_store(store_path) as store:
        engine = CheckpointEngine(
            store, clock=clock, save_budget=np.float32(0.5), overlap="queue", queue_size=torch.tensor(3)
        )
        assert (engine.config.save_budget, engine.config.queue_size) == (0.5, 3)
        engine.register("counters", {"n": 1}, strategy)
        metrics = {"loss": np.float32(0.25), "n": np.int64(3), "won": np.bool_(True), "return": torch.tensor(2.5)}
        for step in (np.int64(1), np.int32(2)):
            engine.step(step, metrics=metrics)
        engine.wait()
        assert store.steps() == [2]
        assert store.snapshot(2).metrics == {"loss": 0.25, "n": 3, "won": True, "return": 2.5}
        engine.save(np.int64(3), async_mode=False)
        assert engine.restore(np.int64(2)).step == 2
    for wrong in (np.float32("nan"), np.int64(0), np.float64("inf"), np.array([1, 2]), torch.ones(2), np.bool_(True)):
        with pytest.raises(InvalidInputError, match="every_seconds="):
            SaveStrategy(every_seconds=wrong)
    with pytest.raises(InvalidInputError, match="every_steps="):
        SaveStrategy(every_steps=np.float32(2.0))


def test_name_is_taken_once_and_free_again_when_it_was_dropped(store: Any, clock: Clock) -> None:
    engine = CheckpointEngine(store, clock=clock)
    first, second = {"n": 1}, {"n": 2}
    engine.register("counters", first, EVERY)
    with pytest.raises(AlreadyExistsError, match="'counters' is registered already"):
        engine.register("counters", second, EVERY)
    engine.save(1, async_mode=False)
    assert store.restore(1) == {"counters": {"n": 1}}
    engine.drop("counters")
    engine.register("counters", second, EVERY)
    engine.save(2, async_mode=False)
    assert store.restore(2) == {"counters": {"n": 2}}
    with pytest.raises(NotFoundError, match=r"component 'countrs': there is none to drop. There are counters"):
        engine.drop("countrs")


def test_request_and_what_is_due_outlive_a_provider_that_raises(store: Any, clock: Clock) -> None:
    engine = CheckpointEngine(store, clock=clock)
    broken: list[Exception] = []

    def provide() -> dict[str, int]:
        if broken:
            raise broken[0]
        return {"n": engine.global_step}

    engine.register("often", provide, EVERY, load=lambda state: None)
    engine.register("rare", {"a": 1}, SaveStrategy(every_steps=1000))
    engine.step(1)
    engine.request_save("asked for")
    broken.append(KeyError("the provider's own"))
    with pytest.raises(KeyError, match="the provider's own"):
        engine.step(2)
    broken.clear()
    handle = engine.step(3)
    assert handle is not None and handle.result().labels == {"requested": "asked for"}
    assert store.restore(3) == {"often": {"n": 3}, "rare": {"a": 1}}
    assert store.steps() == [1, 3]


# --- what a restore could not put back ---


def read_only() -> np.ndarray[Any, Any]:
    array = np.arange(5)
    array.flags.writeable = False
    return array


FIXED: dict[str, Any] = {
    "tuple of numbers": (1, 2),
    "frozen set": frozenset([1]),
    "read-only array": {"a": [read_only()]},
    "array in a tuple": (read_only(), torch.ones(2)),
}


@pytest.mark.parametrize("async_mode", [True, False])
@pytest.mark.parametrize("what", FIXED)
def test_what_no_restore_could_put_back_is_refused_before_training_and_not_after_the_crash(
    store: Any, clock: Clock, what: str, async_mode: bool
) -> None:
    engine = CheckpointEngine(store, clock=clock, async_mode=async_mode)
    with pytest.raises(InvalidInputError, match=r"component 'fixed': .*cannot be put back.*necessity='reloadable'"):
        engine.register("fixed", FIXED[what], EVERY)
    engine.register("fixed", FIXED[what], SaveStrategy(every_steps=1, necessity="reloadable"))
    engine.register("tuple", (torch.ones(2), np.zeros(3), {"n": 1}), EVERY)
    engine.save(1, async_mode=False)
    with pytest.raises(MismatchError, match="fixed"):
        engine.restore()
    assert engine.restore(leave=["fixed"]).step == 1


class Broken:
    """Says its state, and cannot take it."""

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("its own mistake")


def test_training_that_was_restored_half_way_saves_nothing_until_it_is_restored_whole(store: Any, clock: Clock) -> None:
    engine, counters, broken = CheckpointEngine(store, clock=clock), {"n": 1}, Broken()
    engine.register("counters", counters, EVERY)
    engine.register("other", broken, EVERY)
    engine.save(1, async_mode=False)
    counters["n"] = 2
    engine.save(2, async_mode=False)
    counters["extra"] = 3
    with pytest.raises(MismatchError, match="Nothing was touched"):
        engine.restore(1)
    del counters["extra"]
    engine.save(3, async_mode=False)  # as it was, and so it goes on
    with pytest.raises(KeyError, match="its own mistake"):
        engine.restore(1)
    for call in (engine.step, engine.save):
        with pytest.raises(InvalidInputError, match="stopped half way"):
            call(4)
    broken.load_state_dict = lambda state: None  # type: ignore[method-assign]
    assert engine.restore(1).step == 1
    assert counters == {"n": 1}
    engine.save(2, async_mode=False)
