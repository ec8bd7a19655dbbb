"""How many processes the kernel killed for want of memory in the cgroup of this process.

A counter that moved while a command ran says what an exit code cannot: that one of its workers was killed, and not the
process that was waited for. It counts kills by a limit of the cgroup and by the machine as a whole.
"""

from __future__ import annotations

import contextlib


def oom_kill_count(*, proc: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup") -> int | None:
    """The `oom_kill` counter of cgroup v2 (`memory.events`), or of v1 (`memory.oom_control`); None where neither is.

    Args:
        proc: which cgroups a process is in, as the kernel tells.
        mount: where they are mounted.
    """
    for path in _paths(proc, mount):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return None


def _paths(proc: str, mount: str) -> list[str]:
    """Where the counter may be; inside a container the cgroup's own folder is often the mount itself."""
    found = []
    with contextlib.suppress(OSError), open(proc, encoding="utf-8", errors="replace") as file:
        for line in file:
            _, _, rest = line.rstrip("\n").partition(":")
            controllers, _, path = rest.partition(":")
            if not controllers:
                found += [f"{base}{path.rstrip('/')}/memory.events" for base in (mount, f"{mount}/unified")]
            elif "memory" in controllers.split(","):
                found += [f"{mount}/memory{inside}/memory.oom_control" for inside in (path.rstrip("/"), "")]
    return [*found, f"{mount}/memory.events"]
