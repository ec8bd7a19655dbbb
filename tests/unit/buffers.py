"""Replay buffers of real frameworks: how each kind is made, filled and drawn from."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium", reason='needs the extra "sb3"')
sb3 = pytest.importorskip("stable_baselines3.common.buffers", reason='needs the extra "sb3"')

CAPACITY = 20
SHAPE = (1, 32, 32)
DRAWS = 10


class Kind:
    """One kind of buffer: how it is made, filled with `count` rows by a generator, and drawn from."""

    def __init__(self, make: Callable[[], Any], add: Callable[[Any, np.random.Generator], None], draw: Any) -> None:
        self.make, self._add, self._draw = make, add, draw

    def fill(self, buffer: Any, count: int, rng: np.random.Generator) -> None:
        for _ in range(count):
            self._add(buffer, rng)

    def draws(self, buffer: Any, count: int = DRAWS) -> list[list[np.ndarray]]:
        return [[_copy(part) for part in self._draw(buffer)] for _ in range(count)]


def _copy(part: Any) -> np.ndarray:
    return part.numpy().copy() if isinstance(part, torch.Tensor) else np.array(part)


@functools.cache
def framework(name: str) -> Any:
    """A module that takes seconds to import: only where a test runs that needs it."""
    with warnings.catch_warnings():  # of its own imports
        warnings.simplefilter("ignore")
        extra = name.partition(".")[0].replace("tensordict", "torchrl")
        return pytest.importorskip(name, reason=f'needs the extra "{extra}"', exc_type=ImportError)


# --- Stable-Baselines3 ---

PIXELS = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
PLACE = gymnasium.spaces.Box(-1, 1, (2,), np.float64)
ACTION = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
GOALS = gymnasium.spaces.Dict(observation=PIXELS, achieved_goal=PLACE, desired_goal=PLACE)
ENVS = 2


def _pixels(rng: np.random.Generator, *lead: int) -> np.ndarray:
    return rng.integers(0, 256, (*lead, *SHAPE), dtype=np.uint8)


def add_sb3(buffer: Any, rng: np.random.Generator) -> None:
    def seen() -> Any:
        if not isinstance(buffer.observations, dict):
            return _pixels(rng, ENVS)
        goals = {key: rng.uniform(-1, 1, (ENVS, 2)) for key in ("achieved_goal", "desired_goal")}
        return {"observation": _pixels(rng, ENVS), **goals}

    action, reward = rng.uniform(-1, 1, (ENVS, 3)).astype(np.float32), rng.normal(size=ENVS)
    infos = [{"TimeLimit.truncated": bool(rng.random() < 0.2)} for _ in range(ENVS)]
    buffer.add(seen(), seen(), action, reward, rng.random(ENVS) < 0.3, infos)


def draw_sb3(buffer: Any) -> Iterator[Any]:
    for part in buffer.sample(16):
        if part is not None and not isinstance(part, float):
            yield from part.values() if isinstance(part, dict) else [part]


class Goals:
    """What a hindsight buffer asks of environments."""

    def env_method(self, name: str, achieved: np.ndarray, desired: np.ndarray, infos: Any, indices: Any) -> Any:
        assert name == "compute_reward"
        return [-np.abs(achieved - desired).sum(-1)]


def sb3_kind(name: str, space: Any, **options: Any) -> Kind:
    def make() -> Any:
        from stable_baselines3 import HerReplayBuffer

        cls = HerReplayBuffer if name == "HerReplayBuffer" else getattr(sb3, name)
        return cls(CAPACITY * ENVS, space, ACTION, device="cpu", n_envs=ENVS, **options)

    return Kind(make, add_sb3, draw_sb3)


# --- Tianshou ---


def transition(rng: np.random.Generator, *lead: int) -> Any:
    ended = rng.random(lead) < 0.2 if lead else bool(rng.random() < 0.2)
    batch = framework("tianshou.data").Batch
    return batch(
        obs=_pixels(rng, *lead),
        act=rng.integers(0, 4, lead),
        rew=rng.normal(size=lead),
        terminated=ended,
        truncated=np.zeros(lead, bool) if lead else False,
        obs_next=_pixels(rng, *lead),
        info=batch(env_id=np.arange(lead[0]) if lead else 0),
    )


def add_tianshou(buffer: Any, rng: np.random.Generator) -> None:
    if not hasattr(buffer, "buffers"):
        buffer.add(transition(rng))
    elif rng.random() < 0.25:
        buffer.add(transition(rng, 2), buffer_ids=[0, 2])  # environments do not go in step
    else:
        buffer.add(transition(rng, 3))
    if hasattr(buffer, "weight"):
        buffer.update_weight(rng.choice(buffer.sample_indices(0), 1), rng.random(1) * 3)


def _add_goals(buffer: Any, rng: np.random.Generator) -> None:
    """A row of a goal environment for each buffer of a vector, or for the one."""
    lead = (3,) if hasattr(buffer, "buffers") else ()
    batch = framework("tianshou.data").Batch

    def seen() -> Any:
        goals = {key: rng.uniform(-1, 1, (*lead, 2)) for key in ("achieved_goal", "desired_goal")}
        return batch(observation=_pixels(rng, *lead), **goals)

    buffer.add(batch({**transition(rng, *lead), "obs": seen(), "obs_next": seen()}))


def _draw_goals(buffer: Any) -> list[Any]:
    batch, indices = buffer.sample(16)
    return [indices, batch.rew, *(batch[at][key] for at in ("obs", "obs_next") for key in sorted(batch.obs.keys()))]


def _cached() -> Any:
    tianshou = framework("tianshou.data")
    return tianshou.CachedReplayBuffer(tianshou.ReplayBuffer(CAPACITY), 3, 30)


def add_cached(buffer: Any, rng: np.random.Generator) -> None:
    buffer.add(transition(rng, 3))


def _draw_tianshou(buffer: Any) -> list[Any]:
    batch, indices = buffer.sample(16)
    keys = ["obs", "act", "rew", "done", "obs_next", *(["weight"] if hasattr(buffer, "weight") else [])]
    return [indices, *(batch[key] for key in keys), batch.info.env_id]


def _tianshou(name: str, *arguments: int, **options: Any) -> Kind:
    return Kind(lambda: getattr(framework("tianshou.data"), name)(*arguments, **options), add_tianshou, _draw_tianshou)


def _tianshou_goals(name: str, *arguments: int) -> Kind:
    def rewards(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return -np.abs(achieved - desired).sum(-1)

    options = {"compute_reward_fn": rewards, "horizon": 5, "future_k": 2.0}
    return Kind(lambda: getattr(framework("tianshou.data"), name)(*arguments, **options), _add_goals, _draw_goals)


# --- TorchRL ---


def _add_torchrl(buffer: Any, rng: np.random.Generator) -> None:
    row = {
        "pixels": torch.from_numpy(_pixels(rng, 1)),
        "action": torch.from_numpy(rng.normal(size=(1, 3))),
        "next": {
            "reward": torch.from_numpy(rng.normal(size=(1, 1))),
            "done": torch.tensor([[bool(rng.random() < 0.2)]]),
        },
    }
    buffer.extend(framework("tensordict").TensorDict(row, [1]))
    if hasattr(buffer.sampler, "_sum_tree"):
        buffer.update_priority(torch.tensor([int(rng.integers(0, len(buffer)))]), torch.tensor([float(rng.random())]))


def _draw_torchrl(buffer: Any) -> list[Any]:
    sample = buffer.sample()
    return [
        value for _, value in sorted(sample.items(include_nested=True, leaves_only=True), key=lambda pair: str(pair[0]))
    ]


def _torchrl(storage: str, sampler: str = "RandomSampler", *, is_compilable: bool = False, **options: Any) -> Kind:
    def make() -> Any:
        torchrl = framework("torchrl.data")
        has_trees = sampler == "PrioritizedSampler"
        if has_trees and not _has_trees():
            pytest.skip("TorchRL's compiled part does not load with this PyTorch")
        drawing = getattr(torchrl, sampler)(*[CAPACITY] * has_trees, **options)
        rows = getattr(torchrl, storage)(CAPACITY, compilable=is_compilable)
        return torchrl.TensorDictReplayBuffer(storage=rows, sampler=drawing, batch_size=16, compilable=is_compilable)

    return Kind(make, _add_torchrl, _draw_torchrl)


def _has_trees() -> bool:
    """Whether TorchRL's compiled part, in which priorities are kept, was built for this release of PyTorch."""
    try:
        import torchrl._torchrl  # noqa: F401
    except ImportError:
        return False
    return True


KINDS = {
    "sb3 Replay": sb3_kind("ReplayBuffer", PIXELS),
    "sb3 Replay, shared memory": sb3_kind(
        "ReplayBuffer", PIXELS, optimize_memory_usage=True, handle_timeout_termination=False
    ),
    "sb3 Dict": sb3_kind("DictReplayBuffer", GOALS),
    "sb3 NStep": sb3_kind("NStepReplayBuffer", PIXELS, n_steps=3),
    "sb3 HER": sb3_kind("HerReplayBuffer", GOALS, env=Goals()),
    "tianshou Replay": _tianshou("ReplayBuffer", CAPACITY),
    "tianshou stacked": _tianshou("ReplayBuffer", CAPACITY, stack_num=2, sample_avail=True),
    "tianshou Prioritized": _tianshou("PrioritizedReplayBuffer", CAPACITY, alpha=0.6, beta=0.4),
    "tianshou Vector": _tianshou("VectorReplayBuffer", 3 * CAPACITY, 3),
    "tianshou PrioritizedVector": _tianshou("PrioritizedVectorReplayBuffer", 3 * CAPACITY, 3, alpha=0.6, beta=0.4),
    "tianshou HER": _tianshou_goals("HERReplayBuffer", CAPACITY),
    "tianshou HERVector": _tianshou_goals("HERVectorReplayBuffer", 3 * CAPACITY, 3),
    "tianshou Cached": Kind(_cached, add_cached, _draw_tianshou),
    "torchrl memory": _torchrl("LazyTensorStorage"),
    "torchrl memory map": _torchrl("LazyMemmapStorage"),
    "torchrl without replacement": _torchrl("LazyTensorStorage", "SamplerWithoutReplacement"),
    "torchrl slices": _torchrl(
        "LazyTensorStorage",
        "SliceSampler",
        is_compilable=True,
        num_slices=4,
        end_key=("next", "done"),
        cache_values=True,
        strict_length=False,
    ),
    "torchrl prioritized": _torchrl("LazyTensorStorage", "PrioritizedSampler", alpha=0.6, beta=0.4),
}
EVERY_KIND = pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))


def fresh(kind: Kind) -> Any:
    """Another buffer, in which something else is that a restore replaces."""
    buffer = kind.make()
    kind.fill(buffer, 2, np.random.default_rng(99))
    return buffer
