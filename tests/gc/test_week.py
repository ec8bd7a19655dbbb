"""A short, seeded piece of the week (`week`): processes killed at random, nothing lost, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gc.week import Week, live_through


@pytest.mark.full
def test_processes_killed_beside_a_collector_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    week = Week(10.0, float("inf"), {"agent": 30, "giant": 8}, kill_count=6, mb=2.0, seed=7, kill_every_s=2.0)
    outcome = live_through(tmp_path, week)
    assert outcome.kept_count >= 6
    assert outcome.pack_excess <= 1.3
    assert outcome.held_share <= 1.0
