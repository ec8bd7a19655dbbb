"""The parent: a learner and its actors kept alive, faults injected into all of them, and the result judged.

The rounds are those of `casckpt.recovery.Drill`, with four more scenarios:

=============  ========================================================================================================
kill-actor     an actor is killed: its item goes to another one, and it is started again
hang-actor     an actor is stopped and comes back late: its item is played by another one, and what it brings is refused
stale-sample   somebody brings samples of the generation before, of a step that is over, and of an item that is settled
full-disk      writing beyond 4 KiB of a file is refused until the learner stands still; then there is room again
=============  ========================================================================================================

Afterwards the line of steps that lives is held against a training of the same seed that met no faults, in a store of
its own: every component of every step must be bit-identical, and so is the curve of returns. From the samples that each
commit says it was made of, none may be of a generation other than the one that the timeline had opened last.
"""

from __future__ import annotations

import os
import random
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from multiprocessing.connection import Client
from typing import Any

import casckpt
from casckpt.demo.distributed._learner import ITEMS_PER_UPDATE, NO_SPACE, RUN
from casckpt.demo.distributed._messages import (
    FRAME_SIZE_MAX,
    KEY,
    Give,
    Verdict,
    decode_answer,
    encode,
    read_addresses,
)
from casckpt.errors import AlreadyExistsError, BusyError, StorageError
from casckpt.recovery import BeatClient, Drill, DrillReport, Settings, Supervisor, Version
from casckpt.recovery.drill import KILL, SCENARIOS
from casckpt.recovery.supervisor import Status
from casckpt.store.values import Snapshot, Value

KILL_ACTOR, HANG_ACTOR, STALE_SAMPLE, FULL_DISK = "kill-actor", "hang-actor", "stale-sample", "full-disk"
ALL_SCENARIOS = (*SCENARIOS, KILL_ACTOR, HANG_ACTOR, STALE_SAMPLE, FULL_DISK)
ACTOR_COUNT = 4
_FILE_SIZE_MAX = 4096  # of a full disk: a beat fits, no pack does
_STEPS_WITHOUT = 3  # that the learner must make while an actor hangs
_FLOOR_COUNT = 3  # of which the median is taken
_POLL_S = 0.05  # of the learner's supervisor: part of the time to recover
_LOOK_S = 0.2  # of everything else: the learner answers meanwhile, and pays for it


@dataclass(frozen=True)
class DistributedReport(Value):
    """What became of a distributed training in a drill.

    Attributes:
        drill: its rounds.
        floor_s: what starting a process, its imports and the restore take by themselves; the median of three.
        stale_count: steps that were trained on samples of a generation that was over.
        step_count: steps of the line that lives; `equal_count` of them are as in the training without faults.
        problems: of the line as a whole: the first divergence, and samples of a generation that was over.
        first_return, last_return: mean return of the latest episodes, at the first fault and at the end.
    """

    drill: DrillReport
    floor_s: float
    stale_count: int
    step_count: int
    equal_count: int
    problems: tuple[str, ...]
    first_return: float
    last_return: float

    @property
    def ok(self) -> bool:
        return self.drill.ok and not self.problems

    def to_dict(self) -> dict[str, Any]:
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "drill"}
        return {**self.drill.to_dict(), **own, "ok": self.ok}

    def __str__(self) -> str:
        floor = f"floor (start, imports, restore) {self.floor_s:.2f} s"
        if KILL in self.drill.by_scenario:
            median_s = self.drill.median_s(KILL)
            floor = (
                f"kill to first new update: median {median_s:.2f} s, {median_s / self.floor_s:.2f} times the {floor}"
            )
        lines = [
            str(self.drill),
            floor,
            f"{self.stale_count} steps trained on samples of a generation that was over",
            f"{self.equal_count} of {self.step_count} steps bit-identical to a training without faults; return "
            f"{self.first_return:.0f} at the first fault, {self.last_return:.0f} at the end",
        ]
        return "\n".join([*lines, *(f"broken: {problem}" for problem in self.problems)])


class DistributedDrill:
    """A drill of one learner and ACTOR_COUNT actors.

    Args:
        store_path: where the store is made; the training without faults goes to a folder beside it, `…-undisturbed`.
        seed: of the training, and of when faults come.
        silence_s: without a beat, after which the learner counts as hung.
        timeout_s: to the first commits, and to recover.
        tell: called with a line of text for each round.

    Raises:
        AlreadyExistsError: there is something at one of the two places.
    """

    def __init__(
        self,
        store_path: str,
        *,
        seed: int = 0,
        silence_s: float = 30.0,
        timeout_s: float = 120.0,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path, self._undisturbed = store_path, f"{store_path}-undisturbed"
        for path in (self._path, self._undisturbed):
            if os.path.lexists(path):
                raise AlreadyExistsError(f"{path} is there already. Give the drill a store of its own.", path=path)
        self._seed, self._timeout_s, self._tell = seed, timeout_s, tell
        self._settings = Settings(
            silence_min_s=silence_s,
            silence_factor=0.0,  # it is judged only while the learner was made to hang
            backoff_s=0.05,
            poll_s=_POLL_S,
            term_deadline_s=min(silence_s, 5.0),
        )
        self._chance = random.Random(seed)
        self._key = secrets.token_hex()
        self._actors: list[Supervisor] = []
        self._work = ""
        self._clock = threading.Event()  # never set: to wait with

    def run(self, scenarios: Sequence[str] = ALL_SCENARIOS) -> DistributedReport:
        """One round per scenario, in this order, and the judgement of the whole.

        Raises:
            InvalidInputError: an unknown scenario.
            BusyError: the training made no commit in time, before any fault.
        """
        environment = {**os.environ, KEY: self._key}
        with tempfile.TemporaryDirectory(prefix="casckpt-drill-") as self._work, ExitStack() as stack:
            drill = Drill(
                self._command("_learner", "--work", self._work, "--store", self._path),
                self._path,
                run=RUN,
                settings=self._settings,
                faults=self._faults(),
                environment=environment,
                seed=self._seed,
                timeout_s=self._timeout_s,
                tell=self._tell,
            )
            for number in range(ACTOR_COUNT):
                command = self._command("_actor", "--work", self._work, "--name", f"actor-{number}")
                self._actors.append(stack.enter_context(_kept_alive(command, environment)))
            rounds = drill.run(scenarios)
        return self._judge(rounds)

    def _command(self, module: str, *arguments: str) -> list[str]:
        words = [sys.executable, "-m", f"{__package__}.{module}", "--seed", str(self._seed)]
        return [*words, *arguments]

    # --- faults beside the learner ---

    def _faults(self) -> Mapping[str, Callable[[Status], Sequence[str]]]:
        return {
            KILL_ACTOR: lambda status: self._kill_actor(),
            HANG_ACTOR: lambda status: self._hang_actor(),
            STALE_SAMPLE: lambda status: self._bring_stale_samples(),
            FULL_DISK: self._fill_disk,
        }

    def _kill_actor(self) -> list[str]:
        actor, pid = self._choose_actor()
        os.kill(pid, signal.SIGKILL)
        is_back = self._until(lambda: actor.status.is_running and actor.status.pid != pid)
        return [] if is_back else ["the actor was not started again"]

    def _choose_actor(self) -> tuple[Supervisor, int]:
        """An actor and its process, once it runs."""
        actor = self._chance.choice(self._actors)
        if not self._until(lambda: actor.status.is_running):
            raise BusyError("an actor cannot be started. Run its command by hand.")
        return actor, actor.status.pid

    def _hang_actor(self) -> list[str]:
        _, pid = self._choose_actor()
        wanted = self._version().step + _STEPS_WITHOUT
        os.kill(pid, signal.SIGSTOP)
        try:
            goes_on = self._until(lambda: self._version().step >= wanted)
        finally:
            os.kill(pid, signal.SIGCONT)
        return [] if goes_on else ["the learner waited for an actor that hangs"]

    def _bring_stale_samples(self) -> list[str]:
        """Samples that are well formed, and of no line that lives: each must be refused, whatever item it is for."""
        now = self._version()
        versions = {
            "the generation before": now._replace(generation=now.generation - 1),
            "a generation to come": now._replace(generation=now.generation + 1),
            "a step that is over": now._replace(step=now.step - 1),
        }
        open_items = range(now.step * ITEMS_PER_UPDATE, (now.step + 3) * ITEMS_PER_UPDATE)
        brought = [(what, version, item) for what, version in versions.items() for item in open_items]
        brought += [("a settled item", now, item) for item in range(now.step * ITEMS_PER_UPDATE)[-ITEMS_PER_UPDATE:]]
        wrong = []
        try:
            with Client(read_addresses(self._work).samples, authkey=self._key.encode()) as connection:
                for what, version, item in brought:
                    connection.send_bytes(encode(_forged(version, item)))
                    verdict = decode_answer(connection.recv_bytes(FRAME_SIZE_MAX))
                    if not isinstance(verdict, Verdict) or not verdict.reason:
                        wrong.append(f"a sample of {what} was taken: {version}, item {item}")
        except (OSError, EOFError) as error:
            wrong.append(f"the learner ended the connection: {error!r}")
        return wrong

    def _fill_disk(self, status: Status) -> list[str]:
        pid = status.pid
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FILE_SIZE_MAX, limits[1]))
        try:
            is_refused = self._until(lambda: status.phase == NO_SPACE)
        finally:
            with suppress(ProcessLookupError):  # it died of it: the round will say so
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        return [] if is_refused else ["the learner did not notice that the disk is full"]

    def _version(self) -> Version:
        client = BeatClient(*read_addresses(self._work).beats, name="drill", token=self._key, timeout_s=self._timeout_s)
        try:
            return client.beat()
        finally:
            client.close()

    def _until(self, is_done: Callable[[], bool]) -> bool:
        end_s = time.monotonic() + self._timeout_s
        while time.monotonic() < end_s:
            try:
                if is_done():
                    return True
            except StorageError:  # the learner did not answer this time
                pass
            self._clock.wait(_LOOK_S)
        return False

    # --- the judgement ---

    def _judge(self, rounds: DrillReport) -> DistributedReport:
        with casckpt.open(self._path, run=RUN, read_only=True) as store:
            line = list(reversed(list(_line(store))))
            stale = stale_steps(store, line)
        floor_s = sorted(self._run_learner("--store", self._path, "--floor") for _ in range(_FLOOR_COUNT))[1]
        self._run_learner("--store", self._undisturbed, "--alone", str(line[-1].step))
        with casckpt.open(self._undisturbed, run=RUN, read_only=True) as store:
            compared = [_divergence(store.snapshot(snapshot.step), snapshot) for snapshot in line]
        divergences = [each for each in compared if each]
        first = min((each.step_before for each in rounds.rounds), default=line[-1].step)
        returns = {snapshot.step: float(snapshot.metrics["return"]) for snapshot in line}
        return DistributedReport(
            rounds,
            floor_s,
            stale_count=len(stale),
            step_count=len(line),
            equal_count=len(line) - len(divergences),
            problems=(*stale, *divergences[:1]),
            first_return=returns.get(first, 0.0),
            last_return=returns[line[-1].step],
        )

    def _run_learner(self, *arguments: str) -> float:
        """Run it to its end; seconds that it took."""
        started_s = time.monotonic()
        done = subprocess.run(self._command("_learner", *arguments), check=False)
        if done.returncode != 0:
            raise BusyError(f"the learner ended with exit code {done.returncode}. Read above why.")
        return time.monotonic() - started_s


def stale_steps(store: casckpt.Store, line: Sequence[Snapshot]) -> list[str]:
    """Steps whose commit says that it was made of samples of another generation than the timeline's at that time."""
    opened = sorted((row.seq, row.number) for row in store._catalog.generations(store.run))
    found = []
    for snapshot in line:
        generation = max((number for seq, number in opened if seq < snapshot.seq), default=0)
        used = {snapshot.metrics["generation_min"], snapshot.metrics["generation_max"]}
        if used != {generation} or snapshot.metrics["behind_max"] != 0:
            found.append(f"step {snapshot.step} of generation {generation} was trained on samples of {sorted(used)}")
    return found


def _line(store: casckpt.Store) -> Iterator[Snapshot]:
    """The snapshots that the newest one continues, newest first."""
    snapshot: Snapshot | None = store.snapshot("latest")
    while snapshot is not None:
        yield snapshot
        snapshot = None if snapshot.parent is None else store.snapshot(snapshot.parent)


def _divergence(expected: Snapshot, found: Snapshot) -> str:
    """How a step differs from the same step without faults; empty when it does not."""
    names = sorted({*expected.components, *found.components})
    one, other = ({name: each.manifest for name, each in side.components.items()} for side in (expected, found))
    differing = [name for name in names if one.get(name) != other.get(name)]
    if expected.metrics["return"] != found.metrics["return"]:
        differing.append("metric return")
    return f"step {found.step} differs from a training without faults: {', '.join(differing)}" if differing else ""


def _forged(version: Version, item: int) -> Give:
    """A sample of one row that would change the weights."""
    return Give(version, item, b"\0" * 16, b"\1", b"\0" * 4, b"\1", [1.0])


@contextmanager
def _kept_alive(command: list[str], environment: Mapping[str, str]) -> Iterator[Supervisor]:
    settings = Settings(restarts_max=1_000_000, backoff_s=0.05, backoff_max_s=0.5, poll_s=_LOOK_S, term_deadline_s=2.0)
    supervisor = Supervisor(command, settings=settings, environment=environment)
    thread = threading.Thread(target=supervisor.run, name="casckpt-drill-actor", daemon=True)
    thread.start()
    try:
        yield supervisor
    finally:
        supervisor.end()
        thread.join()
