"""The index between real processes: stopped, killed, forked, spawned, racing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from casckpt.errors import BusyError
from casckpt.ids import StoreId
from casckpt.index.lifecycle import IndexHome
from casckpt.index.lmdb_kv import LmdbKv
from casckpt.index.lock import WriteLock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork")

PRELUDE = """
import os, signal, sys, threading
from casckpt.errors import BusyError
from casckpt.ids import StoreId
from casckpt.index.lifecycle import IndexHome
from casckpt.index.lmdb_kv import LmdbKv
from casckpt.index.lock import WriteLock
path = sys.argv[1]
def say(*words): print(*words, flush=True)
def wait(): return sys.stdin.readline()
def home(): return IndexHome(path, StoreId(bytes(16)), ("a", "b"))
def add(kv, table="a"):
    with kv.write() as txn: txn.put(table, b"n", b"%d" % (int(txn.get(table, b"n") or 0) + 1))
def number(kv, table="a"):
    with kv.read() as txn: return int(txn.get(table, b"n") or 0)
def exit_of(pid): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

Start = Callable[[str, Path], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that runs a piece of Python; all are ended with the test."""
    running: list[subprocess.Popen[str]] = []

    def start_one(script: str, path: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        running.append(process)
        return process

    yield start_one
    for process in running:
        process.kill()
        with process:  # close its pipes, wait
            pass


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")


def finished(process: subprocess.Popen[str]) -> list[str]:
    """What a process still says when it is let go; it must end well."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it may have ended already
        process.stdin.close()  # every wait() returns
    words = process.stdout.read().split()
    assert process.wait() == 0
    return words


def build(path: Path) -> None:
    home = IndexHome(str(path), StoreId(bytes(16)), ("a", "b"))
    kv = home.rebuild(lambda kv: None)
    assert kv is not None, home.reason
    kv.close()


def number(kv: LmdbKv, table: str = "a") -> int:
    with kv.read() as txn:
        return int(txn.get(table, b"n") or 0)


def test_a_killed_holders_lock_is_free_at_once(tmp_path: Path, start: Start) -> None:
    holder = start("with WriteLock(path).hold(): say('held'); wait()", tmp_path / "lock")
    assert heard(holder) == "held"
    lock = WriteLock(str(tmp_path / "lock"))
    with pytest.raises(BusyError) as caught, lock.hold(0):
        pass
    assert caught.value.holder.pid == holder.pid
    holder.kill()
    holder.wait()
    with lock.hold(0):
        pass


def test_a_forked_child_does_not_keep_its_dead_parents_lock(tmp_path: Path, start: Start) -> None:
    parent = start(
        "with WriteLock(path).hold():\n    if os.fork() == 0: say('child'); wait(); os._exit(0)\n    signal.pause()\n",
        tmp_path / "lock",
    )
    assert heard(parent) == "child"
    parent.kill()
    parent.wait()
    with WriteLock(str(tmp_path / "lock")).hold(0):
        pass


def test_a_forked_child_leaves_its_parents_lock_to_the_parent(tmp_path: Path, start: Start) -> None:
    parent = start(
        "lock = WriteLock(path)\n"
        "with lock.hold():\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            with lock.hold(0): say('taken')\n"
        "        except BusyError as busy: say(busy.holder.pid == os.getppid())\n"
        "    if pid == 0: os._exit(0)\n"
        "    exit_of(pid); say('held'); wait()\n",
        tmp_path / "lock",
    )
    assert [heard(parent), heard(parent)] == ["True", "held"]
    with pytest.raises(BusyError), WriteLock(str(tmp_path / "lock")).hold(0):
        pass
    assert finished(parent) == []
    with WriteLock(str(tmp_path / "lock")).hold(0):
        pass


def test_a_stopped_writer_costs_others_a_named_error_and_goes_on_unharmed(tmp_path: Path, start: Start) -> None:
    build(tmp_path)
    writer = start(
        "kv = home().open()\n"
        "with kv.write() as txn:\n"
        "    txn.put('a', b'n', b'41'); say('writing'); os.kill(os.getpid(), signal.SIGSTOP)\n"
        "kv.close()\n",
        tmp_path,
    )
    assert heard(writer) == "writing"
    os.waitpid(writer.pid, os.WUNTRACED)
    home = IndexHome(str(tmp_path), StoreId(bytes(16)), ("a", "b"))
    kv = home.open()
    assert kv is not None, home.reason
    assert number(kv) == 0  # opening and reading need no lock
    with pytest.raises(BusyError, match=f"process {writer.pid} ") as caught, kv.write(timeout_s=0.05):
        pass
    assert (caught.value.holder.pid, caught.value.timeout_s) == (writer.pid, 0.05)
    os.kill(writer.pid, signal.SIGCONT)
    assert writer.wait(200) == 0
    with kv.write() as txn:
        assert txn.get("a", b"n") == b"41"
        txn.put("b", b"n", b"1")
    kv.close()
    again = home.open()
    assert again is not None, home.reason
    assert (number(again, "a"), number(again, "b")) == (41, 1)
    again.close()


@pytest.mark.full
def test_a_writer_killed_again_and_again_loses_nothing_it_finished(tmp_path: Path, start: Start) -> None:
    build(tmp_path)
    acknowledged = 0
    for _ in range(5):
        writer = start("kv = home().open()\nwhile True: add(kv); say(number(kv))\n", tmp_path)
        for _ in range(20):
            acknowledged = int(heard(writer))
        writer.kill()
        assert writer.stdout is not None
        rest = writer.stdout.read().split()
        acknowledged = int(rest[-1]) if rest else acknowledged
    home = IndexHome(str(tmp_path), StoreId(bytes(16)), ("a", "b"))
    kv = home.open()
    assert kv is not None, home.reason
    assert number(kv) in (acknowledged, acknowledged + 1)  # the last one may have been killed before it could say so
    assert acknowledged >= 100
    kv.close()


@pytest.mark.full
def test_increments_from_four_processes_are_all_counted(tmp_path: Path, start: Start) -> None:
    build(tmp_path)
    script = "kv = home().open(); say('ready'); wait()\nfor _ in range(100): add(kv)\nkv.close()\n"
    processes = [start(script, tmp_path) for _ in range(4)]
    assert [heard(process) for process in processes] == ["ready"] * 4
    for process in processes:
        tell(process)
    for process in processes:
        assert finished(process) == []
    kv = IndexHome(str(tmp_path), StoreId(bytes(16)), ("a", "b")).open()
    assert kv is not None
    assert number(kv) == 400
    kv.close()


def test_two_processes_that_rebuild_at_once_build_once_and_share_it(tmp_path: Path, start: Start) -> None:
    script = (
        "h = home(); h.open(); say('ready'); wait()\n"
        "kv = h.rebuild(lambda kv: (say('fills'), add(kv)))\n"
        "say(number(kv), h.generation); wait(); kv.close()\n"
    )
    processes = [start(script, tmp_path) for _ in range(3)]
    assert [heard(process) for process in processes] == ["ready"] * 3
    for process in processes:
        tell(process)
    words = [word for process in processes for word in finished(process)]
    assert sorted(words) == sorted(["fills"] + ["1", "1"] * 3)


FORKED = """
kv = home().open(); add(kv)
{before}
pid = os.fork()
if pid == 0:
    try:
        add(kv); assert number(kv) == 2, number(kv)
        kv.close()
    except BaseException as error:
        say(repr(error)); os._exit(1)
    os._exit(0)
say(exit_of(pid)); add(kv); say(number(kv)); kv.close()
"""


def test_parent_and_forked_child_both_go_on_with_the_same_kv(tmp_path: Path, start: Start) -> None:
    build(tmp_path)
    assert finished(start(FORKED.format(before=""), tmp_path)) == ["0", "3"]
    assert finished(start("kv = home().open(); say(number(kv))", tmp_path)) == ["3"]


def test_a_child_forked_inside_a_read_leaves_the_parents_reader_slot_alone(tmp_path: Path, start: Start) -> None:
    build(tmp_path)
    parent = start(
        "kv = home().open(); add(kv); parent = os.getpid()\n"
        "with kv.read() as txn:\n"
        "    slots = kv._environment.handle.readers(); pid = os.fork()\n"
        "    if pid:\n"
        "        say(exit_of(pid), kv._environment.handle.readers() == slots, number(kv))\n"
        "    else:\n"
        "        try:\n"
        "            with kv.read(): say('read')\n"
        "        except BusyError as busy: say('forked' in str(busy))\n"
        "        kv.close()\n"
        "if os.getpid() != parent: os._exit(0)\n"
        "add(kv); say(number(kv)); kv.close()\n",
        tmp_path,
    )
    assert finished(parent) == ["True", "0", "True", "1", "2"]


def test_a_child_forked_inside_a_write_neither_commits_nor_aborts_it(tmp_path: Path, start: Start) -> None:
    build(tmp_path)
    parent = start(
        "kv = home().open(); parent = os.getpid()\n"
        "try:\n"
        "    with kv.write() as txn:\n"
        "        txn.put('a', b'n', b'7'); pid = os.fork()\n"
        "        if pid: say(exit_of(pid))\n"
        "except BusyError as busy:\n"
        "    say('child', 'forked' in str(busy)); os._exit(os.getpid() == parent)\n"
        "say(number(kv)); kv.close()\n",
        tmp_path,
    )
    assert finished(parent) == ["child", "True", "0", "7"]


def test_forks_beside_eight_busy_threads_end_and_lose_nothing(tmp_path: Path, start: Start) -> None:
    build(tmp_path)
    parent = start(
        "import casckpt.index.lmdb_kv; casckpt.index.lmdb_kv._FORK_WAIT_S = 200\n"
        "kv = home().open()\n"
        "def work():\n"
        "    for _ in range(25): add(kv); number(kv)\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "for t in threads: t.start()\n"
        "codes = []\n"
        "for _ in range(10):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: number(kv); add(kv, 'b'); os._exit(0)\n"
        "    codes.append(exit_of(pid))\n"
        "for t in threads: t.join()\n"
        "say(number(kv), codes.count(0), number(kv, 'b')); kv.close()\n",
        tmp_path,
    )
    assert finished(parent) == ["200", "10", "10"]


@pytest.mark.full
def test_a_spawned_child_opens_the_same_index(tmp_path: Path, start: Start) -> None:
    build(tmp_path / "store")
    script = tmp_path / "spawning.py"
    script.write_text(
        PRELUDE + "import multiprocessing\n"
        "def child():\n"
        "    kv = home().open(); add(kv); kv.close()\n"
        "if __name__ == '__main__':\n"
        "    kv = home().open(); add(kv)\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start(); process.join(); say(process.exitcode, number(kv)); kv.close()\n"
    )
    answer = subprocess.check_output([sys.executable, str(script), str(tmp_path / "store")], text=True, timeout=180)
    assert answer.split() == ["0", "2"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_programs_started_by_the_process_inherit_no_descriptor_of_the_index(tmp_path: Path, start: Start) -> None:
    build(tmp_path)
    parent = start(
        "import subprocess\n"
        "kv = home().open()\n"
        "with kv.write() as txn:\n"
        "    listing = subprocess.check_output(['ls', '-l', '/proc/self/fd'], close_fds=False, text=True)\n"
        "    mine = [os.path.realpath(f'/proc/self/fd/{each}') for each in os.listdir('/proc/self/fd')]\n"
        "say(listing.count(path), sum(path in each for each in mine) >= 4); kv.close()\n",
        tmp_path,
    )
    assert finished(parent) == ["0", "True"]


def test_a_process_with_little_address_space_uses_a_smaller_map(tmp_path: Path, start: Start) -> None:
    build(tmp_path)
    limited = start(
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
        "kv = home().open(); add(kv)\n"
        "say(number(kv), kv._environment.handle.info()['map_size'] < 6 << 30); kv.close()\n",
        tmp_path,
    )
    assert finished(limited) == ["1", "True"]
