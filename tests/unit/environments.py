"""Environments for tests: real ones in deep stacks of wrappers, and small ones that hold what is hard to capture."""

from __future__ import annotations

import ctypes
import enum
import itertools
import socket
import threading
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import ale_py
import gymnasium
import numpy as np
from gymnasium import wrappers

gymnasium.register_envs(ale_py)


def five_deep(name: str) -> Any:
    """An environment below five wrappers of its own, besides those that `gymnasium.make` adds."""
    env: Any = wrappers.RecordEpisodeStatistics(gymnasium.make(name))
    env = wrappers.NormalizeObservation(env)
    env = wrappers.NormalizeReward(env)
    env = wrappers.FrameStackObservation(env, 3)
    return wrappers.TransformReward(env, lambda reward: 2.0 * float(reward))


def atari(name: str) -> Any:
    """An Atari game with sticky actions, a frame stack and statistics."""
    game = gymnasium.make(name, max_num_frames_per_episode=400, repeat_action_probability=0.0)
    env: Any = wrappers.RecordEpisodeStatistics(wrappers.StickyAction(game, 0.25))
    return wrappers.FrameStackObservation(env, 4)


def cart_pole() -> Any:
    return gymnasium.make("CartPole-v1")


def normalised_cart_pole() -> Any:
    return wrappers.NormalizeReward(wrappers.NormalizeObservation(gymnasium.make("CartPole-v1")))


def play(env: Any, actions: list[Any]) -> list[Any]:
    """What the environment gives for these actions, as bytes and plain numbers; it is reset where an episode ends."""
    given: list[Any] = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        given.append((np.array(observation).tobytes(), float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            given.append(np.array(env.reset()[0]).tobytes())
    return given


def actions_for(env: Any, count: int, seed: int) -> list[Any]:
    """Random actions that do not touch the environment's own generators."""
    rng = np.random.default_rng(seed)
    space = env.action_space
    if hasattr(space, "n"):
        return [int(rng.integers(space.n)) for _ in range(count)]
    return [rng.uniform(space.low, space.high).astype(space.dtype) for _ in range(count)]


class Colour(enum.Enum):
    """A member of this is an attribute below."""

    RED = 1
    GREEN = 2


class Pair(NamedTuple):
    """A namedtuple attribute."""

    left: int
    right: Any


class Agent:
    """A plain object inside an environment, with slots and a generator that it shares."""

    __slots__ = ("energy", "friends", "rng")

    def __init__(self, rng: Any) -> None:
        self.rng = rng
        self.energy = 1.0
        self.friends: list[Any] = []


class Corridor(gymnasium.Env[Any, Any]):
    """A walk along a line whose future depends on everything that it holds."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, width: int = 9) -> None:
        self.width = width
        self.board = np.zeros((3, width))
        self.row = self.board[1]  # a view: what is written here is seen there
        self.rng = np.random.default_rng(5)
        self.agents = [Agent(self.rng), Agent(self.rng)]
        self.agents[0].friends.append(self.agents[1])
        self.agents[1].friends.append(self.agents[0])
        self.colour = Colour.RED
        self.pair = Pair(0, [1, 2])
        self.visits: Any = defaultdict(int)
        self.names = OrderedDict(a=1)
        self.seen: set[int] = set()
        self.recent: deque[Any] = deque(maxlen=3)
        self.tail = self.recent  # the same object under a second name
        count = [0]

        def tick() -> int:
            count[0] += 1
            return count[0]

        self.tick = tick
        self.notify = self.agents[0].friends.append
        self.measure = self.distance

    def distance(self) -> float:
        """A bound method of this object is an attribute of it."""
        return float(self.board.sum())

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.board[:] = 0.0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        place = int(self.np_random.integers(self.width))
        self.row[place] += 1 + action + self.agents[1].rng.random()
        self.agents[0].friends[0].energy *= 1.01
        self.colour = Colour.GREEN if self.colour is Colour.RED else Colour.RED
        self.pair = Pair(self.pair.left + 1, [place, *self.pair.right[:2]])
        self.visits[place] += 1
        self.names["a"] += 1
        self.seen.add(place)
        self.recent.append(place)
        self.late = place  # an attribute that the constructor does not make
        return self._observe(), self.agents[1].energy, self.tick() % 50 == 0, False, {}

    def _observe(self) -> Any:
        wide = sum(self.tail) + sum(self.visits.values()) + len(self.seen) + self.names["a"]
        return np.array([self.board.sum(), wide, self.colour.value, self.measure() + self.pair.left])


class Counting(gymnasium.Env[Any, Any]):
    """Its future depends on an iterator whose position no attribute shows."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.count = itertools.count()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array([float(next(self.count))]), 0.0, False, False, {}


class Handles(Counting):
    """It holds what only this process has."""

    def __init__(self) -> None:
        super().__init__()
        self.number = ctypes.c_double(1.0)
        self.pointer = ctypes.pointer(self.number)
        self.log = open(__file__)  # noqa: SIM115 - the open file is the point
        self.socket = socket.socket()
        self.lock = threading.Lock()
        self.nested = {"workers": [threading.Thread(target=print)]}

    def close(self) -> None:
        self.log.close()
        self.socket.close()


class Fragile(gymnasium.Env[Any, Any]):
    """It can be made once only: in a fresh process its constructor fails."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    is_allowed = False

    def __init__(self) -> None:
        if not Fragile.is_allowed:
            raise RuntimeError("the licence server said no")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1), 0.0, False, False, {}
