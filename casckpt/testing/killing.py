"""SIGKILL to a real process at its n-th system call of a kind, by strace. Linux only.

A process is forked by one that has imported all that it runs (`forker`), and strace attaches before its first step.

strace counts per call and per thread, and delivers the signal on entry, so the call itself does not happen: killing at
number n leaves what the first n - 1 calls of the kind, and all others between them, have done. `count_calls` says how
far n has to go.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

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


class Victim(NamedTuple):
    """A process of `Victims`, and the strace that kills it."""

    pid: int
    tracer: subprocess.Popen[str]


class Victims:
    """Processes that call one function, each until it is killed; children of a forker that has imported it.

    Args:
        target: `module:function`; the module must be importable in a fresh interpreter in this folder.
    """

    def __init__(self, target: str) -> None:
        command = [sys.executable, "-B", "-m", "casckpt.testing.forker", target]  # the calls of each child are the same
        self._forker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def count_calls(self, *arguments: str) -> dict[str, int]:
        """Run a process to its end; for each call it made, the largest count that one of its threads reached.

        Raises:
            RuntimeError: the process failed; stderr says how.
        """
        with tempfile.NamedTemporaryFile() as trace:
            self.finish(self._start(arguments, _strace(CHANGING_CALLS, trace.name)))
            per_thread = Counter(match.groups() for match in map(_LINE.match, trace.read().splitlines()) if match)
        counts: dict[str, int] = {}
        for (_, call), count in per_thread.items():
            counts[call.decode()] = max(count, counts.get(call.decode(), 0))
        return dict(sorted(counts.items()))

    def start(self, arguments: Sequence[str], call: str, number: int) -> Victim:
        """Start a process that is killed on entry to the `number`-th `call` of one of its threads."""
        return self._start(arguments, [*_strace([call], os.devnull), "-e", f"inject={call}:signal=KILL:when={number}"])

    def finish(self, victim: Victim) -> bool:
        """Wait for a process: True when it was killed, False when it ended well before that.

        Raises:
            RuntimeError: it failed on its own; stderr says how.
        """
        exit_code = self._ask(victim.pid)
        victim.tracer.communicate(timeout=_RUN_TIMEOUT_S)
        if exit_code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"process {victim.pid} ended with exit code {exit_code}. Read above why.")
        return exit_code != 0

    def close(self) -> None:
        """End the forker. All processes must have been waited for."""
        self._forker.communicate(timeout=_RUN_TIMEOUT_S)

    def __enter__(self) -> Victims:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, arguments: Sequence[str], strace: Sequence[str]) -> Victim:
        pid = self._ask(list(arguments))
        tracer = subprocess.Popen([*strace, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        told = tracer.stderr.readline()
        os.kill(pid, signal.SIGCONT)
        if "attached" not in told:
            raise RuntimeError(f"strace did not attach to process {pid}: {told}{tracer.communicate()[1]}")
        return Victim(pid, tracer)

    def _ask(self, request: list[str] | int) -> int:
        assert self._forker.stdin is not None and self._forker.stdout is not None
        self._forker.stdin.write(json.dumps(request) + "\n")
        self._forker.stdin.flush()
        answer = self._forker.stdout.readline()
        if not answer:
            raise RuntimeError(f"the forker ended with exit code {self._forker.wait(_RUN_TIMEOUT_S)}. Read above why.")
        return int(answer)


def _strace(calls: Sequence[str], output: str) -> list[str]:
    wanted = ",".join(f"?{call}" for call in calls)
    # Not --seccomp-bpf: with it, strace 6.1 delivers no injected signal.
    return ["strace", "-f", "-o", output, "-e", "signal=none", "-e", f"trace={wanted}"]
