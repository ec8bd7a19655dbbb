"""The child process of T10: runs one operation and prints how far resident memory rose above its start (JSON).

The kernel's high-water mark (VmHWM) is reset just before the operation, so earlier peaks do not count. Page cache is
not resident memory of a process, and is not counted.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable

import torch

import casckpt
from benchmarks._states import random_state, refill, seeded, state_size

RESET_PEAK = "5"  # proc(5): resets VmHWM


def main(case: str, folder: str, size_bytes: int) -> None:
    """Print {"extra_bytes", "state_bytes"} for one of the cases of T10."""
    generator = seeded()
    state = random_state(size_bytes, 64, generator)
    with casckpt.open(f"{folder}/store", create=True) as store:
        store.commit(0, {"first": {"value": torch.zeros(1)}}) if "commit" in case else store.commit(0, {"model": state})
        actions: dict[str, Callable[[], object]] = {
            "commit": lambda: store.commit(1, {"model": state}, drop=("first",)),
            "commit_async": lambda: store.commit_async(1, {"model": state}, drop=("first",)).result(),
            "restore": store.restore,
            "restore_into": lambda: store.restore_into({"model": state}, atomic=True),
            "restore_into_streaming": lambda: store.restore_into({"model": state}, atomic=False),
        }
        if "restore" in case:
            refill(state, generator)
        extra = _peak_beyond_start(actions[case])
    print(json.dumps({"extra_bytes": extra, "state_bytes": state_size(state)}))


def _peak_beyond_start(action: Callable[[], object]) -> int:
    reset_peak()
    before = status_bytes("VmRSS")
    kept = action()
    peak = status_bytes("VmHWM")
    del kept
    return peak - before


def reset_peak() -> None:
    """Let the high-water mark start anew."""
    gc.collect()
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
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
