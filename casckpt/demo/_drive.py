"""The parent of the demo: starts training processes one after the other, kills one, and collects what they report.

The phases are `reference` (never interrupted), `killed` (run `demo`, ended by SIGKILL in the middle of an update),
`resumed` (a new process on the same run), and `branch` (a third one, from an earlier step, with another seed and
another hyper-parameter). All write to one store. Nothing here decides what is right: see `_proof.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any, Protocol

import casckpt
from casckpt import CasckptError, Snapshot
from casckpt.demo._ppo import PpoConfig
from casckpt.demo._proof import Claim, digest_components, first_divergence, value_digest

REFERENCE_RUN, DEMO_RUN = "reference", "demo"
BRANCH_ENTROPY_COEFFICIENT = 0.02
STDERR_TAIL_SIZE = 4000  # characters of a failed worker's last words that are shown


class WorkerFailedError(CasckptError):
    """A training process ended when it should not have; the message carries what it said."""

    kind = "worker-failed"


class Screen(Protocol):
    """Who is told about progress."""

    def phase(self, name: str, first: int, last: int) -> None:
        """A process starts that will make updates `first` to `last`."""

    def committed(self, name: str, event: dict[str, Any]) -> None:
        """A commit was made."""

    def note(self, text: str) -> None:
        """Something happened that a person should see."""


@dataclass(frozen=True)
class DemoPlan:
    """What to do. Updates are counted from 1; `kill_at` is the update in the middle of which SIGKILL comes."""

    store: str
    config: PpoConfig
    kill_at: int
    branch_from: int
    branch_updates: int
    branch_seed: int


@dataclass
class Phase:
    """What one training process reported."""

    name: str
    run: str
    resumed_from: int = 0
    report: str = ""
    commits: list[dict[str, Any]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    draws: dict[str, list[float]] = field(default_factory=dict)
    exit_code: int | None = None


@dataclass(frozen=True)
class Totals:
    """Sums over commits, in bytes. `new_bytes` were not stored before; `stored_bytes` is what they take on disk."""

    commit_count: int
    logical_bytes: int
    new_bytes: int
    stored_bytes: int

    @property
    def dedup_ratio(self) -> float:
        """Logical bytes per byte that was new."""
        return self.logical_bytes / max(1, self.new_bytes)

    @property
    def compression(self) -> float:
        """New bytes per byte stored."""
        return self.new_bytes / max(1, self.stored_bytes)


@dataclass(frozen=True)
class Outcome:
    """Everything that was seen. `totals` is by run; `lines` are the snapshots of run `demo` by branch."""

    phases: dict[str, Phase]
    totals: dict[str, Totals]
    lines: dict[str, list[Snapshot]]
    claims: list[Claim]
    divergence: str | None

    @property
    def is_identical(self) -> bool:
        """Whether the resumed run equals the uninterrupted one in every respect that was compared."""
        return self.divergence is None and all(claim.holds for claim in self.claims)


def run_demo(plan: DemoPlan, screen: Screen) -> Outcome:
    """Run all phases and compare.

    Raises:
        WorkerFailedError: A training process failed; its standard error is in the message.
        CasckptError: The store could not be read.
    """
    last = plan.config.updates
    folder = os.path.dirname(os.path.abspath(plan.store))
    with tempfile.TemporaryDirectory(prefix="casckpt-demo-", dir=folder) as scratch:
        driver = _Driver(plan, screen, scratch)
        reference = driver.run("reference", REFERENCE_RUN, first=1, last=last)
        killed = driver.run("killed", DEMO_RUN, first=1, last=last, kill_at=plan.kill_at)
        screen.note(f"SIGKILL in the middle of update {plan.kill_at} (exit code {killed.exit_code}).")
        resumed = driver.run("resumed", DEMO_RUN, first=plan.kill_at, last=last)
        screen.note(f"A new process went on: {resumed.report}")
        claims, divergence = compare(plan.store, reference, resumed)
        branch = driver.branch()
        claims.append(_main_line_claim(plan, reference))
    phases = {phase.name: phase for phase in (reference, killed, resumed, branch)}
    totals, lines = survey(plan.store)
    return Outcome(phases=phases, totals=totals, lines=lines, claims=claims, divergence=divergence)


def compare(path: str, reference: Phase, resumed: Phase) -> tuple[list[Claim], str | None]:
    """Hold the two runs in the store at `path`, and what their last processes reported, against each other.

    Returns:
        The claims, and the first step and component at which the runs differ by manifest id.
    """
    with (
        casckpt.open(path, read_only=True, run=REFERENCE_RUN) as left,
        casckpt.open(path, read_only=True, run=DEMO_RUN) as right,
    ):
        left_line, right_line = list(left.timeline()), list(right.timeline())
        restored = [digest_components(store.restore()) for store in (left, right)]
    claims = []
    for name, component in left_line[-1].components.items():
        ids = {"reference": component.manifest, "resumed": right_line[-1].components[name].manifest}
        claims.append(Claim(name, "manifest", ids))
        values = {
            "reference, live": reference.digests[name],
            "resumed, live": resumed.digests[name],
            "reference, restored": restored[0][name],
            "resumed, restored": restored[1][name],
        }
        claims.append(Claim(name, "values", values))
    claims += [_curve_claim(name, left_line, right_line) for name in sorted(left_line[-1].metrics)]
    claims += [
        Claim(name, "next draws", {"reference": _written(drawn), "resumed": _written(resumed.draws[name])})
        for name, drawn in reference.draws.items()
    ]
    return claims, first_divergence(left_line, right_line)


def survey(path: str) -> tuple[dict[str, Totals], dict[str, list[Snapshot]]]:
    """Sums by run over all of its branches, and the snapshots of run `demo` by branch, from the store alone."""
    with casckpt.open(path, read_only=True, run=DEMO_RUN) as store:
        snapshots = store.timeline(all_runs=True)
    totals = {run: _sum([s for s in snapshots if s.run == run]) for run in (REFERENCE_RUN, DEMO_RUN)}
    lines: dict[str, list[Snapshot]] = {}
    for snapshot in snapshots:
        if snapshot.run == DEMO_RUN:
            lines.setdefault(snapshot.branch, []).append(snapshot)
    return totals, lines


def _sum(snapshots: list[Snapshot]) -> Totals:
    return Totals(
        len(snapshots),
        sum(s.logical_bytes for s in snapshots),
        sum(s.new_bytes for s in snapshots),
        sum(s.stored_bytes for s in snapshots),
    )


def _written(drawn: list[float]) -> str:
    return " ".join(repr(number) for number in drawn)


def _curve_claim(name: str, left: list[Snapshot], right: list[Snapshot]) -> Claim:
    curves = {
        source: value_digest([[snapshot.step, snapshot.metrics[name]] for snapshot in line])
        for source, line in (("reference", left), ("resumed", right))
    }
    return Claim(name, "curve", curves)


def _main_line_claim(plan: DemoPlan, reference: Phase) -> Claim:
    """The line that the branch left must still restore, by name, to what it was."""
    with casckpt.open(plan.store, read_only=True, run=DEMO_RUN) as store:
        restored = digest_components(store.restore(f"main@{plan.config.updates}"))
    found = {"reference, live": reference.digests, "resumed, restored": restored}
    return Claim(
        f"main@{plan.config.updates} after branching",
        "values",
        {source: value_digest(sorted(digests.items())) for source, digests in found.items()},
    )


class _Driver:
    """Starts workers for one plan."""

    def __init__(self, plan: DemoPlan, screen: Screen, scratch: str) -> None:
        self._plan = plan
        self._screen = screen
        self._scratch = scratch

    def run(self, name: str, run: str, *, first: int, last: int, kill_at: int | None = None) -> Phase:
        """One process from its start to its end, by itself or by SIGKILL during update `kill_at`."""
        self._screen.phase(name, first, last)
        return self._follow(Phase(name, run), self._command(run, self._plan.config, last), kill_at)

    def branch(self) -> Phase:
        """From an earlier step, on another seed, with an entropy bonus."""
        plan = self._plan
        first, last = plan.branch_from + 1, plan.branch_from + plan.branch_updates
        self._screen.phase("branch", first, last)
        config = replace(plan.config, entropy_coefficient=BRANCH_ENTROPY_COEFFICIENT)
        command = self._command(DEMO_RUN, config, last)
        command += ["--ref", str(plan.branch_from), "--reseed", str(plan.branch_seed)]
        return self._follow(Phase("branch", DEMO_RUN), command, None)

    def _command(self, run: str, config: PpoConfig, last: int) -> list[str]:
        options = {
            "--store": self._plan.store,
            "--run": run,
            "--config": json.dumps(asdict(config)),
            "--updates": str(last),
            "--baseline": self._scratch,
        }
        return [sys.executable, "-m", "casckpt.demo._worker", *(part for pair in options.items() for part in pair)]

    def _follow(self, phase: Phase, command: list[str], kill_at: int | None) -> Phase:
        with tempfile.TemporaryFile("w+", dir=self._scratch) as stderr:
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
                try:
                    for event in _events(process):
                        self._take(phase, event)
                        if event["event"] == "collected" and event["step"] == kill_at:
                            process.kill()
                except BaseException:  # Ctrl-C among them: this process does not go without its child
                    process.kill()
                    raise
            phase.exit_code = process.returncode
            stderr.seek(0)
            said = stderr.read().strip()
        expected = 0 if kill_at is None else -signal.SIGKILL
        if phase.exit_code != expected:
            raise WorkerFailedError(
                f"the training process of phase {phase.name!r} ended with exit code {phase.exit_code}, expected "
                f"{expected}. It said:\n{said[-STDERR_TAIL_SIZE:] or '(nothing)'}",
                phase=phase.name,
                exit_code=phase.exit_code,
            )
        if said:
            self._screen.note(said)
        return phase

    def _take(self, phase: Phase, event: dict[str, Any]) -> None:
        match event["event"]:
            case "started":
                phase.resumed_from, phase.report = event["step"], event["report"]
            case "committed":
                phase.commits.append(event)
                self._screen.committed(phase.name, event)
            case "finished":
                phase.digests, phase.draws = event["digests"], event["draws"]


def _events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    stream: IO[str] = process.stdout  # type: ignore[assignment]
    for line in stream:
        if line.endswith("\n"):  # else it was killed while writing
            yield json.loads(line)
