"""Makes a golden store: a small store with everything the format has, and what it must restore to for ever.

    python -m tests.compat.make_golden tests/compat/golden/v1

Run once per format change and by hand; the folder is then kept as it is. Clock, randomness, host and process id are
fixed, so two runs of one release give the same bytes. `expected.json` beside the store is written from the live
objects.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import casckpt
from casckpt.objects import writer
from casckpt.storage.process import System
from tests.compat.contents import contents
from tests.conformance.sample_states import Unknown, sample


class FixedSystem(System):
    """The same ids, times and names in every run."""

    def pid(self) -> int:
        return 4711


def fixed_system(seed: int) -> System:
    rng = np.random.default_rng(seed)
    times = iter(range(1_700_000_000_000_000_000, 1_800_000_000_000_000_000, 10**9))
    return FixedSystem(time_ns=lambda: next(times), random_bytes=rng.bytes, host="golden")


def make(store_path: Path) -> dict[str, Any]:
    """Write the store; returns what is in it, for `expected.json`."""
    states: dict[str, dict[str, str]] = {}
    with casckpt.open(store_path, create=True, run="seed-0", chunk_size=4096, system=fixed_system(0)) as store:
        state = sample(0).state
        first = store.commit(0, state, metrics={"return": -1.5, "solved": False}, config={"lr": 3e-4, "name": "ppo"})
        states[first.id] = contents(state)

        with mock.patch.object(writer, "INLINE_LIMIT", 0):  # a pack, without the 64 KiB that one usually takes
            state |= _larger()
            second = store.commit(100, state, labels={"note": "in a pack"})
        states[second.id] = contents(state)

        light = {"counters": {"frames": 2**40, "weights": torch.arange(6, dtype=torch.bfloat16)}}
        kept = [name for name in state if name != "tensors"]
        mixed = store.commit(130, light, inherit=kept, drop=["tensors"], necessity={"counters": "droppable"})
        states[mixed.id] = contents({**{name: state[name] for name in kept}, **light})

        store.annotate(0, metrics={"return": 2.25, "late": 1}, labels={"kind": "best"})
        store.tag("best", 0)
        store.tag("mistake", 100)
        store.untag("mistake")
        store.resume(0)
        state = {**sample(0).state, "arrays": sample(1).state["arrays"], "unknown": Unknown(3)}
        branched = store.commit(50, state, allow_pickle=True)
        states[branched.id] = contents(state)
        store.retire(mixed.id)

    with casckpt.open(store_path, run="seed-1", system=fixed_system(1)) as store:
        state = sample(0).state
        other = store.commit(0, state)
        states[other.id] = contents(state)
    snapshots = [
        {"id": each.id, "run": each.run, "branch": each.branch, "step": each.step, "contents": states[each.id]}
        for each in (first, second, mixed, branched, other)
    ]
    return {"tags": {"seed-0/best": first.id}, "retired": [mixed.id], "snapshots": snapshots}


def _larger() -> dict[str, Any]:
    """More chunks than a manifest holds (all the same one), and a leaf of several different chunks."""
    ramp = np.sqrt(np.arange(3_000, dtype=np.float64))
    return {"ring": {"zeros": np.zeros(1_030 * 4_096, np.uint8)}, "critic": {"ramp": torch.from_numpy(ramp)}}


def main() -> None:
    folder = Path(sys.argv[1])
    expected = make(folder / "store")
    shutil.rmtree(folder / "store" / "index")
    (folder / "store" / "tmp").rmdir()
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
