"""(E06, E08) Who may save, and when: threads that end, pauses, updates and saves within each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from casckpt.engine.engine import CheckpointEngine
from casckpt.engine.strategy import SaveStrategy
from casckpt.errors import InvalidInputError
from tests.engine.clocks import GATE_TIMEOUT_S, Clock, Disk

EVERY = SaveStrategy(every_steps=1)


def counting(store: Any, clock: Clock) -> tuple[CheckpointEngine, dict[str, int]]:
    engine, counters = CheckpointEngine(store, clock=clock), {"n": 0}
    engine.register("counters", counters, EVERY)
    return engine, counters


def in_another_thread(call: Callable[[], Any]) -> Any:
    """What a call gives or raises in a thread of its own, which has ended then."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except InvalidInputError as error:
            found.append(error)

    thread = threading.Thread(target=run, name="another")
    thread.start()
    thread.join()
    return found[0]


# --- threads, as a notebook has them ---


def test_training_goes_on_in_another_thread_when_the_one_that_trained_has_ended(store: Any, clock: Clock) -> None:
    engine, counters = counting(store, clock)

    def train(step: int) -> int:
        counters["n"] = step
        engine.step(step)
        return step

    assert [in_another_thread(lambda step=step: train(step)) for step in (1, 2, 3)] == [1, 2, 3]
    engine.restore(2)
    assert counters == {"n": 2}
    train(3)  # from here on this thread trains, and goes on living
    assert "another" in str(in_another_thread(lambda: train(4)))
    assert "another" in str(in_another_thread(lambda: engine.restore(2)))
    engine.wait()
    assert counters == {"n": 4} and store.steps()[-1] == 3


def test_thread_that_restores_need_not_be_the_one_that_trains(store: Any, clock: Clock) -> None:
    engine, _ = counting(store, clock)
    assert engine.restore().is_fresh
    handle = in_another_thread(lambda: engine.step(1))
    assert handle.result().step == 1


def test_signals_are_heard_in_the_main_thread_alone(store: Any, clock: Clock) -> None:
    engine, _ = counting(store, clock)
    error = in_another_thread(lambda: engine.on_signals().__enter__())
    assert "on_signals in thread 'another': Python tells signals to the main thread alone" in str(error)


# --- pauses and updates ---


def test_pause_inside_a_pause_does_not_end_it_and_an_update_inside_one_is_none(store: Any, clock: Clock) -> None:
    engine, counters = counting(store, clock)
    saved = []

    def at_deadline() -> None:
        saved.append(in_another_thread(lambda: engine.save_in_pause("SIGTERM")))

    with engine.pause():
        with engine.pause("inner"):
            at_deadline()
        at_deadline()
        with engine.update():  # half way through a change
            counters["n"] = 1
            at_deadline()
        at_deadline()
    at_deadline()
    assert saved == [True, True, False, True, False]


def test_pause_inside_an_update_is_no_safe_point(store: Any, clock: Clock) -> None:
    engine, _ = counting(store, clock)
    with engine.update(), engine.pause():
        assert in_another_thread(lambda: engine.save_in_pause("SIGTERM")) is False
    assert store.steps() == []


@pytest.mark.parametrize("what", ["update", "save", "end of the pause"])
def test_loop_goes_on_only_when_the_save_at_the_deadline_is_over(
    store: Any, clock: Clock, disk: Disk, what: str
) -> None:
    """Whatever it does next: the save reads what the loop would change."""
    engine, counters = counting(store, clock)
    counters["n"] = 1
    disk.is_open.clear()
    saving = threading.Thread(target=engine.save_in_pause, args=("SIGTERM",))
    order: list[str] = []

    def watch() -> None:
        assert disk.waiting.wait(GATE_TIMEOUT_S)
        order.append("the disk opens")
        disk.is_open.set()

    with engine.pause():
        saving.start()
        assert disk.waiting.wait(GATE_TIMEOUT_S)
        watcher = threading.Timer(0.05, watch)
        watcher.start()
        if what == "update":
            with engine.update():
                order.append(what)
                counters["n"] = 2
        elif what == "save":
            engine.save(1, async_mode=False)
            order.append(what)
    order.append("end of the pause")
    saving.join(), watcher.join()
    assert order[0] == "the disk opens"
    assert store.restore(0) == {"counters": {"n": 1}}


# --- providers that do more than say their state ---


@pytest.mark.parametrize("call", ["save", "step", "restore"])
def test_provider_that_saves_is_refused_at_once_and_its_request_is_kept(store: Any, clock: Clock, call: str) -> None:
    engine, _ = counting(store, clock)
    calls = {"save": lambda: engine.save(2), "step": lambda: engine.step(2), "restore": engine.restore}
    is_wild = False

    def provide() -> dict[str, int]:
        if is_wild:
            engine.request_save("the provider's")
            calls[call]()
        return {"n": engine.global_step}

    engine.register("wild", provide, EVERY, load=lambda state: None)
    is_wild = True
    with pytest.raises(InvalidInputError, match=f"{call} by what is being saved.*request_save"):
        engine.step(1)
    is_wild = False
    handle = engine.step(2)
    assert handle is not None and handle.result().labels == {"requested": "the provider's"}
    assert store.steps() == [2]
