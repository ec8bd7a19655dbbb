"""`casckpt demo` in miniature: real training processes, a real SIGKILL, a real store left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gymnasium", reason='needs the extra "demo"')

import casckpt
from casckpt.demo._drive import DEMO_RUN, REFERENCE_RUN, Phase, WorkerFailedError, compare, run_demo
from casckpt.demo._drive import DemoPlan as Plan
from casckpt.demo._ppo import PpoConfig
from casckpt.demo._proof import digest_components

COMMAND = [sys.executable, "-c", "from casckpt.cli import main; main()", "demo"]


class Silent:
    """A screen that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def phase(self, name: str, first: int, last: int) -> None:
        """Ignored."""

    def committed(self, name: str, event: dict[str, Any]) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        self.notes.append(text)


def plan(path: Path) -> Plan:
    config = PpoConfig(seed=3, updates=6, environment_count=2, rollout_steps=32, minibatch_size=32, hidden_size=16)
    return Plan(str(path), config, kill_at=4, branch_from=2, branch_updates=2, branch_seed=11)


@pytest.mark.full
def test_a_killed_and_resumed_training_is_bit_identical_and_can_be_branched(store_path: Path) -> None:
    outcome = run_demo(plan(store_path), Silent())
    assert outcome.is_identical, [claim.to_dict() for claim in outcome.claims if not claim.holds]

    killed, resumed, branch = (outcome.phases[name] for name in ("killed", "resumed", "branch"))
    assert killed.exit_code == -signal.SIGKILL
    assert [commit["step"] for commit in killed.commits] == [1, 2, 3]
    assert resumed.resumed_from == 3
    assert branch.resumed_from == 2
    assert {claim.aspect for claim in outcome.claims} == {"manifest", "values", "curve", "next draws"}
    assert {claim.what for claim in outcome.claims if claim.aspect == "manifest"} == {
        *("policy", "value", "optimizer", "schedule", "rollout"),
        *("normalizer", "environments", "counters", "rng"),
    }
    assert sorted(os.listdir(store_path.parent)) == ["store"]  # the torch.save files are gone

    with casckpt.open(store_path, read_only=True, run=DEMO_RUN) as store:
        main, side = outcome.lines["main"], outcome.lines[branch.commits[0]["branch"]]
        assert [snapshot.step for snapshot in main] == [1, 2, 3, 4, 5, 6]
        assert [snapshot.step for snapshot in side] == [3, 4]
        assert all(snapshot.labels == {"reseed": "11"} for snapshot in side)
        assert store.restore("main@6")["counters"]["update"] == 6
        assert store.restore(f"{side[0].branch}@4")["counters"]["update"] == 4
        assert side[1].components["policy"].manifest != main[3].components["policy"].manifest
    assert outcome.totals[DEMO_RUN].dedup_ratio > 2 * outcome.totals[REFERENCE_RUN].dedup_ratio


@pytest.mark.full
def test_the_command_prints_the_tables_and_leaves_a_store_behind(store_path: Path) -> None:
    options = ["--store", str(store_path), "--updates", "4", "--seed", "5"]
    result = subprocess.run([*COMMAND, *options], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "SIGKILL in the middle of update 2 (exit code -9)" in result.stdout
    assert "Bit-identical" in result.stdout
    assert "casckpt log" in result.stdout
    with casckpt.open(store_path, read_only=True, run=REFERENCE_RUN) as store:
        assert [snapshot.step for snapshot in store.timeline()] == [1, 2, 3, 4]


@pytest.mark.full
def test_an_interrupt_stops_the_training_process_too(store_path: Path) -> None:
    options = ["--store", str(store_path), "--updates", "100"]
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if re.search(r"update 10 of", line):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()  # ends only when nobody holds the pipe any more
    assert process.returncode == 130
    assert "Stopped" in rest
    assert sorted(os.listdir(store_path.parent)) == ["store"]


@pytest.mark.full
def test_what_a_failed_training_process_said_is_in_the_error(store_path: Path) -> None:
    broken = replace(plan(store_path), config=PpoConfig(updates=4, minibatch_size=-1))
    with pytest.raises(WorkerFailedError, match=r"(?s)'reference'.*exit code 1.*RuntimeError.*split") as caught:
        run_demo(broken, Silent())
    assert caught.value.exit_code == 1


def test_the_comparison_notices_one_flipped_bit_in_one_component(store_path: Path) -> None:
    states, phases = {}, {}
    for run, flip in ((REFERENCE_RUN, False), (DEMO_RUN, True)):
        policy = torch.arange(64.0)
        policy.view(torch.int32)[17] ^= 1 if flip else 0
        states[run] = {"policy": {"w": policy}, "value": {"w": torch.ones(8)}}
        with casckpt.open(store_path, create=True, run=run) as store:
            store.commit(
                1, {"policy": {"w": torch.arange(64.0)}, "value": {"w": torch.zeros(8)}}, metrics={"return": 1.0}
            )
            store.commit(2, states[run], metrics={"return": 2.0})
        phases[run] = Phase(run, run, digests=digest_components(states[run]), draws={"torch": [0.5]})
    claims, divergence = compare(str(store_path), phases[REFERENCE_RUN], phases[DEMO_RUN])
    assert divergence == "step 2, component 'policy'"
    assert {(claim.what, claim.aspect) for claim in claims if not claim.holds} == {
        ("policy", "manifest"),
        ("policy", "values"),
    }


def test_the_comparison_notices_one_changed_metric_and_one_changed_draw(store_path: Path) -> None:
    phases = {}
    for run, change in ((REFERENCE_RUN, 0.0), (DEMO_RUN, 2.0**-52)):
        state = {"policy": {"w": torch.ones(8)}}
        with casckpt.open(store_path, create=True, run=run) as store:
            store.commit(1, state, metrics={"return": 1.0 + change, "learning_rate": 0.5})
        phases[run] = Phase(run, run, digests=digest_components(state), draws={"numpy": [1.0 + change], "torch": [0.5]})
    claims, divergence = compare(str(store_path), phases[REFERENCE_RUN], phases[DEMO_RUN])
    assert divergence is None
    assert {(claim.what, claim.aspect) for claim in claims if not claim.holds} == {
        ("return", "curve"),
        ("numpy", "next draws"),
    }
