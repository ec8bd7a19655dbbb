"""(E01, E03, E06, E07) When what is saved: steps or seconds, layers, the budget, safe points."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from casckpt.engine.engine import CheckpointEngine
from casckpt.engine.strategy import SaveStrategy
from casckpt.errors import InvalidInputError, StepOrderError, StoreWarning
from tests.engine.clocks import Clock, Disk, open_timed


def engine_of(
    store: Any, clock: Clock, **strategies: SaveStrategy
) -> tuple[CheckpointEngine, dict[str, dict[str, int]]]:
    """An engine with one component per strategy, each a counter, and the live counters."""
    engine = CheckpointEngine(store, clock=clock)
    live = {name: {"value": 0} for name in strategies}
    for name, strategy in strategies.items():
        engine.register(name, live[name], strategy)
    return engine, live


def captured(store: Any) -> dict[int, dict[str, int]]:
    """For each step, the step of each component."""
    return {each.step: {name: one.step for name, one in each.components.items()} for each in store.timeline()}


def test_whichever_of_steps_and_seconds_comes_first_makes_a_save_due(store: Any, clock: Clock) -> None:
    engine, live = engine_of(store, clock, policy=SaveStrategy(every_steps=10, every_seconds=60))
    seconds_of_step = {4: 61.0, 15: 61.0}  # two slow steps among fast ones
    for step in range(1, 31):
        clock.now_s += seconds_of_step.get(step, 1.0)
        live["policy"]["value"] = step
        engine.step(step)
        engine.wait()
    assert store.steps() == [4, 10, 15, 20, 30]


def test_engine_that_would_never_save_anything_says_so_once(
    store: Any, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = engine_of(store, clock, policy=SaveStrategy(), counters=SaveStrategy())
    for step in range(1, 4):
        engine.step(step)
    assert [record.message for record in caplog.records if "no component has a cadence" in record.message] == [
        "no component has a cadence: `step` saves nothing by itself, only `save` and `request_save` do. "
        "Register with SaveStrategy(every_steps=…) or (every_seconds=…) what is to be saved."
    ]
    caplog.clear()
    other, _ = engine_of(store, clock, policy=SaveStrategy(), counters=SaveStrategy(every_steps=10))
    other.step(5)
    assert (caplog.records, store.steps()) == ([], [])


def test_slow_step_saves_only_when_it_is_over(store: Any, clock: Clock) -> None:
    engine, _ = engine_of(store, clock, policy=SaveStrategy(every_seconds=60))
    engine.step(1)
    clock.now_s += 600
    assert store.steps() == []
    engine.step(2)
    engine.wait()
    assert store.steps() == [2]


def test_light_commits_inherit_and_every_component_keeps_its_own_step(
    store_path: Path, store: Any, clock: Clock, disk: Disk
) -> None:
    engine, live = engine_of(
        store, clock, policy=SaveStrategy(every_steps=500), counters=SaveStrategy(every_steps=100), best=SaveStrategy()
    )
    for step in range(1, 731):
        for name in live:
            live[name]["value"] = step
        engine.step(step)
    engine.wait()
    expected = {step: {"policy": step // 500 * 500, "counters": step, "best": step} for step in range(100, 701, 100)}
    for step in range(100, 500, 100):
        expected[step]["policy"] = 100  # the first snapshot has everything
    assert captured(store) == expected


def test_restore_takes_the_newest_consistent_step_and_a_mixed_one_only_when_asked(
    store_path: Path, clock: Clock, disk: Disk
) -> None:
    strategies = {"policy": SaveStrategy(every_steps=500), "counters": SaveStrategy(every_steps=100)}
    with open_timed(store_path, clock, disk) as first:
        engine, live = engine_of(first, clock, **strategies)
        engine.save(0)
        for step in range(1, 731):
            live["policy"]["value"] = live["counters"]["value"] = step
            engine.step(step)
        engine.close()
    with open_timed(store_path, clock, disk) as second:
        engine, live = engine_of(second, clock, **strategies)
        with pytest.warns(StoreWarning, match=r"'latest' is step 500; passed over: step 700 .* is mixed"):
            report = engine.restore()
        assert (report.step, engine.global_step) == (500, 500)
        assert live == {"policy": {"value": 500}, "counters": {"value": 500}}
    with open_timed(store_path, clock, disk) as third:
        engine, live = engine_of(third, clock, **strategies)
        report = engine.restore(allow_mixed=True)
        assert {name: facts["step"] for name, facts in report.components.items()} == {"policy": 500, "counters": 700}
        assert live == {"policy": {"value": 500}, "counters": {"value": 700}}
        assert "step 500" in str(report) and "step 700" in str(report)


@pytest.mark.parametrize("leap_s", [-1e9, -601.0, -1.0, 601.0, 1e9])
def test_clock_that_jumps_saves_once_and_goes_on_from_there(store: Any, clock: Clock, leap_s: float) -> None:
    engine, live = engine_of(store, clock, policy=SaveStrategy(every_seconds=600), light=SaveStrategy(every_steps=50))
    saved = []
    for step in range(1, 200):
        clock.now_s += leap_s if step == 20 else 10.0
        live["policy"]["value"] = live["light"]["value"] = step
        if engine.step(step):
            saved.append(step)
            engine.wait()
    # every 60 steps by the clock, begun anew where it jumped, and the multiples of 50 whatever the clock says
    if leap_s == -1.0:  # within the interval, which is a second longer; at 50 the first snapshot has everything
        assert saved == [50, 100, 110, 150, 170]
    else:
        assert saved == [20, 50, 80, 100, 140, 150]


def test_budget_is_no_debt_for_ever_when_the_clock_goes_back(store: Any, clock: Clock, disk: Disk) -> None:
    engine, live = engine_of(store, clock, policy=SaveStrategy(every_steps=10))
    disk.publish_s = 5.0
    saved = []
    for step in range(1, 201):
        clock.now_s += -1e6 if step == 31 else 1.0
        live["policy"]["value"] = step
        if engine.step(step):
            saved.append(step)
            engine.wait()
    assert saved[0] == 10 and saved[1] < 120 and 3 <= len(saved) <= 6


# --- the budget ---


def intervals(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_saving_that_takes_too_long_lengthens_the_interval_and_shortens_it_again(
    store: Any, clock: Clock, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    engine, live = engine_of(store, clock, policy=SaveStrategy(every_seconds=10))
    disk.publish_s = 5.0  # half of the interval, where a tenth is allowed

    def train(seconds: int) -> list[float]:
        """Steps of a second each; when saves began."""
        saved = []
        for _ in range(seconds):
            clock.now_s += 1
            live["policy"]["value"] += 1
            before_s = clock.now_s
            if engine.advance_step():
                saved.append(before_s)
            engine.wait()
        return saved

    with caplog.at_level(logging.WARNING, logger="casckpt.engine"):
        times = train(150)
    assert intervals(times) == pytest.approx([55, 55], abs=1.01)
    (layer,) = engine.report().layers
    assert (layer.cost_s, layer.interval_s, layer.is_lengthened) == (5.0, 50.0, True)
    assert layer.postponed_count >= 2 and "lengthened to at least 50 s" in str(engine.report())
    assert "save of policy postponed: it takes 5 s" in caplog.text

    disk.publish_s = 0.1
    with caplog.at_level(logging.INFO, logger="casckpt.engine"):
        times = train(100)
    assert intervals(times[1:]) == pytest.approx([10] * (len(times) - 2), abs=1.01)
    assert len(times) >= 5 and not engine.report().layers[0].is_lengthened
    assert "interval is as configured again" in caplog.text


def test_saves_of_a_busy_training_are_told_as_postponed_when_their_number_has_doubled(
    store: Any, clock: Clock, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    engine, live = engine_of(store, clock, policy=SaveStrategy(every_seconds=10))
    disk.publish_s = 5.0
    with caplog.at_level(logging.WARNING, logger="casckpt.engine"):
        for _ in range(1200):  # a save in 50 s is what the budget allows
            clock.now_s += 1
            live["policy"]["value"] += 1
            engine.advance_step()
            engine.wait()
    told = [record.getMessage() for record in caplog.records if "postponed" in record.getMessage()]
    (layer,) = engine.report().layers
    assert 16 <= layer.postponed_count < 32
    assert [f"; {count} so far" in text for count, text in zip((1, 2, 4, 8, 16), told, strict=True)] == [True] * 5


@pytest.mark.full
def test_large_save_does_not_stop_small_ones(store: Any, clock: Clock, disk: Disk, seed: int) -> None:
    disk.byte_s = 1e-5  # 20 s for the weights, 0.01 s for a light commit
    engine = CheckpointEngine(store, clock=clock)
    weights, counters = {"w": b""}, {"n": 0}
    engine.register("weights", weights, SaveStrategy(every_steps=100))
    engine.register("counters", counters, SaveStrategy(every_steps=1))
    generator = random.Random(seed)
    for step in range(1, 501):
        clock.now_s += 1
        counters["n"], weights["w"] = step, generator.randbytes(2_000_000) if step % 50 == 0 else weights["w"]
        engine.step(step)
        engine.wait()
    steps = store.steps()
    assert len(steps) > 450  # nearly every step has its light commit
    captures = sorted({each["weights"] for each in captured(store).values()})
    # 20 s at a tenth of the time: one in 200 s, where one in 100 was asked for
    assert len(captures) >= 3
    assert all(later - earlier >= 175 for earlier, later in itertools.pairwise(captures[1:]))


def test_without_a_budget_nothing_is_postponed(store_path: Path, clock: Clock, disk: Disk) -> None:
    disk.publish_s = 5.0
    with open_timed(store_path, clock, disk) as store:
        engine = CheckpointEngine(store, clock=clock, save_budget=None)
        engine.register("policy", {"value": 1}, SaveStrategy(every_steps=1))
        for step in range(1, 6):
            engine.step(step)
            engine.wait()
        assert store.steps() == [1, 2, 3, 4, 5]


# --- safe points ---


def test_save_inside_an_update_is_refused_and_a_request_waits_for_its_end(store: Any, clock: Clock) -> None:
    engine, live = engine_of(store, clock, policy=SaveStrategy())
    with engine.update():
        live["policy"]["value"] = 1  # half way
        with pytest.raises(InvalidInputError, match="request_save"):
            engine.save(1)
        engine.request_save("because")
        live["policy"]["value"] = 2
    assert store.steps() == []
    handle = engine.step(1)
    assert handle is not None
    assert handle.result().labels == {"requested": "because"}
    assert store.restore(1) == {"policy": {"value": 2}}
    assert engine.step(2) is None  # a request is good for one save


def test_only_the_thread_that_trains_saves(store: Any, clock: Clock) -> None:
    engine, _ = engine_of(store, clock, policy=SaveStrategy())
    engine.step(1)
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            engine.save(1)
        except InvalidInputError as error:
            errors.append(error)
        engine.request_save("from a thread")

    thread = threading.Thread(target=elsewhere, name="watcher")
    thread.start()
    thread.join()
    assert [str(error).split(":")[0] for error in errors] == ["save from thread 'watcher'"]
    assert engine.step(2).result().labels == {"requested": "from a thread"}


def test_step_never_goes_back(store: Any, clock: Clock) -> None:
    engine, _ = engine_of(store, clock, policy=SaveStrategy())
    engine.step(5)
    with pytest.raises(StepOrderError, match=r"restore\(4\)"):
        engine.step(4)
    engine.step(5)  # telling a step twice is no mistake


def test_training_that_was_not_restored_does_not_go_on_from_an_older_one(
    store_path: Path, clock: Clock, disk: Disk
) -> None:
    with open_timed(store_path, clock, disk) as first:
        engine, live = engine_of(first, clock, policy=SaveStrategy())
        live["policy"]["value"] = 3
        engine.save(100, async_mode=False)
    with open_timed(store_path, clock, disk) as second:
        engine, live = engine_of(second, clock, policy=SaveStrategy())
        with pytest.raises(InvalidInputError, match=r"snapshots up to step 100.*restore\(\)"):
            engine.step(1)
        assert engine.restore().step == 100
        assert live == {"policy": {"value": 3}}
        engine.step(101)
        assert [each.step for each in engine.list_checkpoints()] == [100]
