"""T10 peak extra memory, T11 cost of the import, T12 bytes that bookkeeping adds to a small agent's history."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import casckpt
from benchmarks._harness import MIB, Measurement, Settings, absolute, folder_size, scratch
from benchmarks._states import random_state, refill, seeded, state_size

MEMORY_BASE_MIB = 128
IMPORT_TARGET_MS = 60
OVERHEAD_TARGET_PERCENT = 2.0
AGENT_SIZE = 2 * 10**6  # bytes: policy, value and Adam's moments of a small agent
MEMORY_CASES = ("commit", "commit_async", "restore", "restore_into", "restore_into_streaming")
_CHILD = ("-m", "benchmarks._memory_child")


def memory(settings: Settings) -> Iterator[Measurement]:
    """T10: the highest resident memory during an operation beyond what was resident before it, in a new process.

    Of random bits, then of the newest state of a history one optimizer step apart. The allowance grows by twice the
    captured bytes for `commit_async` and by the state for `restore`.
    """
    for case in MEMORY_CASES:
        with scratch(settings) as folder:
            yield _peak(case, case, folder, settings)
    for level in ("balanced", "small"):
        with scratch(settings) as folder:
            _run([sys.executable, *_CHILD, "history", f"{folder}/history", str(settings.size_bytes), level])
            for case in MEMORY_CASES[:-1]:
                shutil.copytree(f"{folder}/history", f"{folder}/{case}")
                yield _peak(case, f"{case}, differences, {level}", f"{folder}/{case}", settings, level)
                shutil.rmtree(f"{folder}/{case}")


def _peak(case: str, named: str, folder: str, settings: Settings, *level: str) -> Measurement:
    found = json.loads(_run([sys.executable, *_CHILD, case, folder, str(settings.size_bytes), *level]))
    extra, state = found["extra_bytes"] / MIB, found["state_bytes"] / MIB
    allowed = MEMORY_BASE_MIB + round({"commit_async": 2 * state, "restore": state}.get(case, 0))
    return absolute("T10", named, [extra], "MiB", target=allowed, subject=f"{state:.0f} MiB of state")


def startup(settings: Settings) -> Iterator[Measurement]:
    """T11: a process that imports casckpt, in ms beyond the bare Python process of the same pair."""
    beyond, bare, full = [], [], []
    for _ in range(settings.start_count):
        bare.append(_process_time_s("pass"))
        full.append(_process_time_s("import casckpt"))
        beyond.append((full[-1] - bare[-1]) * 1e3)
    loaded = _run([sys.executable, "-c", "import casckpt, sys; print(*sorted({'torch', 'numpy'} & set(sys.modules)))"])
    note = f"loads {loaded.strip() or 'neither numpy nor torch'}"
    yield absolute(
        "T11",
        "import casckpt",
        beyond,
        "ms",
        target=IMPORT_TARGET_MS if not loaded.strip() else -1,
        subject=note,
        baseline=f"{min(bare) * 1e3:.0f} ms bare",
    )


def overhead(settings: Settings) -> Iterator[Measurement]:
    """T12: all bytes of the store beyond the content itself, in percent of the content, after many commits.

    The content is random bits, new in each commit, so it can be neither deduplicated nor compressed, and whatever the
    folder holds beyond it is structure, timeline, index and record headers.
    """
    for size_bytes, target in ((AGENT_SIZE, OVERHEAD_TARGET_PERCENT), (AGENT_SIZE // 10, None)):
        generator = seeded()
        state = random_state(size_bytes, 24, generator)
        with scratch(settings) as folder:
            with casckpt.open(f"{folder}/store", create=True) as store:
                for step in range(settings.commit_count):
                    refill(state, generator)
                    store.commit(step, {"model": state}, metrics={"return": float(step)})
            content = state_size(state) * settings.commit_count
            percent = (folder_size(f"{folder}/store") - content) / content * 100
        case = f"{settings.commit_count} commits of {size_bytes / 1e6:g} MB in 24 tensors"
        yield absolute("T12", case, [percent], "%", target=target, baseline=f"{content / 1e6:.0f} MB of content")


def _process_time_s(code: str) -> float:
    start = time.perf_counter()
    _run([sys.executable, "-c", code])
    return time.perf_counter() - start


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
