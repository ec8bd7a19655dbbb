"""What every test gets: markers, Hypothesis profiles, a seed, a place for a store, and a check for leaks.

A test is *quick* unless it is marked `full` or `soak`; the mark is set here, so `-m quick` selects the quick suite.
Of the members of a parametrised test that is marked `few(count)`, so many are quick and the others full. `soak` tests
run only when asked for (`-m soak`). A hang is killed by pytest-timeout, after faulthandler has printed the stack of
every thread (of a worker of xdist that is killed, nothing else is shown).

Randomness: Hypothesis is derandomized in the quick and full profiles (a failure prints the blob that reproduces it),
and other tests take their generator's seed from the `seed` fixture, which prints it. CASCKPT_TEST_SEED overrides it.
"""

from __future__ import annotations

import gc
import os
import re
import sysconfig
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import casckpt

for _name, _examples, _derandomize in (("quick", 15, True), ("full", 150, True), ("soak", 5000, False)):
    settings.register_profile(
        _name,
        max_examples=_examples,
        derandomize=_derandomize,
        deadline=None,  # the machine is shared; time is bounded by pytest-timeout
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("CASCKPT_HYPOTHESIS_PROFILE", "full" if os.environ.get("CI") else "quick"))

NO_FILE = re.compile("/dev/(?!shm/[^/]+/)")  # devices and shared memory; tests may have their folders in /dev/shm
JOIN_TIMEOUT_S = 60.0  # only a leak waits for it; a thread of a background commit yields to all else on a busy machine
# The pools of a process, which live as long as the process.
POOL_THREAD_PREFIXES = ("casckpt_", "casckpt-io_", "casckpt-background_", "casckpt-io-background_")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as quick whatever is neither full nor soak nor one too many."""
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few"):
            families[item.nodeid.partition("[")[0]].append(item)
    for members in families.values():
        (count,) = members[0].get_closest_marker("few").args
        for number, item in enumerate(members):
            if number * count // len(members) == (number - 1) * count // len(members):
                item.add_marker("full")
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("full", "soak")):
            item.add_marker("quick")


def pytest_collection_finish() -> None:
    """Keep what all tests share, about a million objects, out of the garbage collections of every test."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Refuse to test the source tree where the installed wheel is meant (`.ci/run` sets the variable)."""
    location = Path(casckpt.__file__).resolve()
    installed = {Path(sysconfig.get_path(each)).resolve() for each in ("purelib", "platlib")}
    if os.environ.get("CASCKPT_TEST_INSTALLED") and installed.isdisjoint(location.parents):
        raise pytest.UsageError(f"the installed casckpt was to be tested, but {location} was imported")


def pytest_report_header() -> str:
    """Say which casckpt is under test."""
    return f"casckpt: {Path(casckpt.__file__).resolve().parent}"


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """A path in a fresh temporary folder, where nothing is yet."""
    return tmp_path / "store"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that depends on the test's name alone; printed, so that a failure shows it."""
    value = int(os.environ.get("CASCKPT_TEST_SEED", zlib.crc32(request.node.nodeid.encode())))
    print(f"CASCKPT_TEST_SEED={value}")
    return value


@pytest.fixture(autouse=True)
def leaves_nothing_running() -> Iterator[None]:
    """Fail a test that leaves a thread, an open file or a child process behind.

    Threads get JOIN_TIMEOUT_S to end; casckpt's own pools stay. Open files are counted again after a garbage
    collection. The helper processes of multiprocessing live as long as the interpreter by design and are not counted;
    nor are pipes, which those share.
    """
    threads, files, children = _threads(), _open_files(), _children()
    yield
    leaks = [f"thread {thread.name}" for thread in _threads() - threads if not _ends(thread)]
    if _open_files() - files:
        gc.collect()
        leaks += [f"open file {target} (descriptor {fd})" for fd, target in sorted(_open_files() - files)]
    leaks += [f"child process {pid}: {command}" for pid, command in _children().items() if pid not in children]
    assert not leaks, f"left behind: {', '.join(leaks)}"


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(POOL_THREAD_PREFIXES)}


def _ends(thread: threading.Thread) -> bool:
    thread.join(JOIN_TIMEOUT_S)
    return not thread.is_alive()


def _open_files() -> set[tuple[int, str]]:
    found = set()
    for fd in _numbers("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith(("/", "socket:")) and not NO_FILE.match(target):
            found.add((fd, target))
    return found


def _children() -> dict[int, str]:
    found = {}
    for task in _numbers("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as listing:
                pids = [int(pid) for pid in listing.read().split()]
        except OSError:  # the thread ended meanwhile, or the kernel does not list children
            continue
        found |= {pid: command for pid in pids if (command := _running(pid))}
    return found


def _running(pid: int) -> str:
    """What a child runs; empty when it has ended, or serves multiprocessing."""
    try:
        with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as cmdline:
            name, _, fields = stat.read().partition("(")[2].rpartition(") ")
            command = cmdline.read().replace("\0", " ").strip() or name
    except OSError:
        return ""
    is_helper = "resource_tracker" in command or "forkserver" in command
    return "" if fields.startswith("Z") or is_helper else command


def _numbers(folder: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder)]
    except OSError:  # not Linux
        return []
