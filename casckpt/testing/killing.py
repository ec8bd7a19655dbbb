"""SIGKILL to a real process at its n-th system call of a kind, by strace. Linux only.

strace counts per call and per thread, and delivers the signal on entry, so the call itself does not happen: killing at
number n leaves what the first n - 1 calls of the kind, and all others between them, have done. `count_calls` says how
far n has to go.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence

CHANGING_CALLS = (
    "write",
    "writev",
    "pwrite64",
    "pwritev",
    "pwritev2",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "unlink",
    "unlinkat",
    "mkdir",
    "mkdirat",
    "rmdir",
    "fsync",
    "fdatasync",
    "msync",
    "sync_file_range",
    "ftruncate",
    "fallocate",
    "utimensat",
    "flock",
)
"""Calls that change, sync or lock something; those that a platform does not have are left out by strace (`?`)."""

_LINE = re.compile(rb"^(\d+) +(\w+)\(")
_RUN_TIMEOUT_S = 600.0


def why_not() -> str | None:
    """Why processes cannot be killed this way here, or None when they can."""
    if not sys.platform.startswith("linux"):
        return "strace exists on Linux only"
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = subprocess.run([*_strace(["write"], os.devnull), "true"], capture_output=True, timeout=_RUN_TIMEOUT_S)
    return None if probe.returncode == 0 else f"strace cannot trace here: {probe.stderr.decode().strip()}"


def count_calls(argv: Sequence[str]) -> dict[str, int]:
    """Run a process to its end; for each call it made, the largest count that one of its threads reached.

    Raises:
        CalledProcessError: the process failed.
    """
    with tempfile.NamedTemporaryFile() as trace:
        subprocess.run([*_strace(CHANGING_CALLS, trace.name), *argv], check=True, timeout=_RUN_TIMEOUT_S)
        per_thread = Counter(match.groups() for match in map(_LINE.match, trace.read().splitlines()) if match)
    counts: dict[str, int] = {}
    for (_, call), count in per_thread.items():
        counts[call.decode()] = max(count, counts.get(call.decode(), 0))
    return dict(sorted(counts.items()))


def start_killed(argv: Sequence[str], call: str, number: int) -> subprocess.Popen[bytes]:
    """Start a process that is killed on entry to the `number`-th `call` of one of its threads."""
    inject = ["-e", f"inject={call}:signal=KILL:when={number}"]
    return subprocess.Popen([*_strace([call], os.devnull), *inject, *argv], stderr=subprocess.PIPE)


def was_killed(process: subprocess.Popen[bytes]) -> bool:
    """Wait for a process of `start_killed`: True when it was killed, False when it ended well before that.

    Raises:
        CalledProcessError: it failed on its own; `stderr` says how.
    """
    _, errors = process.communicate(timeout=_RUN_TIMEOUT_S)
    if process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return True
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, process.args, stderr=errors)
    return False


def _strace(calls: Sequence[str], output: str) -> list[str]:
    wanted = ",".join(f"?{call}" for call in calls)
    # Not --seccomp-bpf: with it, strace 6.1 delivers no injected signal.
    return ["strace", "-f", "-qq", "-o", output, "-e", "signal=none", "-e", f"trace={wanted}"]
