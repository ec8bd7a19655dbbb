"""The child process of T10: runs one operation and prints how far resident memory rose above its start (JSON).

The kernel's high-water mark (VmHWM) is reset just before the operation, so earlier peaks do not count. Page cache is
not resident memory of a process, and is not counted.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable, Iterator

import torch

import casckpt
from benchmarks._states import random_state, refill, seeded, state_size
from benchmarks.kinds import KINDS

RESET_PEAK = "5"  # proc(5): resets VmHWM


HISTORY_LENGTH = 6  # commits of a trained state before the one that is measured
State = dict[str, object]


def main(case: str, folder: str, size_bytes: int, level: str | None = None) -> None:
    """Print {"extra_bytes", "state_bytes"} for one of the cases of T10; with a level, after a `make_history`."""
    with casckpt.open(f"{folder}/store", create=True) as store:
        state = _trained(size_bytes) if level else _random(store, size_bytes, is_stored="restore" in case)
        step = HISTORY_LENGTH + 1
        actions: dict[str, Callable[[], object]] = {
            "commit": lambda: store.commit(step, state),
            "commit_async": lambda: store.commit_async(step, state).result(),
            "restore": store.restore,
            "restore_into": lambda: store.restore_into(state, atomic=True),
            "restore_into_streaming": lambda: store.restore_into(state, atomic=False),
        }
        extra = _peak_beyond_start(actions[case])
    print(json.dumps({"extra_bytes": extra, "state_bytes": state_size(_tensors(state))}))


def make_history(folder: str, size_bytes: int, level: str) -> None:
    """Commit some states of a training, one optimizer step apart."""
    with casckpt.open(f"{folder}/store", create=True, level=level) as store:
        for step, state in enumerate(_training(size_bytes, HISTORY_LENGTH), 1):
            store.commit(step, state)


def _random(store: casckpt.Store, size_bytes: int, *, is_stored: bool) -> State:
    """Random bits: stored, and others in their place now, or to be stored."""
    generator = seeded()
    tensors = random_state(size_bytes, 64, generator)
    store.commit(0, {"model": tensors if is_stored else {"none yet": torch.zeros(1)}})
    if is_stored:
        refill(tensors, generator)
    return {"model": tensors}


def _trained(size_bytes: int) -> State:
    """The state that follows the history: trained again, as what committed it leaves memory that a commit would use."""
    *_, last = _training(size_bytes, HISTORY_LENGTH + 1)
    return last


def _training(size_bytes: int, count: int) -> Iterator[State]:
    """States one step of AdamW apart, in float32: three layers, three numbers of four bytes for each weight."""
    return KINDS["AdamW"](int((size_bytes / 36) ** 0.5), count)


def _tensors(state: object) -> dict[str, torch.Tensor]:
    """All tensors of a state, by where they stand."""
    if isinstance(state, torch.Tensor):
        return {"": state}
    parts = state.items() if isinstance(state, dict) else ()
    return {f"{key}/{name}": tensor for key, part in parts for name, tensor in _tensors(part).items()}


def _peak_beyond_start(action: Callable[[], object]) -> int:
    reset_peak()
    before = status_bytes("VmRSS")
    kept = action()
    peak = status_bytes("VmHWM")
    del kept
    return peak - before


def reset_peak() -> None:
    """Let the high-water mark start anew, and give back what is free: it would hide what is taken."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as control:
        control.write(RESET_PEAK)


def status_bytes(name: str) -> int:
    """A size that the kernel tells of this process."""
    with open("/proc/self/status") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
    raise LookupError(name)


if __name__ == "__main__":
    if sys.argv[1] == "history":
        make_history(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
