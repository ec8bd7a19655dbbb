"""Recoveries: what is restored, what is passed over and why, and what is left when one is killed at any point."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.engine.cursors import IndexCursor
from casckpt.recovery import (
    FailureInfo,
    Policy,
    RecoveryCoordinator,
    Reference,
    TrialSteps,
    find_nonfinite,
    find_schedule_gaps,
    list_generations,
    make_plan,
    open_generation,
)
from casckpt.recovery.checks import run_checks
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from casckpt.testing.failing import CountingFileSystem
from casckpt.testing.wrapping import Operation
from tests.unit.cli_stores import flip
from tests.unit.stores import open_store

WIDTH = 160  # the weights are more than an entry holds: each step has a pack


def agent() -> dict[str, Any]:
    policy = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    return {"policy": policy, "optimizer": optimizer, "schedule": schedule, "rng": casckpt.RngState()}


def update(state: dict[str, Any]) -> float:
    loss = state["policy"](torch.randn(4, WIDTH)).pow(2).mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["schedule"].step()
    return float(loss.item())


def train(store: casckpt.Store, state: dict[str, Any], last: int, **spoil: Any) -> list[float]:
    """Commit steps up to `last`; returns the losses by step from 1."""
    losses = []
    for step in range((store.step or 0) + 1, last + 1):
        losses.append(update(state))
        if f"before_{step}" in spoil:
            spoil[f"before_{step}"](state)
        store.commit(step, state, metrics={"loss": losses[-1]})
    return losses


def newest_pack(path: Path) -> Path:
    return max((p for p in (path / "packs").rglob("*") if p.is_file()), key=lambda p: p.stat().st_mtime_ns)


def test_recovery_goes_on_exactly_and_says_so_on_one_screen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with open_store(tmp_path / "store") as store:
        state = agent()
        train(store, state, 3)
        expected = [update(state) for _ in range(3)]
    with open_store(tmp_path / "store") as store:
        state = agent()
        report = RecoveryCoordinator(store).recover(state, FailureInfo("oom-kill", 6, "killed by signal 9"))
        assert [update(state) for _ in range(3)] == expected
        assert (report.step, report.generation, report.is_fresh) == (3, 1, False)
        for part in ("main/main@3", "policy", "step 3", "next draws of", "generation 1", "why: newest is"):
            assert part in str(report)
        (generation,) = list_generations(store)
        assert generation.snapshot == store.snapshot(3).id
        assert generation.reasons[0] == "oom-kill at step 6: killed by signal 9"


def test_damage_in_the_newest_falls_back_with_the_reason_in_report_and_timeline(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        train(store, agent(), 3)
    pack = newest_pack(tmp_path / "store")
    flip(pack, pack.stat().st_size // 2)
    with open_store(tmp_path / "store") as store:
        report = RecoveryCoordinator(store).recover(agent())
        assert report.step == 2
        assert any(why.startswith("step 3 cannot be restored") for why in report.reasons)
        last = list_generations(store)[-1]
        assert last.snapshot == store.snapshot(2).id
        assert any("step 3 cannot be restored" in why for why in last.reasons)


def nan_moment(state: dict[str, Any]) -> None:
    next(iter(state["optimizer"].state.values()))["exp_avg"][0, 0] = float("nan")


def other_rate(state: dict[str, Any]) -> None:
    state["optimizer"].param_groups[0]["lr"] = 0.5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(nan_moment, "not finite: optimizer/state/0/exp_avg"), (other_rate, "schedule 'schedule' stands at")],
)
def test_snapshot_that_makes_no_sense_is_passed_over(tmp_path: Path, spoil: Any, message: str) -> None:
    with open_store(tmp_path / "store") as store:
        train(store, agent(), 3, before_3=spoil)
    with open_store(tmp_path / "store") as store:
        report = RecoveryCoordinator(store).recover(agent())
        assert report.step == 2
        assert any(message in why for why in report.reasons)


def perturb(weight: torch.Tensor) -> None:
    weight[3, 5] += 0.01


def misplace(weight: torch.Tensor) -> None:
    weight[[3, 4]] = weight[[4, 3]].clone()


@pytest.mark.parametrize("spoil", [perturb, misplace])
def test_reference_output_finds_one_perturbed_weight_and_one_misplaced_row(tmp_path: Path, spoil: Any) -> None:
    """The weights are put wrong between the probe and the write, as a bad assembly of segments would."""
    inputs = torch.ones(1, WIDTH)

    def with_reference() -> dict[str, Any]:
        state = agent()
        state["reference"] = Reference(lambda: state["policy"](inputs).detach())
        return state

    state = with_reference()
    with open_store(tmp_path / "store") as store:
        for step in (1, 2):
            update(state)
            store.commit(step, state)
        good = Reference(lambda: state["policy"](inputs).detach())
        recorded = good.state_dict()
        with torch.no_grad():
            spoil(state["policy"].weight)
        store.commit(3, {**state, "reference": recorded})
    with open_store(tmp_path / "store") as store:
        report = RecoveryCoordinator(store).recover(with_reference())
        assert report.step == 2
        assert any("reference output differs by" in why for why in report.reasons)
        with pytest.raises(casckpt.InvalidInputError, match="no reference"):
            Reference(lambda: inputs).problems()


def test_trial_steps_must_be_finite_and_move_neither_rng_nor_live_objects(tmp_path: Path) -> None:
    state = agent()
    update(state)
    weights, drawn = state["policy"].weight.detach().clone(), torch.get_rng_state()
    seen: list[int] = []

    def step(trial: Any) -> float:
        seen.append(id(trial["policy"]))
        return update(trial)

    assert TrialSteps(step, count=3)(state) == []
    assert TrialSteps(step, count=3, change_max=1.0)(state) == []
    assert "move policy by" in TrialSteps(step, count=3, change_max=1e-6)(state)[0]
    assert "expected 1 to inf" in TrialSteps(step, count=3, change_min=1.0)(state)[0]
    assert "step 1 of 2: the loss is nan" in TrialSteps(lambda trial: float("nan"))(state)[0]

    def break_down(trial: Any) -> float:
        torch.randn(3)
        assert set(trial) == {"policy", "optimizer"}
        raise ZeroDivisionError("no steps")

    found = TrialSteps(break_down, only=["policy", "optimizer"])(state)
    assert found == ["trial step 1 of 2: ZeroDivisionError: no steps"]
    assert id(state["policy"]) not in seen
    assert torch.equal(state["policy"].weight, weights)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_nothing_passes_and_a_training_that_goes_on_is_rolled_back(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        state = agent()
        train(store, state, 3)
        update(state)
        before = [p.detach().clone() for p in state["policy"].parameters()]
        rate = state["optimizer"].param_groups[0]["lr"]
        coordinator = RecoveryCoordinator(store, checks=[lambda targets: ["no good"]])
        with pytest.raises(casckpt.IncompleteError, match="none of 3 snapshots passed") as failed:
            coordinator.recover(state, roll_back=True)
        assert [f"step {step} does not pass: no good" in failed.value.message for step in (1, 2, 3)] == [True] * 3
        assert all(torch.equal(a, b) for a, b in zip(before, state["policy"].parameters(), strict=True))
        assert state["optimizer"].param_groups[0]["lr"] == rate
        with pytest.raises(casckpt.IncompleteError):
            coordinator.recover(state)
        assert RecoveryCoordinator(store).decide().snapshots[0].step == 3  # not only what is older than the last tried
        assert store.commit(4, state).step == 4  # the handle stands where it stood, too


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("meanwhile", [1, 2])
def test_steps_that_are_committed_until_the_fence_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, meanwhile: int
) -> None:
    """The learner that is thought dead lives and commits between the decision and the fence, but not after it."""
    state, restored = agent(), agent()
    with open_store(tmp_path / "store") as dead, open_store(tmp_path / "store") as store:
        train(dead, state, before)
        fence = open_generation

        def commit_then_fence(*given: Any, **options: Any) -> int:
            monkeypatch.undo()
            train(dead, state, before + meanwhile)
            return fence(*given, **options)

        monkeypatch.setattr("casckpt.recovery.coordinator.open_generation", commit_then_fence)
        report = RecoveryCoordinator(store, marker=tmp_path / "marker").recover(restored)
        assert torch.equal(restored["policy"].weight, state["policy"].weight)
        with pytest.raises(casckpt.FencedError):
            train(dead, state, before + meanwhile + 1)
        assert report.step == before + meanwhile
        assert list_generations(store)[-1].snapshot == store.snapshot(before + meanwhile).id
        assert list_generations(store)[-1].number == report.generation
        assert store.commit(before + meanwhile + 1, restored).branch == "main"


def test_code_that_does_not_fit_is_refused_before_anything_is_fenced(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        train(store, agent(), 2)
        other = {**agent(), "policy": torch.nn.Linear(WIDTH, 3), "critic": torch.nn.Linear(2, 2)}
        del other["schedule"]
        weights = other["policy"].weight.detach().clone()
        plan = make_plan(store, other)
        assert not plan.is_possible
        paths = {path for path, _, _ in plan.differences}
        assert {"policy/weight", "policy/bias", "schedule", "critic"} <= paths
        with pytest.raises(casckpt.MismatchError):
            RecoveryCoordinator(store).recover(other)
        assert list_generations(store) == []
        assert torch.equal(other["policy"].weight, weights)


def test_stopped_answers_touch_nothing_and_say_how_to_begin_anew(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        train(store, agent(), 1)
    with open_store(tmp_path / "store", run="typo") as store:
        coordinator = RecoveryCoordinator(store)
        with pytest.raises(casckpt.NotFoundError, match="allow_fresh=True"):
            coordinator.recover(agent())
        assert list_generations(store) == []
        report = coordinator.recover(agent(), allow_fresh=True)
        assert (report.is_fresh, report.generation) == (True, 1)


def test_plan_names_an_exhausted_loader_and_drift(tmp_path: Path) -> None:
    cursor = IndexCursor(10, seed=1)
    cursor.take(10)
    with open_store(tmp_path / "store") as store:
        half = IndexCursor(10, seed=1)
        half.take(9)
        words = {"position": "end", "length": "long", "epoch": 0}  # a component of that look
        state = {"prompts": cursor, "evaluation": half, "words": words}
        store.commit(5, state, config={"lr": 1}, schema_version=2)
        plan = make_plan(store, {**state, "prompts": IndexCursor(10, seed=1)}, config={"lr": 2}, logged_step=7)
        assert plan.is_possible
        text = str(plan)
        assert text.count("is exhausted") == 1
        assert "loader 'prompts' is exhausted" in text
        assert "loader 'prompts' is exhausted" in str(make_plan(store))  # as on the command line
        assert "lr: 1 → 2" in text
        assert "2 ahead" in text
        assert not make_plan(store, config={"lr": 2}, fatal=["lr"]).is_possible
        assert not make_plan(store, schema_version=3).is_possible
        assert plan.to_dict()["action"]["kind"] == "resume"


@pytest.mark.parametrize(
    ("answer", "found"), [(None, []), ("", []), ([], []), ("too low", ["too low"]), (("a", "b"), ["a", "b"])]
)
def test_check_answers_with_nothing_one_text_or_several(answer: Any, found: list[str]) -> None:
    assert run_checks({}, [lambda targets: answer]) == found
    with pytest.raises(casckpt.InvalidInputError, match="check '<lambda>' returned False"):
        run_checks({}, [lambda targets: False])  # well or ill?


def test_marker_is_kept_wherever_it_is_wanted_or_refused_before_anybody_is_fenced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with open_store(tmp_path / "store") as store:
        state = {"policy": {"w": np.zeros(3)}}
        store.commit(1, state)
        with pytest.raises(casckpt.InvalidInputError, match="marker=''"):
            RecoveryCoordinator(store, marker="")
        with pytest.raises(casckpt.StorageError, match="not a regular file"):
            RecoveryCoordinator(store, marker=tmp_path / "folder").recover(state)
        with pytest.raises(casckpt.InvalidInputError, match="no folder for it"):
            RecoveryCoordinator(store, marker=tmp_path / "not" / "there" / "yet").recover(state)
        assert list_generations(store) == []
        marker = tmp_path / "not" / "yet"
        RecoveryCoordinator(store, marker=marker).recover(state)
        assert b"restored" in marker.read_bytes()


def test_finite_check_looks_at_tensors_alone() -> None:
    state = {
        "best": {"return": float("-inf")},
        "buffer": {"x": np.array([np.nan])},
        "w": {"a": torch.tensor([1.0]), "b": torch.tensor([torch.inf]), "n": torch.tensor([1])},
        "half": {"w": torch.tensor([float("nan")], dtype=torch.bfloat16)},
    }
    assert find_nonfinite(state) == ["not finite: w/b, half/w"]
    assert find_schedule_gaps(state) == []


class Killed(BaseException):
    """The process ends here."""


class KillingFileSystem(CountingFileSystem):
    """Ends the process before its `at`-th change of a file."""

    def strike(self, operation: Operation, act: Any) -> Any:
        raise Killed


@pytest.mark.full
def test_recovery_killed_at_every_operation_is_done_again(tmp_path: Path) -> None:
    torch.manual_seed(3)
    marker = str(tmp_path / "recovery")
    with open_store(tmp_path / "store") as store:
        state = agent()
        train(store, state, 2)
        expected = update(state)
    attempts = []
    for at in itertools.count(1):
        disk = KillingFileSystem(LocalFileSystem(), at=at)
        store = open_store(tmp_path / "store", create=False, system=System(file_system=disk))
        with contextlib.suppress(Killed):
            RecoveryCoordinator(store, marker=marker).recover(agent())
        store._keeper.close()
        if not disk.was_hit:
            break
        with open_store(tmp_path / "store") as store:
            coordinator = RecoveryCoordinator(store, marker=marker)
            was_interrupted = coordinator.was_interrupted
            again = agent()
            report = coordinator.recover(again)
            assert report.step == 2
            assert (report.attempt > 1) is was_interrupted
            assert not coordinator.was_interrupted
            attempts.append(report.attempt)
        assert update(again) == expected
    assert at > 10
    assert max(attempts) == 2
    with open_store(tmp_path / "store") as store:
        state = agent()
        RecoveryCoordinator(store, policy=Policy()).recover(state)
        train(store, state, 3)
        assert store.steps() == [1, 2, 3]


class PoweredDown(Exception):
    """What a check of somebody's own ends with."""


def test_recovery_that_ends_by_an_error_is_rolled_back_too(tmp_path: Path) -> None:
    def check(targets: Any) -> list[str]:
        raise PoweredDown

    with open_store(tmp_path / "store") as store:
        state = agent()
        train(store, state, 3)
        update(state)
        before = state["policy"].weight.detach().clone()
        with pytest.raises(PoweredDown):
            RecoveryCoordinator(store, checks=[check]).recover(state, roll_back=True)
        assert torch.equal(state["policy"].weight, before)
        assert store.commit(4, state).step == 4


def test_older_snapshot_that_does_not_fit_is_passed_over_on_the_way_back(tmp_path: Path) -> None:
    """The code was changed for step 2, and changed back; the newest turns out to make no sense."""
    with open_store(tmp_path / "store") as store:
        store.commit(1, agent())
        store.commit(2, {**agent(), "policy": torch.nn.Linear(WIDTH, 3)})
        store.commit(3, agent())

        def check(targets: Any) -> list[str]:
            return ["no good"] if store.step == 3 else []

        report = RecoveryCoordinator(store, checks=[check]).recover(agent())
    assert report.step == 1
    reasons = "; ".join(report.reasons)
    assert "step 3 does not pass: no good" in reasons
    assert "step 2 does not fit" in reasons
    assert "policy/weight" in reasons


def test_streams_are_those_of_the_snapshot_whatever_checks_draw(tmp_path: Path) -> None:
    """As an evaluation of the policy does, made a check."""

    def evaluate(targets: Any) -> list[str]:
        torch.rand(3), np.random.rand(3)
        return []

    with open_store(tmp_path / "store") as store:
        state = agent()
        train(store, state, 2)
        expected = [update(state) for _ in range(2)], float(np.random.rand())
    with open_store(tmp_path / "store") as store:
        state = agent()
        RecoveryCoordinator(store, checks=[evaluate]).recover(state)
        assert ([update(state) for _ in range(2)], float(np.random.rand())) == expected


@pytest.mark.parametrize("error", [IndexError("out of range"), AssertionError("NaN"), FloatingPointError("overflow")])
def test_probe_and_trial_step_that_break_down_are_problems_and_no_end(tmp_path: Path, error: Exception) -> None:
    """As an index out of place does in an embedding: the next older snapshot is tried."""
    is_broken = [True]

    def probe() -> torch.Tensor:
        if is_broken[0]:
            raise error
        return torch.ones(2)

    reference = Reference(probe)
    reference.load_state_dict({"outputs": torch.ones(2)})
    what = f"{type(error).__name__}: {error}"
    assert reference.problems() == [f"reference output: {what}"]
    assert TrialSteps(lambda trial: float(probe().sum()))({}) == [f"trial step 1 of 2: {what}"]
    is_broken[0] = False
    assert reference.problems() == []


def test_mask_of_infinities_is_no_divergence() -> None:
    """Attention adds a mask of zeros and minus infinities to its scores, and keeps it as a buffer."""
    model = torch.nn.Linear(3, 3)
    model.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    assert find_nonfinite({"policy": model}) == []
    with torch.no_grad():
        model.weight[0, 0] = float("-inf")
    assert find_nonfinite({"policy": model}) == ["not finite: policy/weight"]
    for values in ([0.0, float("nan")], [float("inf"), float("inf")], [1.0, float("-inf")]):
        assert find_nonfinite({"w": {"a": torch.tensor(values)}}) == ["not finite: w/a"]
