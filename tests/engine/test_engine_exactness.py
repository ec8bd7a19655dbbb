"""(E17) PPO, killed and continued in another process, is the training that was never killed, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import casckpt

CHILD = Path(__file__).with_name("ppo_child.py")


def run(path: Path, last: int, *kill_at: int) -> str:
    """Train until update `last`; the digest of all state at the end, empty when the process was killed before."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CHILD), str(path), str(last), *map(str, kill_at)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (-9 if kill_at else 0), done.stderr
    return done.stdout.strip()


@pytest.mark.full
def test_killed_and_continued_training_equals_the_one_that_was_not(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 9)
    assert len(whole) == 64
    killed = tmp_path / "killed"
    assert run(killed, 9, 5) == ""  # in update 6: the newest consistent step is 3, light ones come after it
    assert run(killed, 9) == whole
    with casckpt.open(tmp_path / "whole") as one, casckpt.open(killed) as other:
        expected = {each.step: each for each in one.timeline()}
        assert sorted(expected) == list(range(1, 10))
        for each in other.timeline():
            assert {name: part.manifest for name, part in each.components.items()} == {
                name: part.manifest for name, part in expected[each.step].components.items()
            }
            assert each.metrics == expected[each.step].metrics
