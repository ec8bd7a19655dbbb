"""A PPO training in a process of its own, through the engine: `python ppo_child.py STORE LAST [KILL_AT]`.

Goes on from whatever the store holds until update LAST; prints the digest of everything at the end. With KILL_AT it
kills itself in the middle of the update after that one, when the rollout is there and nothing has been learned from it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import numpy as np
import torch

import casckpt
from casckpt.demo._ppo import Ppo, PpoConfig
from casckpt.state.peek import next_draws

CONFIG = PpoConfig(seed=3, updates=30, environment_count=4, rollout_steps=32, epochs=2, minibatch_size=64)
LIGHT = ("counters", "rng", "schedule", "normalizer", "environments", "rollout")


def train(path: str, last: int, kill_at: int | None) -> Ppo:
    ppo = Ppo(CONFIG)
    with (
        casckpt.open(path, create=True, verify="off") as store,
        casckpt.CheckpointEngine(store, save_budget=None) as engine,
    ):
        for name, part in ppo.state().items():
            steps = 1 if name in LIGHT else 3
            engine.register(name, part, casckpt.SaveStrategy(every_steps=steps))
        if engine.restore().is_fresh:
            ppo.begin()
        while ppo.counters["update"] < last:
            with engine.update():
                ppo.collect()
                if ppo.counters["update"] == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                metrics = ppo.learn()
            engine.step(ppo.counters["update"], metrics=metrics)
    return ppo


def digest(ppo: Ppo) -> str:
    """Of parameters, moments, environments, normaliser, rollout, counters, and what each random stream gives next."""
    found = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                feed(str(key))
                feed(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                feed(item)
        elif isinstance(value, torch.Tensor):
            feed(value.detach().numpy())
        elif isinstance(value, np.ndarray):
            found.update(str((value.dtype, value.shape)).encode() + value.tobytes())
        elif hasattr(value, "state_dict"):
            feed(value.state_dict())
        elif isinstance(value, np.random.Generator):
            feed(value.bit_generator.state)
        else:
            found.update(repr(value).encode())

    state = ppo.state()
    feed(next_draws(state.pop("rng")))
    feed(state)
    return found.hexdigest()


if __name__ == "__main__":
    kill_at = int(sys.argv[3]) if len(sys.argv) > 3 else None
    print(digest(train(sys.argv[1], int(sys.argv[2]), kill_at)))
