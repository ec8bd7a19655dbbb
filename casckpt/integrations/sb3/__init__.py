"""Stable-Baselines3 and sb3-contrib: everything that `learn()` needs to go on as if it had never stopped.

    store = casckpt.open("runs/pendulum", create=True)
    callback = CheckpointCallback(store, every_steps=10_000)
    start = resume(model, callback, target_total=1_000_000)
    model.learn(start.remaining, reset_num_timesteps=start.is_fresh, callback=callback)

The same four lines begin a run and continue it after a crash. A snapshot is taken between two rollouts: the last
update is done and the next transition is not begun, so counters, buffer and environments belong together. A step is
`model.num_timesteps`.

`components(model)` is the state by name, for loops that commit by themselves. Nothing is pickled. What cannot be
captured is an error that names it, unless `strict=False` accepts it with a warning.
"""

from __future__ import annotations

from casckpt.integrations.sb3._callback import CheckpointCallback, Resumption, resume
from casckpt.integrations.sb3._components import components
from casckpt.integrations.sb3._environments import StatefulEnv

__all__ = ["CheckpointCallback", "Resumption", "StatefulEnv", "components", "resume"]
