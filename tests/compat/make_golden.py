"""Makes a golden store: a small store with everything the format has, and what it must restore to for ever.

    python -m tests.compat.make_golden tests/compat/golden/v1

The folder's name says which: v1 has every kind of leaf and scalar, and records without bases; v2 has trainings, whose
records are differences and predictions of every kind; v3 was collected, so that it has every kind of entry, and epochs
in place of those that are old. Run once per format change and by hand; the folder is then
kept as it is. Clock, randomness, host and process id are fixed, so two runs of one release give the same bytes, as far
as the threads of v2 meet the same choices. `expected.json` beside the store is written from the live objects.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import casckpt_gc
import numpy as np
import torch

import casckpt
from casckpt.limits import SMALL_BLOCK_LIMIT
from casckpt.objects import writer
from casckpt.storage.process import System
from casckpt.store import components
from casckpt.store.generations import open_generation
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


# --- trainings ---

_PERIOD = 2_048  # numbers after which content repeats, so that chunks of 4 KiB occur often and are stored once


def make_trainings(store_path: Path) -> dict[str, Any]:
    """Runs of three optimizers: chains, a branch from the middle, a retired step, levels, a light commit."""
    made: list[dict[str, Any]] = []

    def commit(store: Any, step: int, state: dict[str, Any], **options: Any) -> str:
        snapshot = store.commit(step, state, **options)
        found = {"id": snapshot.id, "run": snapshot.run, "branch": snapshot.branch, "step": snapshot.step}
        made.append({**found, "contents": contents(state)})
        return str(snapshot.id)

    with mock.patch.object(components, "PREDICTED_SIZE_MIN", 0), mock.patch.object(writer, "INLINE_LIMIT", 0):
        with casckpt.open(store_path, create=True, run="adamw", chunk_size=4096, system=fixed_system(2)) as store:
            states = list(trainings("adamw", 6))
            first = commit(store, 1, states[0])
            retired = commit(store, 2, states[1])
            commit(store, 3, states[2])
            commit(store, 4, states[3], levels={"drifting": "small"})
            store.tag("start", 1)
            store.retire(2)
            store.resume(3)
            commit(store, 6, states[5])
        for number, name in enumerate(("sgd", "nesterov")):
            with casckpt.open(store_path, run=name, level="small", system=fixed_system(3 + number)) as store:
                for step, state in enumerate(trainings(name, 3), 1):
                    commit(store, step, state)
    with casckpt.open(store_path, run="nesterov", system=fixed_system(5)) as store:
        state["drifting"]["table"][5] += 1
        commit(store, 4, state)  # a difference inside the entry
    return {"tags": {"adamw/start": first}, "retired": [retired], "snapshots": made}


def trainings(name: str, steps: int) -> Iterator[dict[str, Any]]:
    """States step by step, of an optimizer with bf16 gradients: weights, a bf16 copy, moments, drifting arrays."""
    rng = np.random.default_rng(11)
    shape = (SMALL_BLOCK_LIMIT // 2 // 100 + 1, 100)  # large enough for chunks of its own even in bf16

    def noise(scale: float) -> torch.Tensor:
        return torch.from_numpy(np.resize(rng.normal(size=_PERIOD, scale=scale), shape)).float()

    weight = torch.nn.Parameter(noise(0.05))
    optimizer: Any = (
        torch.optim.AdamW([weight], lr=1e-3)
        if name == "adamw"
        else torch.optim.SGD([weight], lr=1e-3, momentum=0.9, nesterov=name == "nesterov")
    )
    table = np.resize(rng.integers(0, 1 << 40, _PERIOD), SMALL_BLOCK_LIMIT // 8 + 9)
    drift = np.resize(rng.normal(size=_PERIOD), table.size)
    for step in range(1, steps + 1):
        weight.grad = (weight.detach() * 0.1 + noise(0.002)).bfloat16().float()
        optimizer.step()
        table = table + np.resize(np.arange(_PERIOD) % 199 == step, table.size) * step
        drift = drift + np.resize(rng.normal(size=_PERIOD, scale=1e-9), table.size)
        yield {
            "policy": {"weight": weight.detach().clone(), "half": weight.detach().bfloat16()},
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "drifting": {"table": table.copy(), "drift": drift.copy(), "step": step},
        }


# --- a store that was collected ---


def make_collected(store_path: Path) -> dict[str, Any]:
    """A run that lost steps and components, had a step superseded and was recovered; more than a hundred entries."""
    made: list[dict[str, Any]] = []
    whole = ("counters", "policy", "replay")

    def note(snapshot: Any, names: tuple[str, ...]) -> str:
        found = {"id": snapshot.id, "run": snapshot.run, "branch": snapshot.branch, "step": snapshot.step}
        state = collected_state(snapshot.step)
        made.append({**found, "names": names, "contents": contents({name: state[name] for name in names})})
        return str(snapshot.id)

    with casckpt.open(store_path, create=True, chunk_size=4096, system=fixed_system(6)) as store:
        first = note(store.commit(1, collected_state(1)), whole)
        store.tag("first", 1)
        state = collected_state(2)
        replay = state.pop("replay")
        replaced = note(store.commit(2, state, inherit=["replay"]), ())
        note(store.supersede_async(2, {"replay": replay}).result(), ())
        open_generation(store, store.snapshot(2), ["a golden store"])
        for step in range(3, 8):
            with mock.patch.object(writer, "INLINE_LIMIT", 0 if step % 2 else writer.INLINE_LIMIT):
                left = {6: whole[:2], 7: whole}.get(step, ())
                note(store.commit(step, collected_state(step)), left)
        store.tag("seventh", 7)
        for number in range(90):
            store.annotate(7, metrics={"evaluation": number})
        store.retire(3)
        rules = casckpt_gc.Retention(latest=2), casckpt_gc.Thinning(["replay"], keep_latest=1)
        casckpt_gc.collect(store, *rules, grace_s=0.0)
        note(store.commit(8, collected_state(8)), whole)
        store.annotate(8, metrics={"evaluation": 8})
    tags = {"main/first": first, "main/seventh": made[7]["id"]}
    retired = [each["id"] for each in made if not each["names"]]
    assert replaced in retired
    return {"tags": tags, "retired": retired, "snapshots": made}


def collected_state(step: int) -> dict[str, Any]:
    """Weights that two steps share, counters, rows that are new."""
    rng = np.random.default_rng(step // 2)
    return {
        "counters": {"step": step},
        "policy": {"w": torch.from_numpy(rng.normal(size=300).astype(np.float32)), "b": torch.zeros(5)},
        "replay": {"rows": np.random.default_rng(step).integers(0, 99, 2_000)},
    }


MAKERS = {"v1": make, "v2": make_trainings, "v3": make_collected}


def main() -> None:
    folder = Path(sys.argv[1])
    expected = MAKERS[folder.name](folder / "store")
    shutil.rmtree(folder / "store" / "index")
    (folder / "store" / "reserve").unlink(missing_ok=True)
    for name in ("tmp", "leases", "trash"):
        if (folder / "store" / name).exists():
            (folder / "store" / name).rmdir()
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
