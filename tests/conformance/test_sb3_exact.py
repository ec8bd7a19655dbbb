"""n updates, SIGKILL, a new process, m updates: the same as n + m updates, bit for bit, for Stable-Baselines3.

The trainings and their comparison are those of `benchmarks.resume_sb3`, which prints SB3's own save and load beside
these; the expected values are an uninterrupted training's. casckpt takes no part in the comparison.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.resume_sb3 import EXPERIMENTS, Comparison, Outcome, compare, run

pytestmark = pytest.mark.full
COMPARED = {
    *("parameters", "optimizer moments", "trajectory", "learning rates", "next draws", "environments"),
    *("counters", "episode statistics", "evaluation"),
}


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    """All trainings, once for this file."""
    found = run(list(EXPERIMENTS), ["casckpt"], tmp_path_factory.mktemp("sb3"))
    return {each.experiment: each for each in found}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_killed_training_goes_on_bit_for_bit(name: str, comparisons: dict[str, Comparison]) -> None:
    found, experiment = comparisons[name], EXPERIMENTS[name]
    assert 0 < found.resumed_at <= experiment.kill_at < experiment.total_steps
    assert found.diverged_at is None
    assert found.parameter_difference == 0.0
    replay = {"replay samples"} if name in ("SAC", "DQN") else set()
    assert found.is_equal == dict.fromkeys(COMPARED | replay, True)


def test_the_comparison_sees_every_difference(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    np.save(tmp_path / "b.npy", np.array([0.0, -0.5, 0.0]))
    steps = [(step, f"digest {step}") for step in (1, 2, 3, 4)]
    rates = [(0, 0.2), (2, 0.1)]
    whole = Outcome(0, steps, rates, {"parameters": "p"}, str(tmp_path / "a.npy"), [1])
    rest = Outcome(2, steps[2:], rates[1:], {"parameters": "p"}, str(tmp_path / "a.npy"), [1])
    same = compare("DQN", "casckpt", whole, rest)
    assert (same.diverged_at, same.parameter_difference) == (None, 0.0)
    assert set(same.is_equal.values()) == {True}
    for name, change in {
        "trajectory": {"trajectory": [steps[2], (4, "another")]},
        "learning rates": {"learning_rates": [(2, 0.2)]},
        "parameters": {"digests": {"parameters": "q"}},
        "evaluation": {"evaluation": [2]},
    }.items():
        found = compare("DQN", "casckpt", whole, replace(rest, **change))
        assert [each for each, is_equal in found.is_equal.items() if not is_equal] == [name]
    assert compare("DQN", "casckpt", whole, replace(rest, trajectory=[steps[2], (4, "another")])).diverged_at == 4
    assert compare("DQN", "casckpt", whole, replace(rest, trajectory=steps[2:3])).diverged_at == 3
    assert (
        compare("DQN", "casckpt", whole, replace(rest, parameters=str(tmp_path / "b.npy"))).parameter_difference == 0.5
    )
