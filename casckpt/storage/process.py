"""Who and when: the clock, randomness and process identity that everything above takes as a parameter."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from casckpt.storage.fs import FileSystem, LocalFileSystem


@cache
def boot_id() -> str:
    """Changes at every start of the machine; empty where the platform does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot: tells a reused pid. 0 where the platform does not tell."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


@dataclass(frozen=True)
class System:
    """Everything outside the store: replace a field to run it under a simulated clock or on a failing disk."""

    file_system: FileSystem = field(default_factory=LocalFileSystem)
    time_ns: Callable[[], int] = time.time_ns
    monotonic_s: Callable[[], float] = time.monotonic
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    host: str = field(default_factory=socket.gethostname)

    def pid(self) -> int:
        return os.getpid()

    def temporary_path(self, root: str) -> str:
        """A new name in `tmp/` that says which process made it: boot id, pid, start time, random."""
        return f"{root}/tmp/{_identity(os.getpid())}-{self.random_bytes(8).hex()}"

    def lease_path(self, root: str) -> str:
        """A new name in `leases/`, which says the same."""
        return f"{root}/leases/{_identity(os.getpid())}-{self.random_bytes(8).hex()}"


@cache
def _identity(pid: int) -> str:
    return f"{boot_id()[:8]}-{pid}-{start_ticks(pid)}"


def owner_of(name: str) -> tuple[int | None, str]:
    """Process id in a name that `System` made, and its state: "running", "dead" or "unknown" (another boot)."""
    boot, _, rest = name.partition("-")
    pid, _, rest = rest.partition("-")
    ticks = rest.partition("-")[0]
    if not (pid.isdigit() and ticks.isdigit()) or boot != boot_id()[:8]:
        return (int(pid) if pid.isdigit() else None), "unknown"
    is_running = int(ticks) != 0 and start_ticks(int(pid)) == int(ticks)
    return int(pid), "running" if is_running else "dead"
