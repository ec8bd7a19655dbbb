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


def main(path: str, step: str) -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    with casckpt.open(path) as store:
        store.restore(int(step))
        print(time.perf_counter() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
