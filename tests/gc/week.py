"""A week of training in minutes: two processes commit, one restores, one collects, one patrols; one is killed every so
often.

    python -m tests.gc.week FOLDER --minutes 10 --agent-commits 10000 --giant-commits 300 --giant-mb 200

What each process commits follows from its run and step alone, so every step that is in the store at the end is compared
with what must be in it, outside of the store. Learners note each step when its commit returned; nothing noted may be
lost, but for what retention let go. It ends when the minutes have passed and both learners have made their commits, or
after `--minutes-max`. Then it collects once more, compares everything, and prints what is left, how much larger the
folder is than what is needed, and what a commit, an open and a restore take beside a store of ten commits.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import casckpt_gc
import numpy as np
from casckpt_gc.mark import Mark, census, roots
from casckpt_gc.plan import leftovers, unnamed_packs

import casckpt
from casckpt.testing.trees import difference

SPAN = 50  # retention keeps the first of so many steps
LEARNERS = ("agent", "giant")
ROLES = (*LEARNERS, "reader", "collector", "patrol")
RULES = casckpt_gc.Retention(latest=3, every_steps=SPAN)
NO_LIMITS = casckpt_gc.Limits(0, 0, 1e9, 1e9)
AGENT_MB = 0.25


def tree(run: str, step: int, mb: float) -> dict[str, Any]:
    """State of a run at a step, `mb` MB in all: weights that all move a little with each step, noise, what stays."""
    size = int((mb if run == "giant" else AGENT_MB) * 250_000)
    base = np.random.default_rng(len(run)).standard_normal(size, dtype=np.float32).view(np.uint32)
    moved = (base + ((base >> np.uint32(7)) * np.uint32(step) & np.uint32(0xFFF)))[: size * 3 // 4]
    fresh = np.random.default_rng(10**6 + step).standard_normal(size // 20, dtype=np.float32)
    frozen = base[size * 4 // 5 :].copy()
    return {"counters": {"step": step}, "frozen": {"t": frozen}, "policy": {"w": moved.view(np.float32), "n": fresh}}


def learn(path: str, run: str, notes: Path, mb: float) -> None:
    """Commits for ever; each step is noted when its commit has returned."""
    with casckpt.open(path, run=run) as store, notes.open("a", buffering=1) as log:
        store.resume(only=["counters"])
        while True:
            step = (store.step or 0) + 1
            store.commit(step, tree(run, step, mb))
            print(step, file=log)


def read(path: str, seed: int, mb: float) -> None:
    """Restores steps and compares them."""
    random.seed(seed)
    while True:
        for run in LEARNERS:
            with casckpt.open(path, run=run) as store:
                for _ in range(5):
                    steps = store.steps()
                    if not steps:
                        continue
                    step = random.choice(steps)
                    try:
                        found = store.restore(step)
                    except casckpt.NotFoundError:
                        if step in store.steps():
                            raise
                        continue  # let go between listing and restoring
                    problem = difference(tree(run, step, mb), found)
                    if problem is not None:
                        raise AssertionError(f"{run}@{step}: {problem}")


def gather(path: str) -> None:
    """Collects for ever."""
    while True:
        for run in LEARNERS:
            with casckpt.open(path, run=run) as store:
                casckpt_gc.collect(store, RULES, grace_s=0.2)
        time.sleep(0.5)


def look(path: str) -> None:
    """Patrols for ever; nothing may be found."""
    while True:
        with casckpt.open(path) as store:
            found = casckpt_gc.patrol(store, budget_bytes=64 << 20, budget_s=5.0, limits=NO_LIMITS)
            if found.findings:
                raise AssertionError(str(found))
        time.sleep(0.5)


@dataclass(frozen=True)
class Week:
    """What to live through: seconds at least and at most, commits by learner, kills, and the size of the large state.

    A process is killed every so often, but not before somebody has committed something since the last: so a machine
    that is busy with other things comes to the end, too.
    """

    seconds: float
    seconds_max: float
    commits: dict[str, int]
    kill_count: int
    mb: float
    seed: int
    kill_every_s: float


@dataclass(frozen=True)
class Outcome:
    """What was left.

    Attributes:
        commit_counts: acknowledged commits by learner.
        kill_count, seconds: processes killed, in how long.
        kept_count: snapshots compared at the end.
        folder_bytes: of the store, without index and reserve; index_bytes beside it.
        live_bytes, held_bytes: of records.
        folder_excess, pack_excess: bytes of the folder, and of packs alone, ÷ what is needed of them.
        file_count: files of the store, index aside.
        times: by operation, its median seconds of processor time, and ÷ those in a store of ten commits.
    """

    commit_counts: dict[str, int]
    kill_count: int
    seconds: float
    kept_count: int
    folder_bytes: int
    index_bytes: int
    live_bytes: int
    held_bytes: int
    folder_excess: float
    pack_excess: float
    file_count: int
    times: dict[str, tuple[float, float]]

    @property
    def held_share(self) -> float:
        return self.held_bytes / self.live_bytes

    def __str__(self) -> str:
        lines = [
            f"commits: {self.commit_counts}; {self.kill_count} kills in {self.seconds / 60:.1f} min; "
            f"{self.kept_count} snapshots kept, every one exact",
            f"folder {self.folder_bytes / 1e6:.1f} MB, {self.file_count} files; index {self.index_bytes / 1e6:.1f} MB",
            f"live {self.live_bytes / 1e6:.1f} MB, held {self.held_bytes / 1e6:.1f} MB (÷ live: {self.held_share:.2f})",
            f"folder ÷ (live + held): {self.folder_excess:.3f}; packs alone: {self.pack_excess:.3f}",
        ]
        lines += [
            f"{name}: {seconds * 1e3:.1f} ms of processor time, × {ratio:.2f}"
            for name, (seconds, ratio) in self.times.items()
        ]
        return "\n".join(lines)


def live_through(folder: Path, week: Week) -> Outcome:
    """Run it, then check everything.

    Raises:
        AssertionError: something was lost, is wrong, or was left behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    casckpt.open(str(folder / "store"), create=True).close()
    chance = random.Random(week.seed)
    running = {role: _start(folder, role, week.seed, week.mb) for role in ROLES}
    started_s, kill_count, seen_count = time.monotonic(), 0, 0
    try:
        while not _is_over(folder, week, kill_count, time.monotonic() - started_s):
            time.sleep(week.kill_every_s * chance.uniform(0.5, 1.5))
            for role, process in running.items():
                if process.poll() is not None:
                    raise AssertionError(f"{role} ended by itself: {(folder / role).read_text()[-2000:]}")
            count = sum(len(_noted(folder, run)) for run in LEARNERS)
            if count == seen_count:
                continue
            role, seen_count = chance.choice(ROLES), count
            running[role].kill()
            running[role].wait()
            kill_count += 1
            running[role] = _start(folder, role, week.seed + kill_count, week.mb)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return _check(folder, week, kill_count, time.monotonic() - started_s)


def _is_over(folder: Path, week: Week, kill_count: int, passed_s: float) -> bool:
    is_done = all(len(_noted(folder, run)) >= count for run, count in week.commits.items())
    is_done = is_done and kill_count >= week.kill_count
    return passed_s >= week.seconds_max or (passed_s >= week.seconds and is_done)


def _noted(folder: Path, run: str) -> set[int]:
    notes = folder / f"{run}.steps"
    lines = notes.read_text().splitlines(keepends=True) if notes.exists() else []
    return {int(line) for line in lines if line.endswith("\n")}  # the last may be half written


def _start(folder: Path, role: str, seed: int, mb: float) -> subprocess.Popen[bytes]:
    own = ["--role", role, "--seed", str(seed), "--giant-mb", str(mb)]
    with (folder / role).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.gc.week", str(folder), *own],
            stdout=log,
            stderr=log,
            cwd=Path(__file__).parents[2],
        )


def _check(folder: Path, week: Week, kill_count: int, seconds: float) -> Outcome:
    store_path, kept_count, commit_counts = str(folder / "store"), 0, {}
    for run in LEARNERS:
        with casckpt.open(store_path, run=run) as store:
            casckpt_gc.collect(store, RULES, grace_s=0.0)
            noted, steps = _noted(folder, run), set(store.steps())
            owed = {step for step in noted if step % SPAN == 0 or step >= max(noted) - 1}
            assert owed <= steps, f"{run}: {sorted(owed - steps)} were acknowledged and are gone"
            for step in sorted(steps):
                problem = difference(tree(run, step, week.mb), store.restore(step))
                assert problem is None, f"{run}@{step}: {problem}"
            commit_counts[run], kept_count = len(noted), kept_count + len(steps)
    with casckpt.open(store_path, run="agent") as store:
        for _ in range(2):  # the first may have left something to the second: each has a budget
            casckpt_gc.collect(store, RULES, compaction=casckpt_gc.Compaction(is_thorough=True), grace_s=0.0)
        report = store.verify(read_data=True)
        assert report.ok, str(report)
        left = [*unnamed_packs(store), *leftovers(store), *os.listdir(f"{store_path}/trash")]
        assert not left and not os.listdir(f"{store_path}/leases"), f"left behind: {left}"
        mark = Mark(store)
        mark.add(roots(store))
        found = census(store, mark)
    sizes = _sizes(store_path)
    folder_bytes = sum(size for name, size in sizes.items() if not name.startswith(("index", "reserve")))
    pack_bytes = sum(size for name, size in sizes.items() if name.startswith("packs"))
    return Outcome(
        commit_counts,
        kill_count,
        seconds,
        kept_count,
        folder_bytes,
        sum(size for name, size in sizes.items() if name.startswith("index")),
        found.live_bytes,
        found.held_bytes,
        folder_bytes / (found.live_bytes + found.held_bytes),
        pack_bytes / sum(each.needed_bytes for each in found.packs.values()),
        sum(not name.startswith("index") for name in sizes),
        _compare(folder),
    )


def _sizes(path: str) -> dict[str, int]:
    names = (f"{base}/{name}" for base, _, found in os.walk(path) for name in found)
    return {os.path.relpath(name, path): os.path.getsize(name) for name in names}


def _compare(folder: Path) -> dict[str, tuple[float, float]]:
    """Processor time of what a user waits for, after the week and in a store of ten commits, by turns."""
    short = str(folder / "short")
    with casckpt.open(short, create=True, run="agent") as store:
        for step in range(1, 11):
            store.commit(step, tree("agent", step, 1.0))
    paths = {"long": str(folder / "store"), "short": short}
    acts: dict[str, Callable[[casckpt.Store], Any]] = {
        "commit": lambda store: store.commit((store.step or 0) + 1, tree("agent", (store.step or 0) + 1, 1.0)),
        "restore of the newest": lambda store: store.restore(),
        "timeline()[-1]": lambda store: store.timeline()[-1],
    }
    took: dict[tuple[str, str], list[float]] = {}
    for _, (name, path) in itertools.product(range(9), paths.items()):
        started_s = time.process_time()
        with casckpt.open(path, run="agent") as store:
            took.setdefault(("open", name), []).append(time.process_time() - started_s)
            store.resume(only=["counters"])
            for act, do in acts.items():
                started_s = time.process_time()
                do(store)
                took.setdefault((act, name), []).append(time.process_time() - started_s)
    found = {}
    for act in ("open", *acts):
        long_s, short_s = (statistics.median(took[act, name]) for name in paths)
        found[act] = long_s, long_s / short_s
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--role", choices=ROLES)
    parser.add_argument("--minutes", type=float, default=10.0, help="at least")
    parser.add_argument("--minutes-max", type=float, default=240.0)
    parser.add_argument("--agent-commits", type=int, default=10_000)
    parser.add_argument("--giant-commits", type=int, default=300)
    parser.add_argument("--giant-mb", type=float, default=200.0)
    parser.add_argument("--kill-every", type=float, default=3.0, help="seconds, on average")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    path = str(given.folder / "store")
    if given.role in LEARNERS:
        learn(path, given.role, given.folder / f"{given.role}.steps", given.giant_mb)
    elif given.role == "reader":
        read(path, given.seed, given.giant_mb)
    elif given.role == "collector":
        gather(path)
    elif given.role == "patrol":
        look(path)
    else:
        commits = {"agent": given.agent_commits, "giant": given.giant_commits}
        lengths = 60 * given.minutes, 60 * given.minutes_max
        outcome = live_through(given.folder, Week(*lengths, commits, 100, given.giant_mb, given.seed, given.kill_every))
        print(outcome)
        is_small = outcome.folder_excess <= 1.3 and outcome.held_share <= 1.0
        print("nothing lost, nothing left;", "small enough" if is_small else "TOO LARGE: more than 1.3, or held > live")
        sys.exit(0 if is_small else 1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main()
