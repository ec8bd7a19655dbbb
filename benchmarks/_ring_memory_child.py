"""The child process of T10r: a full ring, 100 commits of 1 % new rows and 10 restores; prints what memory grew (JSON).

Half of the commits are made in the background. Resident memory is taken where nothing is under way; the peak is the
kernel's high-water mark over everything that follows the first tenth.
"""

from __future__ import annotations

import json
import sys

import casckpt
from benchmarks._memory_child import reset_peak, status_bytes
from benchmarks.replay import ROW_SHARE, FullRing

COMMITS, WARM_UP, RESTORES = 100, 10, 10


def main(folder: str, size_bytes: int) -> None:
    """Print the growth of resident memory in bytes, by case."""
    buffer = FullRing(size_bytes)
    ring = buffer.ring("counter")
    with casckpt.open(f"{folder}/store", create=True) as store:
        store.commit(0, {"replay": ring})

        def commit(step: int) -> None:
            buffer.add(max(1, buffer.capacity // ROW_SHARE))
            (store.commit_async if step % 2 else store.commit)(step, {"replay": ring})
            store.wait()

        for step in range(1, WARM_UP + 1):
            commit(step)
        store.restore_into({"replay": ring}, WARM_UP)
        reset_peak()
        before = status_bytes("VmRSS")
        for step in range(WARM_UP + 1, WARM_UP + COMMITS + 1):
            commit(step)
        committed, peak = status_bytes("VmRSS"), status_bytes("VmHWM")
        for step in range(WARM_UP + 1, WARM_UP + COMMITS + 1, COMMITS // RESTORES):
            store.restore_into({"replay": ring}, step)
        restored, last_peak = status_bytes("VmRSS"), status_bytes("VmHWM")
    print(
        json.dumps(
            {
                f"growth over {COMMITS} commits": committed - before,
                f"growth over {RESTORES} restores": restored - committed,
                f"peak beyond the ring during {COMMITS} commits": peak - before,
                f"peak beyond the ring, {RESTORES} restores included": last_peak - before,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
