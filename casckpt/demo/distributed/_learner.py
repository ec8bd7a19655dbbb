"""The process that trains: recovers, hands out items, learns from what was played, commits every update.

With `--alone` it plays its items itself and meets no faults: what the drill compares with. With `--floor` it only
starts, imports and restores: nothing that recovers can be faster.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import casckpt
from casckpt import CasckptError, RngState, StorageError
from casckpt.demo._network import network, seed_global_streams
from casckpt.demo.distributed._exchange import Exchange
from casckpt.demo.distributed._messages import (
    ACTION_COUNT,
    HIDDEN_SIZE,
    KEY,
    OBSERVATION_SIZE,
    Addresses,
    Rows,
    Task,
    rows_of,
    write_addresses,
)
from casckpt.recovery import (
    BeatFile,
    BeatServer,
    Frontier,
    RecoveryCoordinator,
    Reference,
    SampleGate,
    Version,
    last_failure,
    supervised_beats,
)

ITEMS_PER_UPDATE = 4
RUN = "drill"
NO_SPACE = "no space"  # the phase of its beats while commits are refused
_RETURNS_KEPT = 20
_EPOCHS, _MINIBATCH_SIZE, _CLIP, _GAMMA, _LAMBDA = 3, 256, 0.2, 0.99, 0.95
_ACTOR_TIMEOUT_S = 2.0  # shorter than for real actors, whose items take longer
_SPACE_PAUSE_S, _SPACE_TRIES_MAX = 0.1, 600


class Learner:
    """The training itself; knows neither sockets nor stores."""

    def __init__(self, seed: int) -> None:
        seed_global_streams(seed)  # all of them: `rng` holds all of them
        self.policy = network(OBSERVATION_SIZE, HIDDEN_SIZE, ACTION_COUNT, output_gain=0.01)
        self.value = network(OBSERVATION_SIZE, HIDDEN_SIZE, 1, output_gain=1.0)
        self.optimizer = torch.optim.Adam([*self.policy.parameters(), *self.value.parameters()], lr=1e-3)
        self.frontier = Frontier()
        self.progress: dict[str, Any] = {"update": 0, "samples": 0, "returns": []}
        self._rng = RngState()
        probe = torch.linspace(-1, 1, 8 * OBSERVATION_SIZE).reshape(8, OBSERVATION_SIZE)
        self._reference = Reference(lambda: self.policy(probe).detach())

    def state(self) -> dict[str, Any]:
        """The live parts by component name."""
        return {
            "policy": self.policy,
            "value": self.value,
            "optimizer": self.optimizer,
            "frontier": self.frontier,
            "progress": self.progress,
            "rng": self._rng,
            "reference": self._reference,
        }

    def weights(self) -> bytes:
        """The policy as one float32 vector."""
        with torch.no_grad():
            return bytes(torch.cat([each.flatten() for each in self.policy.parameters()]).numpy().tobytes())

    def learn(self, played: list[Rows]) -> float:
        """One PPO update on its items, in their order; returns the mean return of the latest episodes."""
        observation = torch.from_numpy(np.concatenate([each.observation for each in played]))
        action = torch.from_numpy(np.concatenate([each.action for each in played]))[:, None]
        before = torch.from_numpy(np.concatenate([each.log_probability for each in played]))
        ended = torch.from_numpy(np.concatenate([each.ended for each in played]))
        advantage, target = self._advantages(observation, ended)
        for rows in self._minibatches(len(action)):
            log_probability = self.policy(observation[rows]).log_softmax(dim=-1).gather(1, action[rows])[:, 0]
            ratio, gain = (log_probability - before[rows]).exp(), advantage[rows]
            clipped = torch.min(ratio * gain, ratio.clamp(1 - _CLIP, 1 + _CLIP) * gain).mean()
            value_loss = (self.value(observation[rows])[:, 0] - target[rows]).square().mean()
            self.optimizer.zero_grad()
            (0.5 * value_loss - clipped).backward()
            self.optimizer.step()
        self.progress["update"] += 1
        self.progress["samples"] += len(action)
        returns: list[float] = [*self.progress["returns"], *(each for rows in played for each in rows.returns)]
        self.progress["returns"] = returns[-_RETURNS_KEPT:]
        return sum(returns[-_RETURNS_KEPT:]) / len(returns[-_RETURNS_KEPT:])

    def _advantages(self, observation: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
        """Generalised advantages, normalised, and value targets; a reward of 1 per step, scaled to values near 1."""
        with torch.no_grad():
            value = self.value(observation)[:, 0]
        gains: list[float] = []  # from the last row to the first
        following = carried = 0.0
        for now, is_end in zip(reversed(value.tolist()), reversed(ended.tolist()), strict=True):
            goes_on = 0.0 if is_end else 1.0
            surprise = (1 - _GAMMA) + _GAMMA * following * goes_on - now
            carried = surprise + _GAMMA * _LAMBDA * goes_on * carried
            gains.append(carried)
            following = now
        advantage = torch.tensor(gains[::-1])
        return (advantage - advantage.mean()) / (advantage.std() + 1e-8), advantage + value

    def _minibatches(self, count: int) -> Iterator[Tensor]:
        for _ in range(_EPOCHS):
            yield from torch.split(torch.randperm(count), _MINIBATCH_SIZE)


def main() -> int:
    """Train as the arguments say; returns the exit code."""
    parser = argparse.ArgumentParser(prog="casckpt.demo.distributed._learner")
    parser.add_argument("--store", required=True)
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--work", help="folder in which it says where it listens, and keeps its marker")
    parser.add_argument("--alone", type=int, metavar="N", help="play the items here, N updates")
    parser.add_argument("--floor", action="store_true", help="restore, and end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the sum of a reduction depends on how threads share it
    torch.use_deterministic_algorithms(True)
    learner = Learner(arguments.seed)
    try:
        if arguments.floor:
            with casckpt.open(arguments.store, run=RUN, read_only=True) as store:
                store.restore_into(learner.state())
        elif arguments.alone is not None:
            train_alone(arguments.store, learner, arguments.seed, arguments.alone)
        else:
            train(arguments.store, learner, arguments.work, os.environ[KEY])
    except CasckptError as error:
        print(f"casckpt: {error}", file=sys.stderr)
        return 1
    return 0


def train_alone(path: str, learner: Learner, seed: int, update_count: int) -> None:
    """The same training in one process: no sockets, no recovery, no faults. Makes the store."""
    from casckpt.demo.distributed._actor import Player

    player = Player(seed)
    with casckpt.open(path, create=True, run=RUN) as store:
        for step in range(1, update_count + 1):
            items = learner.frontier.take(ITEMS_PER_UPDATE)
            tasks = [Task(Version(0, step - 1), item, learner.weights()) for item in items]
            mean_return = learner.learn([rows_of(player.play(task)) for task in tasks])
            learner.frontier.train(items)
            store.commit(step, learner.state(), metrics={"return": mean_return}, necessity={"reference": "droppable"})
    player.close()


def train(path: str, learner: Learner, work: str, key: str) -> None:
    """Recover, then train with actors until the parent is gone.

    Raises:
        CasckptError: it cannot be recovered, was fenced, or its store refused for a minute.
    """
    parent, beats, state = os.getppid(), supervised_beats(), learner.state()
    with casckpt.open(path, create=True, run=RUN) as store:
        report = RecoveryCoordinator(store, marker=f"{work}/recovery.marker").recover(state, last_failure())
        gate = SampleGate(Version(report.generation, learner.progress["update"]), behind_max=0)
        with (
            BeatServer(lambda: gate.version, token=key, timeout_s=_ACTOR_TIMEOUT_S) as server,
            Exchange(gate, key, silent=lambda: _silent(server)) as exchange,
        ):
            write_addresses(work, Addresses(server.address, exchange.address))
            while os.getppid() == parent:
                _update(store, learner, exchange, gate, beats)


def _update(
    store: casckpt.Store, learner: Learner, exchange: Exchange, gate: SampleGate, beats: BeatFile | None
) -> None:
    def beat(phase: str = "") -> None:
        if beats is not None:
            beats.beat(learner.progress["update"], generation=gate.version.generation, phase=phase)

    items = learner.frontier.take(ITEMS_PER_UPDATE)
    given = exchange.gather(items, learner.weights(), waiting=beat)
    mean_return = learner.learn([rows for _, rows in given])
    learner.frontier.train(items)
    versions = [version for version, _ in given]
    metrics: dict[str, float | int] = {
        "return": mean_return,
        "generation_min": min(each.generation for each in versions),
        "generation_max": max(each.generation for each in versions),
        "behind_max": max(learner.progress["update"] - 1 - each.step for each in versions),
        "refused": gate.refused_count,
    }
    _commit(store, learner, metrics, beat)
    exchange.advance(learner.progress["update"])
    beat()


def _commit(
    store: casckpt.Store, learner: Learner, metrics: dict[str, float | int], beat: Callable[[str], None]
) -> None:
    """Commit this update; on a disk that is full, stand still until there is room."""
    clock = threading.Event()  # never set: to wait with
    for tries in range(1, _SPACE_TRIES_MAX + 1):
        try:
            store.commit(
                learner.progress["update"], learner.state(), metrics=metrics, necessity={"reference": "droppable"}
            )
            return
        except StorageError:
            if tries == _SPACE_TRIES_MAX:
                raise
        beat(NO_SPACE)
        clock.wait(_SPACE_PAUSE_S)


def _silent(server: BeatServer) -> set[str]:
    return {name for name, pulse in server.pulses().items() if not pulse.is_alive}


if __name__ == "__main__":
    sys.exit(main())
