"""Who and when: the clock, randomness and process identity that everything above takes as a parameter."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
import zlib
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
        """A new name in `tmp/` that says which process made it: where, pid, start time, random."""
        return f"{root}/tmp/{_identity(os.getpid())}-{self.random_bytes(8).hex()}"

    def lease_path(self, root: str) -> str:
        """A new name in `leases/`, which says the same."""
        return f"{root}/leases/{_identity(os.getpid())}-{self.random_bytes(8).hex()}"


@cache
def _identity(pid: int) -> str:
    return f"{''.join(_where())}-{pid}-{start_ticks(pid)}"


@cache
def _where() -> tuple[str, str, str]:
    """This machine, its boot, and the namespace in which a process id means something: eight hex digits each."""
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            machine = file.read()
    except (OSError, ValueError):
        machine = ""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    facts = machine + socket.gethostname(), boot_id(), namespace
    one, two, three = (f"{zlib.crc32(each.encode()):08x}" for each in facts)
    return one, two, three


def owner_of(name: str) -> tuple[int | None, str]:
    """Process id in a name that `System` made, and its state.

    "running"; "dead", which is certain: this machine was started anew since, or has no such process; or "unknown": of
    another machine or container, or this platform does not tell.
    """
    where, _, rest = name.partition("-")
    pid, _, rest = rest.partition("-")
    ticks = rest.partition("-")[0]
    machine, boot, namespace = where[:8], where[8:16], where[16:]
    own_machine, own_boot, own_namespace = _where()
    if not (pid.isdigit() and ticks.isdigit()) or machine != own_machine or not boot_id():
        return (int(pid) if pid.isdigit() else None), "unknown"
    if boot != own_boot:
        return int(pid), "dead"
    if namespace != own_namespace or int(ticks) == 0:
        return int(pid), "unknown"
    found = start_ticks(int(pid))
    if found == int(ticks):
        return int(pid), "running"
    return int(pid), "unknown" if found == 0 and _is_there(int(pid)) else "dead"


def _is_there(pid: int) -> bool:
    """Whether there is a process of this id: /proc may hide those of other users."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # it may not be touched, so it is there
    return True
