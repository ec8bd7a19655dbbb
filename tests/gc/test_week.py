"""A short, seeded piece of the week (`week`): processes killed at random, nothing lost, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gc.week import live_through


@pytest.mark.full
def test_processes_killed_beside_a_collector_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    outcome = live_through(tmp_path, seconds=25.0, seed=7, kill_every_s=2.0, scale=0.5)
    assert outcome.commit_count > 20 and outcome.kill_count > 5 and outcome.kept_count >= 4
    assert outcome.excess <= 1.3
    assert outcome.held_share <= 1.0
