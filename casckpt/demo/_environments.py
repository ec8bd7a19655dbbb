"""CartPole copies that can be captured between any two steps, and the running moments that normalise them.

What decides an environment's future is small but easily forgotten: the physical state, the environment's own random
generator, the time limit's step count (kept by a Gymnasium wrapper, not by the environment), and the return of the
episode under way. `Environments.state_dict` names all of it.

Episodes start within bounds drawn from Python's `random`, and observations carry sensor noise drawn from NumPy's
global generator: both are ordinary practice (domain randomisation), and both make a resume wrong if a stream is lost.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.wrappers import TimeLimit

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

ENVIRONMENT_ID = "CartPole-v1"
OBSERVATION_SIZE = 4
ACTION_COUNT = 2
SENSOR_NOISE = 0.005  # standard deviation; the pole falls at an angle of 0.21
RECENT_EPISODES = 30  # the reported return is the mean of this many finished episodes


class Transition(NamedTuple):
    """What one step of every environment gave; arrays have one row per environment.

    Where `ended`, `observation` already belongs to the next episode and `final_observation` to the one that ended.
    """

    observation: FloatArray
    reward: FloatArray
    ended: BoolArray
    truncated: BoolArray
    final_observation: FloatArray


class Environments:
    """`count` CartPoles that restart by themselves. Call `begin` or `load_state_dict` first."""

    def __init__(self, count: int) -> None:
        self._environments = [gymnasium.make(ENVIRONMENT_ID, disable_env_checker=True) for _ in range(count)]
        self._episode_return = np.zeros(count)
        self.observation: FloatArray = np.zeros((count, OBSERVATION_SIZE), dtype=np.float32)
        self.recent_returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.episode_count = 0

    def begin(self, seed: int) -> None:
        """Start a first episode everywhere; environment i's own generator is seeded with `seed + i`."""
        for i in range(len(self._environments)):
            self.observation[i] = self._start(i, seed=seed + i)

    def step(self, actions: npt.NDArray[np.int64]) -> Transition:
        """Apply one action (0 or 1) per environment."""
        count = len(self._environments)
        reward = np.zeros(count, dtype=np.float32)
        ended, truncated = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
        final = np.zeros_like(self.observation)
        for i, environment in enumerate(self._environments):
            plain, gained, terminated, truncated[i], _ = environment.step(int(actions[i]))
            final[i] = _sense(plain)
            reward[i] = gained
            ended[i] = terminated or truncated[i]
            truncated[i] &= not terminated
            self._episode_return[i] += float(gained)
            self.observation[i] = self._restart(i) if ended[i] else final[i]
        return Transition(self.observation.copy(), reward, ended, truncated, final)

    def mean_return(self) -> float:
        """Mean return of the latest finished episodes; 0.0 before the first one has ended."""
        return float(np.mean(self.recent_returns)) if self.recent_returns else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what these environments do next, as plain values."""
        return {
            "environments": [_capture(environment) for environment in self._environments],
            "observation": self.observation.copy(),
            "episode_return": self._episode_return.copy(),
            "recent_returns": list(self.recent_returns),
            "episode_count": self.episode_count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, in the middle of episodes."""
        for environment, captured in zip(self._environments, state["environments"], strict=True):
            _apply(environment, captured)
        self.observation[...] = state["observation"]
        self._episode_return[...] = state["episode_return"]
        self.recent_returns = deque(state["recent_returns"], maxlen=RECENT_EPISODES)
        self.episode_count = state["episode_count"]

    def close(self) -> None:
        """Release what Gymnasium holds."""
        for environment in self._environments:
            environment.close()

    def _restart(self, i: int) -> FloatArray:
        self.recent_returns.append(float(self._episode_return[i]))
        self.episode_count += 1
        return self._start(i, seed=None)

    def _start(self, i: int, *, seed: int | None) -> FloatArray:
        self._episode_return[i] = 0.0
        bound = random.uniform(0.02, 0.08)
        plain, _ = self._environments[i].reset(seed=seed, options={"low": -bound, "high": bound})
        return _sense(plain)


class RunningMoments:
    """Mean and variance of a stream of rows (float64), by the parallel update of Chan, Golub and LeVeque (1979)."""

    def __init__(self, size: int) -> None:
        self.mean = np.zeros(size)
        self.variance = np.ones(size)
        self.count = 1e-4  # so that the first rows decide, without a division by zero before them

    def update(self, rows: npt.NDArray[Any]) -> None:
        """Add `rows`, shape (n, size)."""
        n = len(rows)
        mean, variance = rows.mean(axis=0, dtype=np.float64), rows.var(axis=0, dtype=np.float64)
        total = self.count + n
        delta = mean - self.mean
        spread = self.variance * self.count + variance * n + delta**2 * self.count * n / total
        self.mean, self.variance, self.count = self.mean + delta * n / total, spread / total, total

    def state_dict(self) -> dict[str, Any]:
        """Mean, variance and count."""
        return {"mean": self.mean.copy(), "variance": self.variance.copy(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.mean, self.variance = np.array(state["mean"]), np.array(state["variance"])
        self.count = state["count"]


class Normalizer:
    """Observations to zero mean and unit variance; rewards divided by the spread of the discounted return."""

    def __init__(self, environment_count: int, gamma: float) -> None:
        self._gamma = gamma
        self._observation = RunningMoments(OBSERVATION_SIZE)
        self._return = RunningMoments(1)
        self._discounted = np.zeros(environment_count)

    def observe(self, observation: FloatArray) -> FloatArray:
        """Add a batch of observations to the statistics and return it normalised."""
        self._observation.update(observation)
        return self.normalize(observation)

    def normalize(self, observation: FloatArray) -> FloatArray:
        """Normalise without learning from it."""
        centred = (observation - self._observation.mean) / np.sqrt(self._observation.variance + 1e-8)
        return np.clip(centred, -10.0, 10.0).astype(np.float32)

    def scale_reward(self, reward: FloatArray, ended: BoolArray) -> FloatArray:
        """Follow the discounted return of every environment and divide by its standard deviation."""
        self._discounted = self._discounted * self._gamma + reward
        self._return.update(self._discounted[:, None])
        self._discounted[ended] = 0.0
        scaled: FloatArray = (reward / np.sqrt(self._return.variance[0] + 1e-8)).astype(np.float32)
        return scaled

    def state_dict(self) -> dict[str, Any]:
        """Both sets of moments and the returns under way."""
        return {
            "observation": self._observation.state_dict(),
            "return": self._return.state_dict(),
            "discounted": self._discounted.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._observation.load_state_dict(state["observation"])
        self._return.load_state_dict(state["return"])
        self._discounted = np.array(state["discounted"])


def _sense(plain: Any) -> FloatArray:
    noise = np.random.normal(0.0, SENSOR_NOISE, size=OBSERVATION_SIZE)
    return (np.asarray(plain) + noise).astype(np.float32)


def _time_limit(environment: Any) -> TimeLimit[Any, Any]:
    while not isinstance(environment, TimeLimit):
        environment = environment.env
    return environment


def _capture(environment: Any) -> dict[str, Any]:
    physics = environment.unwrapped
    return {
        "physics": np.array(physics.state, dtype=np.float64),
        "steps_beyond_terminated": physics.steps_beyond_terminated,
        "generator": physics.np_random.bit_generator.state,
        "elapsed_steps": _time_limit(environment)._elapsed_steps,
    }


def _apply(environment: Any, captured: dict[str, Any]) -> None:
    environment.reset()  # Gymnasium refuses to step what was never reset; everything it set is replaced below
    physics = environment.unwrapped
    physics.state = np.array(captured["physics"])
    physics.steps_beyond_terminated = captured["steps_beyond_terminated"]
    physics.np_random.bit_generator.state = captured["generator"]
    _time_limit(environment)._elapsed_steps = captured["elapsed_steps"]
