"""A supervisor is killed, and what it kept alive ends: saved where it listens, by force where it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from casckpt.recovery import Settings, Supervisor

LISTENING = 'trap "echo saved > end; exit 0" TERM; while :; do sleep 0.05; done'
DEAF = 'trap "" TERM; sleep 600 & while :; do sleep 0.05; done'
SUPERVISOR = """
import sys
from casckpt.recovery import Settings, Supervisor

def probe():  # asked once the child runs and is guarded
    print("watched", flush=True)
    return True

settings = Settings(poll_s=0.01, probe_period_s=0.0, term_deadline_s=0.3)
Supervisor(["sh", "-c", sys.argv[1]], settings=settings, probe=probe).run()
"""


def run_and_kill(script: str, folder: Path) -> str:
    """Kill a supervisor while its child runs; what was said until child, workers and guard are gone too."""
    words = [sys.executable, "-c", SUPERVISOR, f"cd {folder}; {script}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "watched\n"
        os.kill(process.pid, signal.SIGKILL)
        process.stdout.read()  # both ends are inherited: they come when the last of them has ended
        return process.stderr.read()


@pytest.mark.full
def test_child_of_a_killed_supervisor_is_told_to_save_and_end(tmp_path: Path) -> None:
    said = run_and_kill(LISTENING, tmp_path)
    assert "is gone: it gets SIGTERM" in said
    assert "Start the same command again" in said
    assert (tmp_path / "end").read_text() == "saved\n"


@pytest.mark.full
def test_child_that_does_not_listen_and_its_workers_are_killed_at_the_deadline(tmp_path: Path) -> None:
    assert "is gone: it gets SIGTERM" in run_and_kill(DEAF, tmp_path)


def test_guard_of_a_supervisor_that_ends_in_order_ends_nobody(tmp_path: Path) -> None:
    """A command that ended well may leave a process behind on purpose."""
    os.mkfifo(tmp_path / "ask")
    os.mkfifo(tmp_path / "answer")
    script = f"(read line < {tmp_path}/ask; echo $line > {tmp_path}/answer) &"
    assert Supervisor(["sh", "-c", script], settings=Settings(poll_s=0.01, term_deadline_s=0.0)).run() == 0
    (tmp_path / "ask").write_text("still here\n")  # waits for who reads, and so does the other
    assert (tmp_path / "answer").read_text() == "still here\n"
