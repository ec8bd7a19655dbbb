"""Open a store and restore one step, in a process of its own: `python -m benchmarks._restore_child PATH STEP`.

Prints the seconds from the open to the whole state, all imports done before: by the clock, and of processor time.
"""

from __future__ import annotations

import sys
import time

import torch

import casckpt
from casckpt.codec import best, prediction  # noqa: F401 - loads what decodes, as torch.load's own code is loaded
from casckpt.state import _numpy, _torch  # noqa: F401
from casckpt.store import opening  # noqa: F401 - what `casckpt.open` imports when it is called
from casckpt.store import store as _store  # noqa: F401


def restore_costs(path: str, step: int) -> tuple[float, float]:
    """Seconds from the open to the whole state: by the clock, and of processor time."""
    start, start_used = time.perf_counter(), time.process_time()
    with casckpt.open(path) as store:
        store.restore(step)
        return time.perf_counter() - start, time.process_time() - start_used


def main(path: str, step: str) -> None:
    torch.set_num_threads(1)
    print(*restore_costs(path, int(step)))


if __name__ == "__main__":
    main(*sys.argv[1:])
