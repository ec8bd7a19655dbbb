"""(E02, E04, E09) Saves that overlap, fail, or go on beside the loop; lanes; what registering and restoring refuse."""

from __future__ import annotations

import gc
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from casckpt.engine.engine import CheckpointEngine
from casckpt.engine.strategy import Recent, SaveStrategy
from casckpt.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    OutOfSpaceError,
    SaveFailedError,
    StoreWarning,
    UnsupportedStateError,
)
from casckpt.state.rng import RngState
from casckpt.store.background import SaveHandle
from tests.engine.clocks import GATE_TIMEOUT_S, Clock, Disk, open_timed
from tests.unit.stores import open_store

EVERY = SaveStrategy(every_steps=1)


def train(engine: CheckpointEngine, counters: dict[str, int], *steps: int) -> list[int]:
    """The steps that were saved; None of them is waited for."""
    saved = []
    for step in steps:
        counters["n"] = step
        if engine.step(step) is not None:
            saved.append(step)
    return saved


# --- overlap ---


def test_skip_leaves_out_what_comes_while_a_save_is_under_way_and_counts_it(
    store: Any, clock: Clock, disk: Disk
) -> None:
    engine = CheckpointEngine(store, clock=clock, overlap="skip")
    counters = {"n": 0}
    engine.register("counters", counters, EVERY)
    disk.is_open.clear()
    assert train(engine, counters, 1, 2, 3) == [1]
    assert engine.save(3) is None
    report = engine.report()
    assert (report.skipped_count, report.under_way) == (3, (1,))
    disk.is_open.set()
    engine.wait()
    assert train(engine, counters, 4) == [4]
    engine.wait()
    assert store.steps() == [1, 4]
    assert "3 skipped" in str(engine.report())


def test_queue_holds_so_many_saves_with_the_values_of_their_steps(store: Any, clock: Clock, disk: Disk) -> None:
    engine = CheckpointEngine(store, clock=clock, overlap="queue", queue_size=3)
    counters, weights = {"n": 0}, torch.zeros(1000)
    engine.register("counters", counters, EVERY)
    engine.register("weights", weights, EVERY)
    disk.is_open.clear()
    saved = []
    for step in range(1, 8):
        weights.fill_(step)
        saved += train(engine, counters, step)
    assert saved == [1, 2, 3, 4]  # one being written, three behind it
    assert (engine.report().skipped_count, engine.report().waited_count) == (3, 0)
    disk.is_open.set()
    engine.wait()
    assert store.steps() == [1, 2, 3, 4]
    for step in store.steps():
        found = store.restore(step)
        assert (found["counters"], found["weights"].unique().tolist()) == ({"n": step}, [step])


def test_wait_keeps_the_loop_at_the_third_save_and_says_so(
    store_path: Path, clock: Clock, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_timed(store_path, clock, disk, lock_timeout_s=0.05) as store:
        engine = CheckpointEngine(store, clock=clock, overlap="wait")
        counters = {"n": 0}
        engine.register("counters", counters, EVERY)
        disk.is_open.clear()
        assert train(engine, counters, 1, 2) == [1, 2]
        with pytest.raises(BusyError, match=r"steps \[1, 2\]"):
            engine.step(3)
        disk.is_open.set()
        engine.wait()
        counters["n"] = 4
        assert engine.step(4) is not None
        engine.wait()
        assert store.steps() == [1, 2, 4]
        assert engine.report().skipped_count == 0


def test_skip_forgets_nothing_that_a_failed_save_owes(
    store: Any, clock: Clock, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A best-effort save fails while a critical one is under way, so that the save that is due for it is skipped."""
    engine = CheckpointEngine(store, clock=clock, overlap="skip")
    counters = {"n": 0}
    engine.register("counters", counters, EVERY)
    engine.register("weights", torch.zeros(10), SaveStrategy(every_steps=100))
    engine.register("buffer", torch.zeros(10), SaveStrategy(every_steps=2, lane="best_effort"))
    train(engine, counters, 1)
    engine.wait()
    later = SaveHandle(2)
    monkeypatch.setattr(store, "supersede_async", lambda step, **options: later)
    engine.step(2).result()
    disk.is_open.clear()
    assert train(engine, counters, 3) == [3]
    later._finish(None, OutOfSpaceError("no space left"), 0.0)
    with pytest.raises(SaveFailedError, match="step 2 failed"):
        engine.step(4)
    assert train(engine, counters, 5, 6) == []
    assert {name: step for layer in engine.report().layers for name, step in layer.components.items()} == {
        "counters": 3,
        "weights": 1,
        "buffer": 2,
    }
    monkeypatch.undo()
    disk.is_open.set()
    engine.wait()
    assert train(engine, counters, 7) == [7]
    engine.wait()
    assert {each.step for each in store.snapshot(7).components.values()} == {7}


# --- failures ---


@pytest.mark.parametrize("call", ["step", "save", "wait", "close", "restore", "drop"])
def test_failed_save_is_raised_by_the_next_call_whatever_it_is(store: Any, clock: Clock, disk: Disk, call: str) -> None:
    engine = CheckpointEngine(store, clock=clock)
    counters = {"n": 0}
    engine.register("counters", counters, EVERY)
    assert train(engine, counters, 1) == [1]
    engine.wait()
    disk.is_full = True
    assert train(engine, counters, 2) == [2]
    engine._saves.under_way[0].handle.wait()
    calls = {
        "step": lambda: engine.step(3),
        "save": lambda: engine.save(3),
        "wait": engine.wait,
        "close": engine.close,
        "restore": engine.restore,
        "drop": lambda: engine.drop("counters"),
    }
    with pytest.raises(SaveFailedError, match="step 2 failed") as caught:
        calls[call]()
    assert isinstance(caught.value.__cause__, OutOfSpaceError)
    assert engine.report().failed_count == 1
    assert store.steps() == [1]


def test_training_that_survives_a_failed_save_saves_everything_at_the_next_step(
    store: Any, clock: Clock, disk: Disk
) -> None:
    engine = CheckpointEngine(store, clock=clock)
    counters, weights = {"n": 0}, torch.zeros(10)
    engine.register("counters", counters, EVERY)
    engine.register("weights", weights, SaveStrategy(every_steps=100))
    train(engine, counters, 1)
    engine.wait()
    disk.is_full = True
    handle = engine.step(2)
    assert isinstance(handle.exception(), OutOfSpaceError)  # somebody knows: nothing is raised later
    disk.is_full = False
    weights.fill_(3)
    assert train(engine, counters, 3) == [3]
    engine.wait()
    assert {name: each.step for name, each in store.snapshot(3).components.items()} == {"counters": 3, "weights": 3}


def test_durable_saves_raise_where_they_are_called(store: Any, clock: Clock, disk: Disk) -> None:
    engine = CheckpointEngine(store, clock=clock, async_mode=False)
    counters = {"n": 1}
    engine.register("counters", counters, EVERY)
    assert engine.step(1).done()
    assert store.steps() == [1]
    disk.is_full = True
    counters["n"] = 2
    with pytest.raises(OutOfSpaceError):
        engine.step(2)
    disk.is_full = False
    assert engine.save(3, async_mode=True).result().step == 3
    assert store.steps() == [1, 3]


# --- lanes ---


class Lanes:
    """A policy that makes the snapshot, and a replay buffer that is added to it."""

    def __init__(self, store: Any, clock: Clock, **options: Any) -> None:
        self.engine = CheckpointEngine(store, clock=clock, **options)
        self.policy, self.replay = torch.zeros(4), torch.zeros(400_001)
        self.noise = torch.rand(400_001)
        self.engine.register("policy", self.policy, EVERY)
        self.engine.register("replay", self.replay, SaveStrategy(every_steps=10, lane="best_effort"))

    def train(self, step: int) -> Any:
        self.update(step)
        return self.engine.step(step)

    def update(self, step: int) -> None:
        self.policy.fill_(step)
        self.replay.copy_(self.noise * step)  # needs a pack
        self.replay[0] = step


def test_best_effort_components_join_the_snapshot_of_their_step_when_they_land(
    store: Any, clock: Clock, disk: Disk
) -> None:
    lanes = Lanes(store, clock)
    lanes.train(1).result()
    assert set(store.snapshot(1).components) == {"policy", "replay"}  # the first snapshot has everything
    first = lanes.train(10).result()
    lanes.engine.wait()
    assert {name: each.step for name, each in first.components.items()} == {"policy": 10, "replay": 1}
    landed = store.snapshot(10)
    assert {name: each.step for name, each in landed.components.items()} == {"policy": 10, "replay": 10}
    assert landed.id != first.id and landed.is_consistent and store.snapshot(first.id).is_retired
    assert store.steps() == [1, 10]
    for ref, step in ((10, 10), (first.id, 1)):
        assert store.restore(ref, allow_mixed=True)["replay"][0].item() == step
    assert store.verify().ok


def steps_of(snapshot: Any) -> dict[str, int]:
    return {name: each.step for name, each in snapshot.components.items()}


def test_saves_go_on_while_a_best_effort_component_is_written_and_inherit_it_once_it_landed(
    store: Any, clock: Clock, disk: Disk
) -> None:
    lanes = Lanes(store, clock)
    lanes.train(1).result()
    disk.closed_to = "casckpt-later"
    disk.waiting.clear(), disk.is_open.clear()
    assert steps_of(lanes.train(10).result()) == {"policy": 10, "replay": 1}
    assert disk.waiting.wait(GATE_TIMEOUT_S)  # the buffer of step 10 is being written, and stays so
    assert steps_of(lanes.train(11).result()) == {"policy": 11, "replay": 1}
    assert lanes.engine.report().under_way == (10,)
    disk.is_open.set()
    lanes.engine.wait()
    assert steps_of(lanes.train(12).result()) == {"policy": 12, "replay": 10}
    assert [steps_of(each)["replay"] for each in store.timeline()] == [1, 10, 1, 10]
    assert store.verify().ok


@pytest.mark.parametrize("how", ["save", "request"])
def test_save_of_everything_leaves_out_no_best_effort_component_that_is_being_written(
    store: Any, clock: Clock, disk: Disk, how: str
) -> None:
    """As at the end that a signal asks for: the newest snapshot would be mixed, and an older one restored."""
    lanes = Lanes(store, clock)
    lanes.train(1).result()
    disk.closed_to = "casckpt-later"
    disk.waiting.clear(), disk.is_open.clear()
    lanes.train(10).result()
    assert disk.waiting.wait(GATE_TIMEOUT_S)
    lanes.update(13)
    if how == "save":
        lanes.engine.save(13)
    else:
        lanes.engine.request_save("the end")
        lanes.engine.step(13)
    disk.is_open.set()
    lanes.engine.wait()
    assert steps_of(store.snapshot(13)) == {"policy": 13, "replay": 13}
    assert store.snapshot().step == 13  # what a restore takes
    assert [store.restore(step)["replay"][0].item() for step in (10, 13)] == [10, 13]


def test_step_whose_best_effort_part_never_landed_is_known_to_be_older(
    store_path: Path, clock: Clock, disk: Disk
) -> None:
    """As after a crash: the snapshot is there, its buffer is that of an older step, and restoring says so."""
    with open_timed(store_path, clock, disk) as store:
        lanes = Lanes(store, clock)
        lanes.train(1).result()
        disk.closed_to = "casckpt-later"
        disk.is_open.clear()
        lanes.train(10).result()
        with open_timed(store_path, clock, Disk(clock)) as other:
            lanes = Lanes(other, clock)
            with pytest.warns(StoreWarning, match=r"'latest' is step 1; passed over: step 10 .* is mixed"):
                assert lanes.engine.restore().step == 1
            assert (lanes.policy.unique().tolist(), lanes.replay[0].item()) == ([1], 1)
        disk.is_open.set()


def test_failed_best_effort_save_is_raised_and_leaves_the_snapshot_as_it_is(
    store: Any, clock: Clock, disk: Disk
) -> None:
    lanes = Lanes(store, clock)
    lanes.train(1).result()
    disk.closed_to = "casckpt-later"
    disk.is_open.clear()
    lanes.train(10).result()
    disk.is_full = True
    disk.is_open.set()
    with pytest.raises(SaveFailedError, match="step 10 failed"):
        lanes.engine.wait()
    disk.is_full = False
    assert steps_of(store.snapshot(10)) == {"policy": 10, "replay": 1}
    lanes.train(11)
    lanes.engine.wait()
    assert steps_of(store.snapshot(11)) == {"policy": 11, "replay": 11}


# --- memory ---


@pytest.mark.full
def test_memory_is_flat_over_fifty_saves_in_the_background(store_path: Path, clock: Clock) -> None:
    """(E09) 64 MB of which one tensor changes: as much memory after 50 saves as after 5."""
    with open_store(store_path) as store:
        engine = CheckpointEngine(store, clock=clock, save_budget=None)
        tensors = {f"t{number}": torch.rand(1 << 20) for number in range(16)}
        engine.register("model", tensors, EVERY)
        process, sizes = psutil.Process(), {}
        for step in range(1, 51):
            tensors["t3"].add_(1)
            engine.step(step)
            if step in (5, 50):
                engine.wait()
                gc.collect()
                sizes[step] = process.memory_info().rss
        engine.close()
    assert sizes[50] < sizes[5] * 1.10


def test_memory_is_there_before_the_first_save(store: Any, clock: Clock) -> None:
    engine = CheckpointEngine(store, clock=clock)
    engine.register("model", torch.zeros(100_000), EVERY)
    reserved = [slot.address for slot in store._saver._staging._slots["model"]]
    for step in (1, 2, 3):
        engine.step(step)
        engine.wait()
    assert sorted(slot.address for slot in store._saver._staging._slots["model"]) == sorted(reserved) != [0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="counts the faults of a thread")
def test_pages_of_the_first_save_are_touched_when_its_components_are_registered(store: Any, clock: Clock) -> None:
    import resource

    engine = CheckpointEngine(store, clock=clock)
    size, count = 3 << 20, 8  # too small for huge pages
    for number in range(count):
        engine.register(f"part{number}", torch.ones(size, dtype=torch.uint8), EVERY)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    engine.save(1)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < count * size // resource.getpagesize() // 4


# --- providers ---


class Counter:
    """State that only functions reach."""

    def __init__(self) -> None:
        self.value = 0

    def take(self) -> dict[str, int]:
        return {"value": self.value}

    def put(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_callbacks_trees_and_checkpointables_come_back(store_path: Path, clock: Clock) -> None:
    def engine_of(store: Any) -> tuple[CheckpointEngine, Counter, dict[str, Any]]:
        counter, tree = Counter(), {"net": torch.nn.Linear(2, 2), "list": [1, torch.zeros(2)]}
        engine = CheckpointEngine(store, clock=clock)
        engine.register("counter", counter.take, load=counter.put)
        engine.register("tree", tree)
        engine.register("now", lambda: {"seconds": 5}, SaveStrategy(necessity="droppable"))
        return engine, counter, tree

    with open_store(store_path) as store:
        engine, counter, tree = engine_of(store)
        counter.value = 7
        tree["list"][1].fill_(3)
        weight = tree["net"].weight.detach().clone()
        engine.save(5)
        engine.close()
    with open_store(store_path) as store:
        engine, counter, tree = engine_of(store)
        report = engine.restore()
    assert (counter.value, tree["list"][1].tolist()) == (7, [3, 3])
    assert torch.equal(tree["net"].weight, weight)
    assert report.not_restored == ("now",)


def test_registering_refuses_what_could_not_be_saved_or_restored(store: Any, clock: Clock) -> None:
    engine = CheckpointEngine(store, clock=clock)
    engine.register("policy", {"a": 1})
    with pytest.raises(AlreadyExistsError, match="'policy'"):
        engine.register("policy", {"a": 1})
    with pytest.raises(InvalidInputError, match=r"with load=.*droppable"):
        engine.register("callback", lambda: {"a": 1})
    with pytest.raises(InvalidInputError, match="load= belongs to a callback"):
        engine.register("tree", {"a": 1}, load=print)
    with pytest.raises(UnsupportedStateError, match="object/inside"):
        engine.register("object", {"inside": object()})
    with pytest.raises(InvalidInputError, match="no keep_rows and keep_steps"):
        engine.register("buffer", {"rows": [1]}, SaveStrategy(recent_only=Recent(rows=10)))
    for strategy in ("fast", {"every_steps": 1}, 5):
        with pytest.raises(InvalidInputError, match=r"'text': strategy=.*expected a casckpt\.SaveStrategy"):
            engine.register("text", {"a": 1}, strategy)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"store='runs/x'.*CheckpointEngine\.open"):
        CheckpointEngine("runs/x")  # type: ignore[arg-type]
    engine.save(1)
    engine.wait()
    assert set(store.snapshot(1).components) == {"policy"}


def test_recent_only_reaches_the_provider(store: Any, clock: Clock) -> None:
    class Buffer:
        keep_rows: int | None = None
        keep_steps: int | None = None

        def __init__(self) -> None:
            self.rows = list(range(10))

        def state_dict(self) -> dict[str, Any]:
            return {"rows": self.rows[-self.keep_rows :] if self.keep_rows else self.rows}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.rows = state["rows"]

    engine = CheckpointEngine(store, clock=clock)
    buffer = Buffer()
    engine.register("buffer", buffer, SaveStrategy(recent_only=Recent(rows=3)))
    engine.save(1)
    engine.wait()
    assert store.restore(1) == {"buffer": {"rows": [7, 8, 9]}}


def test_strict_restore_needs_every_component_on_both_sides(store_path: Path, clock: Clock) -> None:
    with open_store(store_path) as store:
        store.commit(1, {"policy": {"a": 1}, "buffer": {"b": 1}})
    for names, missing in ((["policy"], "buffer"), (["policy", "buffer", "critic"], "critic")):
        live = {name: {name[0].replace("p", "a"): 0} for name in names}
        with open_store(store_path) as store:
            engine = CheckpointEngine(store, clock=clock)
            for name, tree in live.items():
                engine.register(name, tree)
            with pytest.raises(MismatchError, match=missing):
                engine.restore()
            assert live["policy"] == {"a": 0}
            report = engine.restore(strict=False)
            assert live["policy"] == {"a": 1}
            assert missing in (*report.not_restored, *report.not_stored)


def test_name_that_leaves_nothing_is_refused_before_anything_is_restored(store_path: Path, clock: Clock) -> None:
    policy, extra = {"a": 0}, {"b": 0}
    with open_store(store_path) as store:
        engine = CheckpointEngine(store, clock=clock)
        with pytest.raises(InvalidInputError, match="nothing to save"):
            engine.save(1)
        engine.register("policy", policy)
        engine.register("extra", extra)
        with pytest.raises(NotFoundError, match=r"leave=\['buffer'\].*extra, policy"):
            engine.restore(leave=["buffer"])  # a fresh start has no other names than these
        store.commit(1, {"policy": {"a": 1}, "buffer": {"b": 1}})
        for step in (-1, 1):
            with pytest.raises(NotFoundError, match=r"\['polcy'\].*There are buffer, extra, policy"):
                engine.restore(step, strict=False, leave=["polcy"])
            for leave in ("policy", None, 3):
                with pytest.raises(InvalidInputError, match="list of names"):
                    engine.restore(step, strict=False, leave=leave)
        with pytest.raises(AlreadyExistsError, match="'main' is a tag or a branch already"):
            engine.restore(strict=False, branch="main")
        assert policy == {"a": 0}
        engine.restore(leave=(name for name in ("policy", "buffer", "extra")))
        assert policy == {"a": 0}
        engine.restore(leave=["buffer", "extra"])  # which only the snapshot has, and which only this program has
        assert (policy, extra) == ({"a": 1}, {"b": 0})


def test_engine_with_a_template_refuses_a_save_that_lacks_something(store: Any, clock: Clock) -> None:
    engine = CheckpointEngine(store, config={"template": "dqn"}, clock=clock)
    engine.register("q_net", torch.nn.Linear(2, 2))
    with pytest.raises(InvalidInputError, match="template dqn: not complete") as caught:
        engine.save(1)
    assert {"target network", "replay rows"} <= set(caught.value.missing)
    assert store.steps() == []
    assert "missing" in str(engine.coverage()) and "missing" in str(engine.coverage("ppo"))


def test_maintenance_is_told_of_every_durable_snapshot_and_of_no_other(store: Any, clock: Clock, disk: Disk) -> None:
    told: list[list[int]] = []

    class Maintenance:
        is_well = True

        def after_commit(self, store: Any) -> None:
            told.append(store.steps())

        def may_save(self) -> bool:
            return self.is_well

    maintenance = Maintenance()
    engine = CheckpointEngine(store, clock=clock, maintenance=maintenance)
    engine.register("policy", {"a": 1}, EVERY)
    for step in (1, 2):
        engine.step(step)
        engine.wait()
    disk.is_full = True
    engine.step(3).exception()
    disk.is_full = False
    engine.save(4, async_mode=False)
    assert told == [[1], [1, 2], [1, 2, 4]]
    maintenance.is_well = False
    assert engine.step(5) is None  # the disk is not well: what is due waits
    maintenance.is_well = True
    assert engine.step(6) is not None
    engine.wait()
    assert told[-1] == [1, 2, 4, 6]


@pytest.mark.parametrize("value", [None, 5, 0.5, True, "text", b"bytes", 1j])
def test_value_that_never_changes_is_refused_as_a_component(store: Any, clock: Clock, value: Any) -> None:
    """It would be saved for ever as it was at the call, and could not be restored."""
    engine = CheckpointEngine(store, clock=clock)
    with pytest.raises(InvalidInputError, match=r"component 'n': .*Register what holds it"):
        engine.register("n", value)
    assert engine.restore().is_fresh


def test_dropped_component_leaves_the_next_snapshot(store: Any, clock: Clock) -> None:
    engine = CheckpointEngine(store, clock=clock)
    engine.register("policy", {"a": 1})
    engine.register("extra", {"b": 1})
    engine.save(1)
    engine.drop("extra")
    engine.save(2)
    engine.wait()
    assert [sorted(store.snapshot(step).components) for step in (1, 2)] == [["extra", "policy"], ["policy"]]


def test_dropped_component_stays_away_when_the_save_after_it_adds_to_a_snapshot_or_fails(
    store: Any, clock: Clock, disk: Disk
) -> None:
    """Both have no snapshot that could leave it out: the next one does."""
    engine = CheckpointEngine(store, clock=clock)
    for name in ("policy", "extra", "other"):
        engine.register(name, {"a": 1}, EVERY)
    engine.save(1, async_mode=False)
    engine.drop("extra")
    engine.save(1, async_mode=False)  # joins the snapshot of step 1
    engine.save(2, async_mode=False)
    engine.drop("other")
    disk.is_full = True
    engine.step(3).exception()
    disk.is_full = False
    for step in (4, 5):
        engine.step(step)
        engine.wait()
    contents = [sorted(store.snapshot(step).components) for step in (2, 4, 5)]
    assert contents == [["other", "policy"], ["policy"], ["policy"]]


def test_record_of_a_new_seed_goes_to_the_next_save_when_one_fails(store: Any, clock: Clock, disk: Disk) -> None:
    engine = CheckpointEngine(store, clock=clock)
    engine.register("rng", RngState(), EVERY)
    engine.save(1, async_mode=False)
    engine.restore(reseed=7)
    disk.is_full = True
    engine.step(2).exception()
    disk.is_full = False
    for step in (3, 4):
        engine.step(step)
        engine.wait()
    assert [store.snapshot(step).labels.get("rng.reseed") for step in (3, 4)] == ["7", None]


def test_failure_is_told_though_what_follows_another_save_raises(store: Any, clock: Clock, disk: Disk) -> None:
    class Failing:
        def after_commit(self, store: Any) -> None:
            raise RuntimeError("out of order")

        def may_save(self) -> bool:
            return True

    engine = CheckpointEngine(store, clock=clock, maintenance=Failing())
    engine.register("policy", {"a": 1}, EVERY)
    engine.step(1).wait()
    disk.is_full = True
    save = store.commit_async(2, {"policy": {"a": 2}})
    save.wait()
    engine._saves.under_way.append(replace(engine._saves.under_way[0], handle=save))
    with pytest.raises(RuntimeError, match="out of order"):
        engine.wait()
    with pytest.raises(SaveFailedError, match="step 2 failed"):
        engine.wait()


def test_component_registered_later_joins_the_next_save(store: Any, clock: Clock) -> None:
    engine = CheckpointEngine(store, clock=clock)
    engine.register("policy", {"a": 1}, EVERY)
    engine.step(1)
    engine.register("late", {"b": 1}, SaveStrategy(every_steps=1000))
    engine.step(2)
    engine.wait()
    assert sorted(store.snapshot(2).components) == ["late", "policy"]


def test_unchanged_component_that_should_change_is_told_once(store: Any, clock: Clock) -> None:
    engine = CheckpointEngine(store, clock=clock)
    policy, constant = {"a": 0}, {"b": 0}
    engine.register("policy", policy, SaveStrategy(every_steps=1, expect_change=True))
    engine.register("constant", constant, EVERY)

    def save(step: int) -> None:
        engine.step(step)
        engine.wait()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(1)
        policy["a"] = 2
        save(2)
    with pytest.warns(StoreWarning, match=r"'policy' was captured at step 3 with the bytes of the time before"):
        save(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(4)  # it was told
        policy["a"] = 5
        save(5)
    with pytest.warns(StoreWarning, match="step 6"):
        save(6)
    assert store.steps() == [1, 2, 3, 4, 5, 6]


def test_saving_a_saved_step_again_adds_what_that_snapshot_has_from_before(store: Any, clock: Clock) -> None:
    engine = CheckpointEngine(store, clock=clock)
    policy, counters = {"a": 1}, {"n": 1}
    engine.register("policy", policy, SaveStrategy(every_steps=100))
    engine.register("counters", counters, EVERY)
    engine.step(1)
    policy["a"], counters["n"] = 2, 2
    engine.step(2)
    engine.save(2, metrics={"return": 5.0})
    engine.wait()
    found = store.snapshot(2)
    assert found.is_consistent and found.metrics == {"return": 5.0}
    assert store.restore(2) == {"policy": {"a": 2}, "counters": {"n": 2}}
    assert store.steps() == [1, 2]
