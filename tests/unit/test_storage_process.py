"""Whose a temporary file or lease is: only a process that is certainly gone is called dead."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from casckpt.storage import process
from casckpt.storage.process import System, owner_of

OTHER = "0" * 8


def own_name() -> str:
    return System().temporary_path("").rpartition("/")[2]


def parts() -> tuple[str, str, str, str]:
    """Machine, boot and namespace of this process's names, and the rest of one."""
    where, _, rest = own_name().partition("-")
    return where[:8], where[8:16], where[16:], rest


def test_own_names_are_of_a_running_process_and_those_of_one_that_ended_of_a_dead_one() -> None:
    assert owner_of(own_name()) == (os.getpid(), "running")
    program = "from casckpt.storage.process import System; print(System().lease_path(''))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    name = ended.stdout.strip().rpartition("/")[2]
    pid = int(name.split("-")[1])
    assert owner_of(name) == (pid, "dead")


def test_process_whose_id_was_used_again_is_dead() -> None:
    machine, boot, namespace, rest = parts()
    pid, ticks, nonce = rest.split("-")
    assert owner_of(f"{machine}{boot}{namespace}-{pid}-{int(ticks) - 1}-{nonce}") == (os.getpid(), "dead")


def test_process_of_an_earlier_boot_is_dead_and_of_another_machine_or_container_unknown() -> None:
    machine, boot, namespace, rest = parts()
    assert owner_of(f"{machine}{OTHER}{namespace}-{rest}")[1] == "dead"
    assert owner_of(f"{OTHER}{boot}{namespace}-{rest}")[1] == "unknown"
    assert owner_of(f"{OTHER}{OTHER}{OTHER}-{rest}")[1] == "unknown"
    assert owner_of(f"{machine}{boot}{OTHER}-{rest}")[1] == "unknown"
    for name in ("", "x", "a-b-c-d", f"{boot}-{rest}", f"{machine}{boot}{namespace}-{rest}"[:20]):
        assert owner_of(name)[1] == "unknown"


def test_process_that_proc_hides_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with hidepid=2 of one of another user."""
    name = own_name()
    monkeypatch.setattr(process, "start_ticks", lambda pid: 0)
    assert owner_of(name)[1] == "unknown"
    machine, boot, namespace, rest = parts()
    assert owner_of(f"{machine}{boot}{namespace}-999999999-7-{rest[-16:]}")[1] == "dead"


def test_platform_that_does_not_tell_calls_nobody_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, boot, namespace, rest = parts()
    assert owner_of(f"{machine}{boot}{namespace}-{os.getpid()}-0-{rest[-16:]}")[1] == "unknown"
    monkeypatch.setattr(process, "boot_id", lambda: "")
    assert owner_of(own_name())[1] == "unknown"


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="makes a namespace of processes")
def test_process_outside_a_container_is_not_dead_to_one_inside() -> None:
    """Inside, its id means nobody or somebody else, under the same boot."""
    program = f"from casckpt.storage.process import owner_of; print(owner_of({own_name()!r})[1])"
    argv = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    inside = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "unshare" in inside.stderr:
        pytest.skip(f"not permitted here: {inside.stderr.strip()}")
    assert inside.stdout.strip() == "unknown", inside.stderr
