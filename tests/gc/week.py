"""A week of training in minutes: two processes commit, one restores, one collects; one is killed every so often.

    python -m tests.gc.week FOLDER --minutes 10 --seed 1

What each process does follows from the seed and its step alone, so every step that is in the store at the end is
compared with what must be in it. Learners note each step when its commit returned; nothing noted may be lost, but for
what retention let go. When it ends, it collects once more and prints what is left: no pack without a name, no trash,
no temporary file, and how much larger the folder is than what is needed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
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
ROLES = ("agent", "giant", "reader", "collector")
RULES = casckpt_gc.Retention(latest=3, every_steps=SPAN)
KILLS_MIN, COMMITS_MIN = 6, 11  # and of each run so many, however long that takes
_FLOATS = {"agent": 40_000, "giant": 400_000}


def tree(run: str, step: int, scale: float) -> dict[str, Any]:
    """State of a run at a step: a table that drifts a little, weights that are new, counters."""
    size = int(_FLOATS[run] * (scale if run == "giant" else 1))
    table = np.random.default_rng(step // 20).standard_normal(size).astype(np.float32)
    table[step % 97 :: 997] += step
    fresh = np.random.default_rng(10**6 + step).standard_normal(size // 8).astype(np.float32)
    return {"counters": {"step": step}, "frozen": {"t": np.full(size, 7, np.int32)}, "policy": {"t": table, "w": fresh}}


def learn(path: str, run: str, notes: Path, scale: float) -> None:
    with casckpt.open(path, run=run) as store, notes.open("a", buffering=1) as log:
        store.resume()
        while True:
            step = (store.step or 0) + 1
            store.commit(step, tree(run, step, scale))
            print(step, file=log)
            if run == "giant":
                time.sleep(0.5)


def read(path: str, seed: int, scale: float) -> None:
    random.seed(seed)
    while True:
        for run in _FLOATS:
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
                    problem = difference(tree(run, step, scale), found)
                    if problem is not None:
                        raise AssertionError(f"{run}@{step}: {problem}")


def gather(path: str) -> None:
    while True:
        for run in _FLOATS:
            with casckpt.open(path, run=run) as store:
                casckpt_gc.collect(store, RULES, grace_s=0.2)
        time.sleep(0.5)


@dataclass(frozen=True)
class Outcome:
    """What was left.

    Attributes:
        commit_count: acknowledged commits.
        kill_count: processes killed.
        kept_count: snapshots compared at the end.
        excess: bytes of packs ÷ bytes of live and held records.
        held_share: bytes held only as bases ÷ plain bytes of what is live.
        file_count: files of the store, index aside.
    """

    commit_count: int
    kill_count: int
    kept_count: int
    excess: float
    held_share: float
    file_count: int


def live_through(folder: Path, *, seconds: float, seed: int, kill_every_s: float, scale: float) -> Outcome:
    """Run it, then check everything.

    Raises:
        AssertionError: something was lost, is wrong, or was left behind.
    """
    store_path = str(folder / "store")
    casckpt.open(store_path, create=True).close()
    chance = random.Random(seed)
    running = {role: _start(folder, role, seed, scale) for role in ROLES}
    end_s, kill_count = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < end_s or kill_count < KILLS_MIN or _fewest_commits(folder) < COMMITS_MIN:
            time.sleep(kill_every_s * chance.uniform(0.5, 1.5))
            for role, process in running.items():
                if process.poll() is not None:
                    raise AssertionError(f"{role} ended by itself: {(folder / role).read_text()[-2000:]}")
            role = chance.choice(ROLES)
            running[role].kill()
            running[role].wait()
            kill_count += 1
            running[role] = _start(folder, role, seed + kill_count, scale)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return _check(folder, kill_count, scale)


def _fewest_commits(folder: Path) -> int:
    """Of the runs, how many commits the slowest has acknowledged: a busy machine gets more time."""
    notes = [folder / f"{run}.steps" for run in _FLOATS]
    return min(len(each.read_text().splitlines()) if each.exists() else 0 for each in notes)


def _start(folder: Path, role: str, seed: int, scale: float) -> subprocess.Popen[bytes]:
    argv = [
        sys.executable,
        "-m",
        "tests.gc.week",
        str(folder),
        "--role",
        role,
        "--seed",
        str(seed),
        "--scale",
        str(scale),
    ]
    with (folder / role).open("ab") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log, cwd=Path(__file__).parents[2])


def _check(folder: Path, kill_count: int, scale: float) -> Outcome:
    store_path, commit_count, kept_count = str(folder / "store"), 0, 0
    for run in _FLOATS:
        with casckpt.open(store_path, run=run) as store:
            casckpt_gc.collect(store, RULES, grace_s=0.0)
            notes = folder / f"{run}.steps"
            noted = {int(line) for line in notes.read_text().splitlines()} if notes.exists() else set()
            steps = set(store.steps())
            owed = {step for step in noted if step % SPAN == 0 or step >= max(noted) - 1}
            assert owed <= steps, f"{run}: {sorted(owed - steps)} were acknowledged and are gone"
            for step in sorted(steps):
                problem = difference(tree(run, step, scale), store.restore(step))
                assert problem is None, f"{run}@{step}: {problem}"
            commit_count, kept_count = commit_count + len(noted), kept_count + len(steps)
    with casckpt.open(store_path, run="agent") as store:
        casckpt_gc.collect(store, RULES, grace_s=0.0)
        report = store.verify(read_data=True)
        assert report.ok, str(report)
        left = [*unnamed_packs(store), *leftovers(store), *os.listdir(f"{store_path}/trash")]
        assert not left and not os.listdir(f"{store_path}/leases"), f"left behind: {left}"
        mark = Mark(store)
        mark.add(roots(store))
        states, _ = census(store, mark)
        needed, held = (
            sum(getattr(state, kind) for state in states.values()) for kind in ("needed_bytes", "held_bytes")
        )
        plain = sum(places[0].plain_size for places in store._keeper.reader.locate(sorted(mark.live)))
        pack_bytes = store.stats().pack_bytes
    count = sum(len(names) for base, _, names in os.walk(store_path) if "/index" not in base)
    return Outcome(commit_count, kill_count, kept_count, pack_bytes / needed, held / plain, count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--role", choices=ROLES)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of the large state; 60 is about 200 MB")
    arguments = parser.parse_args()
    folder, scale = arguments.folder, arguments.scale
    store_path = str(folder / "store")
    if arguments.role in _FLOATS:
        learn(store_path, arguments.role, folder / f"{arguments.role}.steps", scale)
    elif arguments.role == "reader":
        read(store_path, arguments.seed, scale)
    elif arguments.role == "collector":
        gather(store_path)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        seconds = 60 * arguments.minutes
        print(live_through(folder, seconds=seconds, seed=arguments.seed, kill_every_s=3.0, scale=scale))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main()
