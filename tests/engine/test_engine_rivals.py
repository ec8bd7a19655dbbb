"""Two supervisors on one run, in real processes: the later recovery goes on, the earlier one ends and stays ended."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

import casckpt
from casckpt.recovery import Settings, Supervisor, list_generations

TIMEOUT_S = 1500.0
SETTINGS = Settings(backoff_s=0.01, poll_s=0.02, silence_min_s=1e9, term_deadline_s=1e6)
TRAINING = """
import os, sys
import numpy as np
import casckpt
from casckpt.recovery import RecoveryCoordinator, last_failure

path, stop = sys.argv[1:]
state = {"w": np.zeros(8)}
with casckpt.open(path, create=True) as store, casckpt.CheckpointEngine(store, async_mode=False) as engine:
    engine.register("state", state, casckpt.SaveStrategy(every_steps=1))
    RecoveryCoordinator(store).recover(engine, last_failure())
    while not os.path.exists(stop):
        state["w"] += 1
        engine.advance_step()
"""


@pytest.mark.full
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_two_supervisors_on_one_run_do_not_fence_each_other_for_ever(tmp_path: Path) -> None:
    path, stop = tmp_path / "store", tmp_path / "stop"
    command = [sys.executable, "-c", TRAINING, str(path), str(stop)]
    told: list[str] = []
    first, second = Supervisor(command, settings=SETTINGS, tell=told.append), Supervisor(command, settings=SETTINGS)
    codes: dict[str, int] = {}
    threads = {
        name: threading.Thread(target=lambda name=name, each=each: codes.update({name: each.run()}))
        for name, each in (("first", first), ("second", second))
    }
    threads["first"].start()
    while first.status.step < 2:
        threads["first"].join(0.02)
        assert threads["first"].is_alive()
    threads["second"].start()
    threads["first"].join(TIMEOUT_S)
    stop.touch()
    threads["second"].join(TIMEOUT_S)
    assert codes["second"] == 0
    assert codes["first"] != 0
    assert "another learner has recovered this run" in told[-1]
    assert (first.status.restart_count, second.status.restart_count) == (0, 0)
    assert first.status.last_failure is not None
    assert first.status.last_failure.kind == "lost-head"
    with casckpt.open(path, read_only=True) as store:
        numbers = [each.number for each in list_generations(store)]
        assert numbers in ([1, 2], [1, 2, 3])  # the third where a step was committed between decision and fence
        assert store.branch == "main"
