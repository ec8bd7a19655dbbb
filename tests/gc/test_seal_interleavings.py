"""The real code, interleaved with a sealing: commit, restore or a second collection beside it, by the same scheduler.

As in `test_interleavings`, but everything lies inline, an epoch has four entries, and an actor may also be interrupted
before it opens an entry.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import casckpt_gc
import pytest
from casckpt_gc import Retention

from casckpt.errors import NotFoundError
from casckpt.testing.trees import difference
from casckpt.testing.wrapping import Operation
from tests.gc.collecting import check_steps, collect, commit
from tests.gc.sealing import short_epochs, tree, trees
from tests.gc.test_interleavings import PAIRS, Actor, Scheduler, sweep
from tests.unit.stores import open_store

RETENTION = Retention(latest=1)
LAST = 5
Act = Callable[[Actor], None]


@pytest.fixture(autouse=True, scope="module")
def epochs() -> Iterator[None]:
    with short_epochs():
        yield


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, epochs: None) -> Path:
    path = tmp_path_factory.mktemp("start") / "store"
    with open_store(path) as store:
        commit(store, *range(1, LAST + 1), make=tree)
    return path


class EntryActor(Actor):
    """May be interrupted before it opens an entry or an epoch, too."""

    def perform(self, operation: Operation, act: Callable[[], Any]) -> Any:
        if operation.name == "open" and "/timeline/" in operation.path and not self._holds_index():
            self.scheduler.pause(self.number, is_willing=False)
        return super().perform(operation, act)


def commits(path: Path) -> Act:
    """Commits what the retired step 2 had, and nobody else has."""

    def act(actor: Actor) -> None:
        with actor.store(path) as store:
            store.commit(LAST + 1, tree(2))

    return act


def collects(path: Path) -> Act:
    def act(actor: Actor) -> None:
        with actor.store(path, run="collector") as keeper:
            keeper.run = "main"
            casckpt_gc.Collection(casckpt_gc.plan(keeper, RETENTION), grace_s=0.0, sleep=actor.sleep).run()

    return act


def restores(path: Path) -> Act:
    """Restores the oldest and the newest step that it sees."""

    def act(actor: Actor) -> None:
        with actor.store(path) as store:
            for step in (store.steps()[0], store.steps()[-1]):
                try:
                    found = store.restore(step)
                except NotFoundError:
                    assert store.snapshot(step).is_retired
                else:
                    assert difference(tree(step), found) is None

    return act


ACTORS = {"commit": commits, "restore": restores, "collect": collects}


class EntryScheduler(Scheduler):
    def make_actor(self, number: int) -> Actor:
        return EntryActor(self, number)


def play(start: Path, path: Path, names: tuple[str, str], switches: tuple[int, ...]) -> int:
    shutil.copytree(start, path, ignore=shutil.ignore_patterns("index"))
    open_store(path, create=False).close()
    count = EntryScheduler(switches).run(*(ACTORS[name](path) for name in names))
    with open_store(path, create=False) as store:
        collect(store, RETENTION)
    expected = {LAST + 1: tree(2)} if "commit" in names else trees(LAST)
    check_steps(path, expected)
    assert (path / f"timeline/epochs/{0:018d}").exists()
    shutil.rmtree(path)
    return count


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", PAIRS, ids=" ".join)
def test_interleavings_with_a_sealing_lose_nothing(start: Path, tmp_path: Path, names: tuple[str, str]) -> None:
    assert sweep(start, tmp_path, names, 61, play) > 10
