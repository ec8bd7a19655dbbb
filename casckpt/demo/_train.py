"""The training loop. Three lines of it are casckpt: open, resume, commit.

The same function starts a run, goes on after a crash, and branches off an earlier step; which of them it is follows
from what the store holds and from `ref`. `state` is a mapping of component name to live object, made once: `commit`
reads from it, `resume_into` writes into it.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Protocol

import casckpt
from casckpt.demo._ppo import Ppo, PpoConfig


class Watcher(Protocol):
    """Who is told how training goes on. A training loop of your own does not need one."""

    def started(self, ppo: Ppo, report: casckpt.RestoreReport) -> None:
        """State is in place: restored as the report says, or new."""

    def collected(self, ppo: Ppo) -> None:
        """The rollout buffer is full; this update's optimisation comes next."""

    def committed(self, ppo: Ppo, snapshot: casckpt.Snapshot, *, commit_s: float) -> None:
        """The update is durable."""


def train(
    path: str,
    config: PpoConfig,
    watcher: Watcher,
    *,
    run: str,
    update_count: int,
    ref: int | str = "latest",
    reseed: int | None = None,
) -> Ppo:
    """Train `run` until `update_count` updates are done, committing every one of them.

    Args:
        path: The store; made if it is not there.
        config: Hyper-parameters; stored with every snapshot.
        watcher: Told about progress.
        run: Name of the training; runs in one store share content.
        update_count: Update to stop after, counted from the beginning of the run.
        ref: Where to go on. An earlier step makes the next commit open a branch.
        reseed: Leave the recorded random streams for this seed; recorded as a label of every commit.

    Raises:
        CasckptError: The store cannot be read or written. Every update committed before stays restorable.
    """
    ppo = Ppo(config)
    state = ppo.state()
    settings = asdict(config)
    labels = {} if reseed is None else {"reseed": str(reseed)}
    with casckpt.open(path, create=True, run=run) as store:
        report = store.resume_into(state, ref=ref)
        if report.is_fresh:
            ppo.begin()
        if reseed is not None:
            ppo.reseed(reseed)
        watcher.started(ppo, report)
        while ppo.counters["update"] < update_count:
            ppo.collect()
            watcher.collected(ppo)
            metrics = ppo.learn()
            before = time.perf_counter()
            snapshot = store.commit(ppo.counters["update"], state, metrics=metrics, labels=labels, config=settings)
            watcher.committed(ppo, snapshot, commit_s=time.perf_counter() - before)
    return ppo
