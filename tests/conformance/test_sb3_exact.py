"""n updates, SIGKILL, a new process, m updates: the same as n + m updates, bit for bit, for Stable-Baselines3.

The trainings and their comparison are those of `benchmarks.resume_sb3`, which prints SB3's own save and load beside
these; the expected values are an uninterrupted training's. casckpt takes no part in the comparison.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.resume_sb3 import EXPERIMENTS, Comparison, run

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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_killed_training_goes_on_bit_for_bit(name: str, comparisons: dict[str, Comparison]) -> None:
    found, experiment = comparisons[name], EXPERIMENTS[name]
    assert 0 < found.resumed_at <= experiment.kill_at < experiment.total_steps
    assert found.diverged_at is None
    assert found.parameter_difference == 0.0
    replay = {"replay samples"} if name in ("SAC", "DQN") else set()
    assert found.is_equal == dict.fromkeys(COMPARED | replay, True)


@pytest.mark.timeout(900)
def test_the_comparison_sees_a_training_that_was_not_restored(
    comparisons: dict[str, Comparison], tmp_path: Path
) -> None:
    (found,) = run(["DQN"], ["sb3"], tmp_path)
    assert comparisons["DQN"].is_equal["trajectory"]
    assert not found.is_equal["trajectory"]
    assert not found.is_equal["parameters"]
