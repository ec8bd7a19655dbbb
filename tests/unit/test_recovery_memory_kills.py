"""The kernel's count of kills for memory: from files as it writes them, and from a real cgroup if one can be made."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from casckpt.recovery import FailureInfo, Settings, Supervisor
from casckpt.recovery.memory_kills import oom_kill_count

FAST = Settings(restarts_max=0, backoff_s=0.001, poll_s=0.01)
EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\noom_group_kill 9\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("cgroups", "place", "content"),
    [
        ("0::/job/step\n", "job/step/memory.events", EVENTS),
        ("0::/job/step\n", "unified/job/step/memory.events", EVENTS),
        ("0::/\n", "memory.events", EVENTS),
        ("0::/outside/of/this/container\n", "memory.events", EVENTS),
        ("9:name=systemd:/\n4:cpu,memory:/job\n0::/\n", "memory/job/memory.oom_control", CONTROL),
        ("4:memory:/docker/1234\n", "memory/memory.oom_control", CONTROL),
    ],
)
def test_counter_is_found_wherever_cgroups_are_mounted(tmp_path: Path, cgroups: str, place: str, content: str) -> None:
    proc, mount = tmp_path / "cgroup", tmp_path / "mount"
    proc.write_text(cgroups)
    assert oom_kill_count(proc=str(proc), mount=str(mount)) is None
    (mount / place).parent.mkdir(parents=True)
    for count in (0, 17):
        (mount / place).write_text(content.format(count))
        assert oom_kill_count(proc=str(proc), mount=str(mount)) == count


@pytest.mark.parametrize("content", ["", "oom_kill \n", "oom_kill many\n", "oom_kill_disable 1\n"])
def test_file_that_does_not_tell_is_no_count(tmp_path: Path, content: str) -> None:
    (tmp_path / "memory.events").write_text(content)
    assert oom_kill_count(proc=str(tmp_path / "nowhere"), mount=str(tmp_path)) is None


def failure(script: str, counts: list[int | None]) -> FailureInfo | None:
    """How a command failed while the kernel's counter went from the first to the second."""
    supervisor = Supervisor(["sh", "-c", script], settings=FAST, oom_kills=lambda: counts.pop(0))
    assert supervisor.run() != 0
    return supervisor.status.last_failure


def test_failure_during_which_the_counter_moved_is_a_kill_for_memory_whatever_the_exit_code() -> None:
    """A worker is killed, and the process that waited for it ends with an exception of its own."""
    found = failure("exit 3", [5, 7])
    assert found == FailureInfo("oom-kill", None, "exit code 3; the kernel killed 2 of its cgroup for memory meanwhile")
    assert failure("exit 3", [5, 5]) == FailureInfo("exception", None, "exit code 3")
    assert failure("exit 3", [None, 7]) == FailureInfo("exception", None, "exit code 3")


def test_sigkill_counts_as_a_kill_for_memory_and_says_what_the_counter_says() -> None:
    for counts, message in [([None, None], "as by the kernel"), ([3, 3], "though its cgroup counts no kill")]:
        found = failure("kill -9 $$", counts)
        assert found is not None
        assert found.kind == "oom-kill"
        assert message in found.message


@contextlib.contextmanager
def cgroup(limit_bytes: int) -> Iterator[tuple[Path, str]]:
    """A real cgroup with this limit and no swap: its folder, and the line of /proc/self/cgroup that would name it."""
    own = {line.split(":")[1]: line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    root, path, limit, line = Path("/sys/fs/cgroup"), own.get("", "/"), "memory.max", "0::"
    if "memory" in own:
        root, path, limit, line = root / "memory", own["memory"], "memory.limit_in_bytes", "4:memory:"
    folder = root / path.strip("/") / f"casckpt-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no cgroup can be made here")
    try:
        if not (folder / limit).exists():
            pytest.skip("cgroups here do not limit memory")
        (folder / limit).write_text(str(limit_bytes))
        for name in ("memory.swap.max", "memory.swappiness"):
            if (folder / name).exists():
                (folder / name).write_text("0")
        yield folder, f"{line}/{folder.relative_to(root)}\n"
    finally:
        removed = threading.Event()
        while not removed.wait(0.01):  # busy until the kernel is done with who was killed
            with contextlib.suppress(OSError):
                folder.rmdir()
                removed.set()


@pytest.mark.full
def test_kernel_that_kills_for_memory_is_recognised(tmp_path: Path) -> None:
    with cgroup(64 << 20) as (folder, line):
        (tmp_path / "cgroup").write_text(line)
        greedy = f'{sys.executable} -S -c "bytearray(1 << 28)"'
        script = f"(echo $BASHPID > {folder}/cgroup.procs && exec {greedy}); exit 3"
        supervisor = Supervisor(
            ["bash", "-c", script], settings=FAST, oom_kills=lambda: oom_kill_count(proc=str(tmp_path / "cgroup"))
        )
        assert supervisor.run() == 3
    found = FailureInfo("oom-kill", None, "exit code 3; the kernel killed 1 of its cgroup for memory meanwhile")
    assert supervisor.status.last_failure == found
