"""A fire drill: faults injected into a training that runs under a supervisor, and what became of each.

The training is the user's own command; it commits to a store and recovers by itself. All that is judged is read from
the store. In each round a fault is injected once the training has committed some steps, and the drill waits for the
next commit. A round keeps its promise when that comes in time, continues the newest snapshot that was whole after the
fault, loses no other step, and when what is committed again equals what was lost, bit by bit.

Faults of other parts of a training (an actor, the disk) are the caller's: the learner goes on meanwhile, and its third
commit after the fault must continue the line in the same generation.

Faults damage the store that they are run on: give the drill a store of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from casckpt.arguments import FUNCTION, MAPPING, NUMBER, TEXT, TEXTS, WHOLE, checked, maybe
from casckpt.errors import BusyError, CasckptError, InvalidInputError, NotFoundError
from casckpt.ids import SnapshotId
from casckpt.objects.packs import pack_path
from casckpt.recovery.supervisor import Settings, Status, Supervisor
from casckpt.store.inspection import Inspection
from casckpt.store.lines import compare_lines
from casckpt.store.opening import open_store
from casckpt.store.store import Store
from casckpt.store.values import Snapshot, Value

KILL, HANG, DAMAGE, DELETE, KILL_RESTORING = "kill", "hang", "damage", "delete", "kill-restoring"
SCENARIOS = (KILL, HANG, DAMAGE, DELETE, KILL_RESTORING)
Fault = Callable[[Status], Sequence[str]]  # injects it, given how the learner is; problems in words
_POLL_S = 0.1
_STEPS_AFTER = 3  # of a learner that goes on: one may have been under way at the fault
_RESTARTS_MAX = 20


@dataclass(frozen=True)
class Round(Value):
    """One fault and what became of it.

    Attributes:
        scenario: one of SCENARIOS, or of the drill's own faults.
        step_before: the newest snapshot at the fault; `step_restored` is the one that was continued.
        recover_s: from the fault to the first commit after it; to the third where the learner was to go on.
        is_wrong: whether another snapshot was continued than the newest one that was whole.
        equal_count: steps committed again that are bit-identical to the line that was lost.
        problems: promises that broke; empty when all were kept.
    """

    scenario: str
    step_before: int
    step_restored: int
    recover_s: float
    equal_count: int
    problems: tuple[str, ...]
    is_wrong: bool = False

    @property
    def steps_lost(self) -> int:
        return self.step_before - self.step_restored

    def __str__(self) -> str:
        result = "; ".join(self.problems) or "kept"
        return (
            f"{self.scenario:<15} at step {self.step_before}: continued {self.step_restored} ({self.steps_lost} steps "
            f"lost) after {self.recover_s:.2f} s, {self.equal_count} steps again bit-identical: {result}"
        )


@dataclass(frozen=True)
class DrillReport(Value):
    """All rounds of a drill."""

    rounds: tuple[Round, ...]

    @property
    def ok(self) -> bool:
        return all(not each.problems for each in self.rounds)

    @property
    def wrong_count(self) -> int:
        """Rounds that continued another snapshot than they should have."""
        return sum(each.is_wrong for each in self.rounds)

    @property
    def by_scenario(self) -> dict[str, list[Round]]:
        """Scenario → its rounds."""
        found: dict[str, list[Round]] = {}
        for each in self.rounds:
            found.setdefault(each.scenario, []).append(each)
        return found

    def median_s(self, scenario: str) -> float:
        """Median time to recover in a scenario that came."""
        return statistics.median(each.recover_s for each in self.by_scenario[scenario])

    def to_dict(self) -> dict[str, Any]:
        rounds = [{**each.to_dict(), "steps_lost": each.steps_lost} for each in self.rounds]
        medians = {scenario: self.median_s(scenario) for scenario in self.by_scenario}
        return {"ok": self.ok, "wrong_count": self.wrong_count, "medians_s": medians, "rounds": rounds}

    def __str__(self) -> str:
        kept = [not each.problems for each in self.rounds]
        lines = [*map(str, self.rounds), f"{sum(kept)} of {len(kept)} promises kept, {self.wrong_count} wrong restores"]
        for scenario, rounds in self.by_scenario.items():
            count = sum(not each.problems for each in rounds)
            lines.append(f"  {scenario:<15} {count} of {len(rounds)}, median {self.median_s(scenario):.2f} s")
        return "\n".join(lines)


class Drill:
    """Rounds of faults on one training.

    Args:
        command: starts the training; it must recover by itself, and beat for the scenario "hang".
        store_path, run: where it commits.
        settings: of the supervisor.
        seed: decides when faults come.
        faults: more scenarios by name, of parts that the learner must survive without being started again.
        environment: of the command; None for this process's.
        timeout_s: how long a training may take to its first commits, and to recover.
        tell: called with a line of text for each round.
    """

    @checked(
        command=TEXTS,
        store_path=TEXT,
        run=TEXT,
        settings=maybe(Settings),
        faults=maybe(MAPPING),
        environment=maybe(MAPPING),
        seed=WHOLE,
        timeout_s=NUMBER,
        tell=FUNCTION,
    )
    def __init__(
        self,
        command: Sequence[str],
        store_path: str,
        *,
        run: str = "main",
        settings: Settings | None = None,
        faults: Mapping[str, Fault] | None = None,
        environment: Mapping[str, str] | None = None,
        seed: int = 0,
        timeout_s: float = 120.0,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path, self._run = store_path, run
        chosen = replace(settings or Settings(), restarts_max=_RESTARTS_MAX)
        self._supervisor = Supervisor(command, settings=chosen, environment=environment)
        self._supervisor.be_patient(True)  # a machine that does much else is no fault; only HANG waits for a judgement
        self._faults = dict(faults or {})
        self._chance = random.Random(seed)
        self._timeout_s = timeout_s
        self._tell = tell
        self._wake = threading.Event()  # never set: to wait with
        self._now_s = self._supervisor._now_s

    @checked(scenarios=TEXTS)
    def run(self, scenarios: Sequence[str] = SCENARIOS) -> DrillReport:
        """One round per scenario, in this order.

        Raises:
            InvalidInputError: an unknown scenario, or a command that cannot be started.
            BusyError: the training made no commit in time, before any fault.
        """
        known = (*SCENARIOS, *self._faults)
        unknown = sorted(set(scenarios) - set(known))
        if unknown:
            raise InvalidInputError(f"scenario {unknown}: expected some of {', '.join(known)}", scenarios=unknown)
        thread = threading.Thread(target=self._supervisor.run, name="casckpt-drill", daemon=True)
        thread.start()
        rounds = []
        try:
            for scenario in scenarios:
                rounds.append(self._round(scenario))
                self._tell(str(rounds[-1]))
        finally:
            self._supervisor.end()
            thread.join()
        return DrillReport(tuple(rounds))

    def _round(self, scenario: str) -> Round:
        start = self._newest()
        wanted = (0 if start is None else start.step) + self._chance.randrange(2, 5)
        before = self._wait(lambda newest: newest.step >= wanted)
        if before is None:
            raise BusyError(
                f"the training did not come to step {wanted} within {self._timeout_s:g} s. Run its command by hand.",
                step=wanted,
            )
        if scenario in self._faults:
            return self._round_beside(scenario, before)
        self._poll(lambda: self._supervisor.status.is_running)
        _send(self._supervisor.status.pid, signal.SIGSTOP)  # whatever was under way stands still, and is seen
        before = self._newest() or before
        fault_s = self._now_s()
        self._inject(scenario, before)
        after = self._wait(lambda newest: newest.id != before.id and newest.seq >= before.seq)
        return self._judge(scenario, before, after, self._now_s() - fault_s)

    def _round_beside(self, scenario: str, before: Snapshot) -> Round:
        """A round in which the learner is to go on."""
        generation, fault_s = self._generation(), self._now_s()
        problems = list(self._faults[scenario](self._supervisor.status))
        newest = self._newest() or before
        after = self._wait(lambda each: each.step >= newest.step + _STEPS_AFTER)
        found = self._judge(scenario, before, after, self._now_s() - fault_s)
        if self._generation() != generation:
            problems.append("the learner was started again, expected it to go on")
        return replace(found, problems=(*problems, *found.problems))

    def _inject(self, scenario: str, newest: Snapshot) -> None:
        status = self._supervisor.status
        pid = status.pid
        if scenario == HANG:
            self._supervisor.be_patient(False)  # it stands still already; the supervisor must find out
            self._poll(lambda: not status.is_running or status.pid != pid)
            self._supervisor.be_patient(True)
            return
        if scenario in (DAMAGE, DELETE):
            with self._open() as store:
                path = _file_of(store, newest)
            if scenario == DELETE:
                os.unlink(path)
            else:
                _flip(path)
        _send(pid, signal.SIGKILL)
        if scenario == KILL_RESTORING:
            self._kill_next(pid)

    def _kill_next(self, pid: int) -> None:
        """Kill the next life as soon as it has opened its generation, before or while it restores."""
        before = self._generation()
        self._poll(lambda: self._supervisor.status.pid != pid and self._generation() > before)
        if self._supervisor.status.is_running:
            _send(self._supervisor.status.pid, signal.SIGKILL)

    def _judge(self, scenario: str, before: Snapshot, after: Snapshot | None, recover_s: float) -> Round:
        if after is None:
            problem = f"no commit within {self._timeout_s:g} s"
            return Round(scenario, before.step, before.step, recover_s, 0, (problem,))
        with self._open() as store:
            line = [after]
            while line[-1].parent is not None and line[-1].seq > before.seq:
                line.append(store.snapshot(line[-1].parent))
            restored = line[-1]
            expected = before if scenario not in (DAMAGE, DELETE) else self._parent_of(store, before)
            is_wrong = expected is None or restored.id != expected.id
            problems = [f"continued {restored}, expected {expected}"] if is_wrong else []
            lines = compare_lines(store, before, after)
            if lines.divergence is not None:
                problems.append(str(lines.divergence))
        equal_count = len(lines.equal_steps)
        return Round(scenario, before.step, restored.step, recover_s, equal_count, tuple(problems), is_wrong)

    def _parent_of(self, store: Store, snapshot: Snapshot) -> Snapshot | None:
        return None if snapshot.parent is None else store.snapshot(snapshot.parent)

    # --- looking at the store, through a new handle each time ---

    def _open(self) -> Store:
        return open_store(self._path, read_only=True, run=self._run)

    def _newest(self) -> Snapshot | None:
        try:
            with self._open() as store:
                rows = Inspection(store).history(self._run, limit=1).rows
                return next((row.snapshot for row in rows if row.snapshot is not None), None)
        except NotFoundError:
            return None  # the training has not made it yet

    def _generation(self) -> int:
        with self._open() as store:
            return store._catalog.generation(self._run).number

    def _wait(self, is_it: Callable[[Snapshot], bool]) -> Snapshot | None:
        """The newest snapshot once it is the one that is waited for; None when the time is over."""
        found: list[Snapshot] = []

        def look() -> bool:
            newest = self._newest()
            if newest is not None and is_it(newest):
                found.append(newest)
            return bool(found)

        return found[0] if self._poll(look) else None

    def _poll(self, is_done: Callable[[], bool]) -> bool:
        end_s = self._now_s() + self._timeout_s
        while self._now_s() < end_s:
            try:
                if is_done():
                    return True
            except CasckptError:  # a store that is being written and damaged at this moment; looked at again
                pass
            self._wake.wait(_POLL_S)
        return False


def _send(pid: int, number: signal.Signals) -> None:
    """To all of the command: the training may be a child of a shell or a launcher."""
    with contextlib.suppress(ProcessLookupError):  # it ended by itself: what becomes of that is judged all the same
        os.killpg(pid, number)


def _file_of(store: Store, snapshot: Snapshot) -> str:
    """A file without which a snapshot is not whole: a pack of its own, else its timeline entry."""
    body = store._timeline.read(store._catalog.row(SnapshotId(bytes.fromhex(snapshot.id))).seq).envelope.body
    packs = getattr(body, "packs", [])
    return pack_path(store.path, packs[0].pack_id) if packs else store._timeline.path(snapshot.seq)


def _flip(path: str) -> None:
    """Change one bit in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
