"""The drill on a real training in processes of its own: one that keeps every promise, and one that does not."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import casckpt
from casckpt.recovery import Drill, Settings
from casckpt.recovery.drill import SCENARIOS, Fault
from casckpt.recovery.supervisor import Status
from tests.unit.cli_stores import call

TRAINING = """
import sys
import numpy as np
import casckpt
from casckpt.recovery import RecoveryCoordinator, last_failure, supervised_beats

path, kind = sys.argv[1:]
state = {"policy": {"w": np.zeros(30_000)}, "env": {"rng": np.random.default_rng(0)}}
beats = supervised_beats()
with casckpt.open(path, create=True) as store:
    report = RecoveryCoordinator(store).recover(state, last_failure())
    step = report.step or 0
    if kind == "careless" and step:
        state["env"]["rng"] = np.random.default_rng()
    if kind == "older" and step:
        step = store.resume_into(state, step - 1).step
    for step in range(step + 1, 100_000):
        state["policy"]["w"] += state["env"]["rng"].standard_normal(30_000)
        store.commit(step, state)
        beats.beat(step, phase=str(step))
"""
SETTINGS = Settings(backoff_s=0.01, poll_s=0.02, silence_min_s=3.0, silence_factor=1.0, term_deadline_s=0.2)
TIMEOUT_S = 1500.0  # how long is long enough for a machine that does much else; what is waited for comes in a second


def drill(tmp_path: Path, kind: str, faults: Mapping[str, Fault] | None = None) -> Drill:
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "store"), kind]
    return Drill(command, str(tmp_path / "store"), settings=SETTINGS, faults=faults, seed=1, timeout_s=TIMEOUT_S)


@pytest.mark.full
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_training_keeps_every_promise_in_every_scenario(tmp_path: Path) -> None:
    report = drill(tmp_path, "exact").run()
    assert [each.scenario for each in report.rounds] == list(SCENARIOS)
    assert report.ok, str(report)
    lost = {each.scenario: each.steps_lost for each in report.rounds}
    assert lost == {"kill": 0, "hang": 0, "damage": 1, "delete": 1, "kill-restoring": 0}
    again = {each.scenario: each.equal_count for each in report.rounds}
    assert (again["damage"], again["delete"]) == (1, 1)
    assert "5 of 5 promises kept" in str(report)


@pytest.mark.full
@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize(
    ("kind", "scenario", "problem", "wrong_count"),
    [("careless", "delete", "first divergence .*env", 0), ("older", "kill", "continued .* expected ", 1)],
)
def test_training_that_goes_on_otherwise_after_a_recovery_is_found_out(
    tmp_path: Path, kind: str, scenario: str, problem: str, wrong_count: int
) -> None:
    report = drill(tmp_path, kind).run([scenario])
    assert not report.ok
    (broken,) = report.rounds[0].problems
    assert re.search(problem, broken)
    assert report.wrong_count == wrong_count


@pytest.mark.full
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_fault_beside_a_learner_says_what_broke_and_a_learner_that_did_not_go_on_is_found_out(tmp_path: Path) -> None:
    def kill(status: Status) -> list[str]:
        os.kill(status.pid, signal.SIGKILL)
        return []

    faults: Mapping[str, Fault] = {"quiet": lambda status: [], "loud": lambda status: ["it broke"], "deadly": kill}
    report = drill(tmp_path, "exact", faults).run(["quiet", "loud", "deadly"])
    problems = [each.problems for each in report.rounds]
    assert problems == [(), ("it broke",), ("the learner was started again, expected it to go on",)]


def test_unknown_scenario_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(casckpt.InvalidInputError, match="expected some of"):
        drill(tmp_path, "exact").run(["earthquake"])
    assert list(tmp_path.iterdir()) == []


def test_command_line_of_the_drill_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    store = tmp_path / "store"
    called = call("drill", "--store", store, "--scenario", "earthquake", "--", "true")
    assert called.code == 2
    assert "expected some of" in called.err
    called = call("drill", "--store", store, "--timeout", 0.2, "--", "true")
    assert called.code == 5
    assert "did not come to step" in called.err
