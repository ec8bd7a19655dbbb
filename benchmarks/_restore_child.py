"""Open a store and restore one step, in a process of its own: `python -m benchmarks._restore_child PATH STEP`.

Prints the seconds from the open to the whole state, all imports done before.
"""

from __future__ import annotations

import sys
import time

import torch

import casckpt
from casckpt.codec import best, prediction  # noqa: F401 - loads what decodes, as torch.load's own code is loaded
from casckpt.state import _torch  # noqa: F401


def restore_s(path: str, step: int) -> float:
    """Seconds from the open to the whole state."""
    start = time.perf_counter()
    with casckpt.open(path) as store:
        store.restore(step)
        return time.perf_counter() - start


def main(path: str, step: str) -> None:
    torch.set_num_threads(1)
    print(restore_s(path, int(step)))


if __name__ == "__main__":
    main(*sys.argv[1:])
