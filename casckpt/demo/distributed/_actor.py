"""The process that plays: asks the learner for an item, plays it, and gives the sample when it may.

What it made is held until the learner's version is known: a beat asks for it. While nobody answers it tries again, for
as long as its parent lives; samples of a generation that is over are thrown away. It knows no step and no store.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

import gymnasium
import msgspec
import numpy as np

from casckpt.demo.distributed._messages import (
    FRAME_SIZE_MAX,
    KEY,
    OBSERVATION_SIZE,
    Ask,
    FloatArray,
    Give,
    Layer,
    Task,
    decode_answer,
    encode,
    layers_of,
    read_addresses,
)
from casckpt.errors import FencedError, StorageError
from casckpt.recovery import BeatClient, SampleHold, Version

EPISODE_STEPS_MAX = 200
STEPS_MIN = 200  # of an item: episodes are begun until there are as many
_HELD_MAX = 16
_PAUSE_S = 0.05
_BEAT_TIMEOUT_S = 2.0


def main() -> int:
    """Play until the parent is gone."""
    parser = argparse.ArgumentParser(prog="casckpt.demo.distributed._actor")
    parser.add_argument("--work", required=True, help="folder in which the learner says where it listens")
    parser.add_argument("--name", required=True)
    parser.add_argument("--seed", required=True, type=int)
    arguments = parser.parse_args()
    Actor(arguments.work, arguments.name, arguments.seed, os.environ[KEY]).run()
    return 0


class Player:
    """Plays items. Their result depends on the policy, the seed and the item's number alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._environment = gymnasium.make("CartPole-v1", max_episode_steps=EPISODE_STEPS_MAX, disable_env_checker=True)

    def play(self, task: Task) -> Give:
        """Whole episodes, until there are STEPS_MIN steps."""
        layers = layers_of(task.weights)
        draws = np.random.default_rng([self._seed, task.item])
        observations: list[FloatArray] = []
        actions, ends, log_probabilities, returns = bytearray(), bytearray(), [], []
        while len(observations) < STEPS_MIN:
            observation, _ = self._environment.reset(seed=int(draws.integers(1 << 31)))
            gained, is_over = 0.0, False
            while not is_over:
                action, log_probability = _act(layers, observation, draws)
                observations.append(observation)
                actions.append(action)
                log_probabilities.append(log_probability)
                observation, reward, terminated, truncated, _ = self._environment.step(action)
                gained += float(reward)
                is_over = terminated or truncated
                ends.append(is_over)
            returns.append(gained)
        rows = np.stack(observations).astype(np.float32).reshape(-1, OBSERVATION_SIZE)
        log_probability_bytes = np.array(log_probabilities, np.float32).tobytes()
        parts = (rows.tobytes(), bytes(actions), log_probability_bytes, bytes(ends), returns)
        return Give(task.version, task.item, *parts)

    def close(self) -> None:
        self._environment.close()


def _act(layers: list[Layer], observation: FloatArray, draws: np.random.Generator) -> tuple[int, float]:
    hidden = observation
    for layer in layers[:-1]:
        hidden = np.tanh(layer.weight @ hidden + layer.bias)
    logits = (layers[-1].weight @ hidden + layers[-1].bias).astype(np.float64)
    log_probabilities = logits - np.logaddexp(logits[0], logits[1])
    action = int(draws.random() >= np.exp(log_probabilities[0]))
    return action, float(log_probabilities[action])


class Actor:
    """Connections to the learner of today, and what is held for it."""

    def __init__(self, work: str, name: str, seed: int, key: str) -> None:
        self._work, self._name, self._key = work, name, key
        self._player = Player(seed)
        self._hold: SampleHold[Give] = SampleHold(_HELD_MAX)
        self._samples: Connection | None = None
        self._beats: BeatClient | None = None
        self._parent = os.getppid()
        self._clock = threading.Event()  # never set: to wait with

    def run(self) -> None:
        """Play and give, until the parent is gone."""
        while os.getppid() == self._parent:
            try:
                self._connect()
                self._turn()
            except (OSError, EOFError, AuthenticationError, msgspec.DecodeError, FencedError):
                self._hold.lose()  # nobody there, or nobody to listen to: what was made waits
                self._disconnect()
                self._clock.wait(_PAUSE_S)
        self._disconnect()
        self._player.close()

    def _turn(self) -> None:
        """One item: ask, play, learn the version again, and give what may be given."""
        self._hold.learn(self._beat())
        for version, sample in self._hold.take():  # from before the learner was lost; of its generation still
            assert version.generation == sample.version.generation
            self._call(sample)
        task = self._call(Ask(self._name))
        if not isinstance(task, Task):
            return
        self._hold.learn(Version(*task.version))  # its policy is taken over with it
        self._hold.add(self._player.play(task))
        self._hold.learn(self._beat())
        for _, sample in self._hold.take():
            self._call(sample)

    def _beat(self) -> Version:
        assert self._beats is not None
        return self._beats.beat(phase="playing")

    def _call(self, message: Ask | Give) -> Any:
        assert self._samples is not None
        self._samples.send_bytes(encode(message))
        return decode_answer(self._samples.recv_bytes(FRAME_SIZE_MAX))

    def _connect(self) -> None:
        if self._samples is not None:
            return
        try:
            addresses = read_addresses(self._work)
        except FileNotFoundError as error:
            raise StorageError(f"no learner listens yet: {self._work} has no addresses. Wait for it.") from error
        host, port = addresses.beats
        self._beats = BeatClient(host, port, name=self._name, token=self._key, timeout_s=_BEAT_TIMEOUT_S)
        self._samples = Client(addresses.samples, authkey=self._key.encode())

    def _disconnect(self) -> None:
        if self._beats is not None:
            self._beats.close()
        if self._samples is not None:
            self._samples.close()
        self._beats = self._samples = None


if __name__ == "__main__":
    sys.exit(main())
