"""The real code, interleaved: commit ‖ collect, restore ‖ collect, collect ‖ collect, by a deterministic scheduler.

Each actor is a thread with a handle and a file system of its own. A thread may be interrupted before every operation
that changes a file, and before every read of a pack; only one runs at a time. Schedules are all of those with at most
two interruptions that nobody asked for (waiting at a gate always lets the other run), which is exhaustive up to that
bound. After each schedule everything that must be there is restored and compared, with the index and without.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import casckpt_gc
import pytest
from casckpt_gc import Compaction, Retention

from casckpt.errors import CasckptError, NotFoundError
from casckpt.storage.process import System
from casckpt.testing.trees import difference
from casckpt.testing.wrapping import Operation, WrappedFileSystem
from tests.gc.collecting import check_steps, collect, noise
from tests.unit.stores import UnsyncedFileSystem, open_store

YIELDING = frozenset({"create", "rename", "link", "unlink"})
RETENTION = Retention(latest=1)
COMPACTION = Compaction(needed_share_max=0.99)


class Scheduler:
    """Runs two actors by turns. `switches` are numbers of yields, over both actors, at which the turn goes over."""

    def __init__(self, switches: tuple[int, ...]) -> None:
        self._switches = switches
        self._count = 0
        self._turn = 0
        self._alive = [True, True]
        self._condition = threading.Condition()
        self.errors: list[BaseException] = []

    def run(self, first: Callable[[Actor], None], second: Callable[[Actor], None]) -> int:
        """Both to their ends; returns how many yields there were."""
        threads = [
            threading.Thread(target=self._do, args=(self.make_actor(number), act))
            for number, act in enumerate((first, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
        if self.errors:
            raise self.errors[0]
        return self._count

    def make_actor(self, number: int) -> Actor:
        return Actor(self, number)

    def _do(self, actor: Actor, act: Callable[[Actor], None]) -> None:
        try:
            self._wait_for(actor.number)
            act(actor)
        except BaseException as error:  # noqa: BLE001 - handed to the thread of the test
            self.errors.append(error)
        finally:
            with self._condition:
                self._alive[actor.number] = False
                self._turn = 1 - actor.number
                self._condition.notify_all()

    def _wait_for(self, number: int) -> None:
        with self._condition:
            while self._turn != number and self._alive[1 - number]:
                self._condition.wait(200)

    def pause(self, number: int, *, is_willing: bool) -> None:
        """A place where the other may go on: when its number is chosen, or because this one waits."""
        with self._condition:
            self._count += not is_willing
            if is_willing or self._count in self._switches:
                self._turn = 1 - number
                self._condition.notify_all()
        self._wait_for(number)


class Actor(WrappedFileSystem):
    """The file system of one actor; asks the scheduler before what others could see, or what could be gone."""

    def __init__(self, scheduler: Scheduler, number: int) -> None:
        super().__init__(UnsyncedFileSystem())
        self.scheduler = scheduler
        self.number = number
        self.keeper: Any = None
        self.clock_s = 0.0

    def perform(self, operation: Operation, act: Callable[[], Any]) -> Any:
        is_read = operation.name == "open" and ("/packs/" in operation.path or "/trash/" in operation.path)
        if (operation.name in YIELDING or is_read) and not self._holds_index():
            self.scheduler.pause(self.number, is_willing=False)
        return act()

    def _holds_index(self) -> bool:
        """Within a write transaction of the index the other could only wait. While it opens, it may be in one."""
        return self.keeper is None or bool(self.keeper._lock._is_owned())

    def store(self, path: Path, **options: Any) -> Any:
        system = System(file_system=self, monotonic_s=lambda: self.clock_s)
        store = open_store(path, create=False, system=system, **options)
        self.keeper = store._keeper
        return store

    def sleep(self, seconds: float) -> None:
        self.clock_s += seconds
        self.scheduler.pause(self.number, is_willing=True)

    def collect(self, store: Any) -> None:
        plan = casckpt_gc.plan(store, RETENTION, compaction=COMPACTION)
        casckpt_gc.Collection(plan, grace_s=0.0, sleep=self.sleep).run()


def tree(step: int) -> dict[str, Any]:
    """Steps 1 and 3 share their policy; all share a table."""
    return {"frozen": {"t": noise(77)}, "policy": {"w": noise(1 if step % 2 else step)}}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start") / "store"
    with open_store(path) as store:
        for step in (1, 2):
            store.commit(step, tree(step))
    return path


def commits(path: Path) -> Callable[[Actor], None]:
    """Commits what the retired step 1 had, and nobody else has."""

    def act(actor: Actor) -> None:
        with actor.store(path) as store:
            store.commit(3, tree(3))

    return act


def collects(path: Path) -> Callable[[Actor], None]:
    def act(actor: Actor) -> None:
        with actor.store(path, run="collector") as keeper:
            keeper.run = "main"  # the rules apply to the run of the learner; this handle commits nothing
            actor.collect(keeper)

    return act


def restores(path: Path) -> Callable[[Actor], None]:
    """Restores the newest and the oldest step that it sees."""

    def act(actor: Actor) -> None:
        with actor.store(path) as store:
            for step in (store.steps()[0], store.steps()[-1]):
                try:
                    found = store.restore(step)
                except NotFoundError:
                    assert store.snapshot(step).is_retired  # between listing and restoring
                else:
                    assert difference(tree(step), found) is None

    return act


ACTORS = {"commit": commits, "restore": restores, "collect": collects}


def play(start: Path, path: Path, names: tuple[str, str], switches: tuple[int, ...]) -> int:
    """One schedule on a copy of the store; returns how many places there were to interrupt."""
    shutil.copytree(start, path, ignore=shutil.ignore_patterns("index"))
    open_store(path, create=False).close()  # an index of its own
    count = Scheduler(switches).run(*(ACTORS[name](path) for name in names))
    with open_store(path, create=False) as store:
        collect(store, RETENTION, compaction=COMPACTION)
    last = 3 if "commit" in names else 2
    check_steps(path, {last: tree(last)})
    assert not any((path / "trash").iterdir())
    shutil.rmtree(path)
    return count


PAIRS = [("commit", "collect"), ("collect", "commit"), ("restore", "collect"), ("collect", "collect")]


Play = Callable[[Path, Path, tuple[str, str], tuple[int, ...]], int]


def sweep(start: Path, tmp_path: Path, names: tuple[str, str], stride: int, play: Play = play) -> int:
    """All schedules with at most two interruptions, or every `stride`-th of them; returns how many ran."""
    count = play(start, tmp_path / "counted", names, ())
    ones = [(at,) for at in range(1, count + 1)]
    twos = list(itertools.combinations(range(1, count + 6), 2))
    done = 0
    for switches in (ones + twos)[::stride]:
        try:
            play(start, tmp_path / "-".join(map(str, switches)), names, switches)
        except (CasckptError, AssertionError) as error:
            raise AssertionError(f"{names}, switching at {switches}: {error!r}") from error
        done += 1
    return done


@pytest.mark.few(1)
@pytest.mark.parametrize("names", PAIRS, ids=" ".join)
def test_some_interleavings_lose_nothing(start: Path, tmp_path: Path, names: tuple[str, str]) -> None:
    assert sweep(start, tmp_path, names, 211) > 0


@pytest.mark.full
@pytest.mark.parametrize("names", PAIRS, ids=" ".join)
def test_every_interleaving_loses_nothing(start: Path, tmp_path: Path, names: tuple[str, str]) -> None:
    assert sweep(start, tmp_path, names, 9) > 20
