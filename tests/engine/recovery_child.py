"""A PPO training that recovers by itself: `python recovery_child.py STORE MARKER LAST`; see `test_engine_recovery`.

The engine saves every update, the coordinator decides where to go on. Its first life under a supervisor calls what it
saves from update 7 on diverged, and is killed at update 8. Without a supervisor nothing of that happens.
"""

from __future__ import annotations

import os
import signal
import sys

import casckpt
from casckpt.demo._ppo import Ppo, PpoConfig
from casckpt.recovery import RecoveryCoordinator, last_failure

CONFIG = PpoConfig(seed=3, updates=30, environment_count=2, rollout_steps=16, epochs=1, minibatch_size=32)


def train(path: str, marker: str, last: int) -> None:
    ppo = Ppo(CONFIG)
    is_doomed = os.environ.get("CASCKPT_ATTEMPT") == "0"
    with (
        casckpt.open(path, create=True) as store,
        casckpt.CheckpointEngine(store, save_budget=None, async_mode=False) as engine,
    ):
        for name, part in ppo.state().items():
            engine.register(name, part, casckpt.SaveStrategy(every_steps=1))
        report = RecoveryCoordinator(store, marker=marker, keep_reads=True).recover(engine, last_failure())
        print(report, flush=True)
        if report.is_fresh:
            ppo.begin()
        while ppo.counters["update"] < last:
            with engine.update():
                ppo.collect()
                ppo.learn()
            update = ppo.counters["update"]
            if is_doomed and update >= 7:
                engine.save(update, labels={"diverged": "true"})
                if update == 8:
                    os.kill(os.getpid(), signal.SIGKILL)
            else:
                engine.step(update)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
