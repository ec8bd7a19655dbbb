"""The runner's side of the worker processes: starting them, asking them, and finding out why one failed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S = 1800.0
END_TIMEOUT_S = 30.0
SOURCES = Path(__file__).parents[2]  # from where `-m benchmarks.peers._worker` is found


class WorkerError(Exception):
    """A worker failed, or gave no answer in time; the message is the end of what it complained about."""


class Child:
    """A process that answers lines of JSON; started by the first question."""

    def __init__(self, arguments: list[str], complaints: str) -> None:
        self._command = [sys.executable, "-m", "benchmarks.peers._worker", *arguments]
        self._complaints = complaints
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """One question, one answer.

        Raises:
            WorkerError: It failed.
        """
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process is gone; what it complained about is found below
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        line = self._line(self._process)
        if not line:
            status = self.stop()
            raise WorkerError(last_line(self._complaints) or f"ended with status {status} and said nothing")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> int:
        """End the process, and give its exit status; 0 where none ran."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):  # the process is gone, and with it who would have read the rest
                stream.close()
        try:
            return process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # a peer's own threads may keep its process alive
            _kill(process)
            return process.wait()

    def _start(self) -> subprocess.Popen[str]:
        with open(self._complaints, "wb") as complaints:
            return subprocess.Popen(
                self._command,
                cwd=SOURCES,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                start_new_session=True,  # so that what it started dies with it when it is killed
            )

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        timer = threading.Timer(ANSWER_TIMEOUT_S, _kill, [process])
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        timer.join()
        return line


class Worker:
    """The committing process of one peer, and the files that belong to the peer."""

    def __init__(self, name: str, *, corpora: str, corpus: str, work: str) -> None:
        self._base = os.path.join(os.path.abspath(work), f"{corpus}-{name}")
        folder, scratch = os.path.join(self._base, "store"), os.path.join(self._base, "scratch")
        os.makedirs(folder)
        os.makedirs(scratch)
        self.place = {"peer": name, "folder": folder, "scratch": scratch}
        self.complaints = os.path.join(self._base, "stderr")
        series = [os.path.abspath(corpora), corpus]
        self._child = Child(["commit", *series, json.dumps(self.place)], self.complaints)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """One command.

        Raises:
            WorkerError: It failed.
        """
        return self._child.ask({"do": do, **arguments})

    def stop(self) -> None:
        """End the process."""
        self._child.stop()

    def remove(self) -> None:
        """End the process, and remove the peer's files."""
        self.stop()
        shutil.rmtree(self._base)


class Restorer:
    """Restores of any peer, each in a process of its own, forked from one that imported nothing but torch and numpy."""

    def __init__(self, *, corpora: str, corpus: str, work: str) -> None:
        self._base = os.path.join(os.path.abspath(work), f"{corpus}-restores")
        os.makedirs(self._base)
        series = [os.path.abspath(corpora), corpus]
        self._child = Child(["restore", *series], os.path.join(self._base, "stderr"))

    def restore(self, worker: Worker, index: int) -> dict[str, Any]:
        """Restore one commit of the peer that `worker` committed with.

        Raises:
            WorkerError: It failed.
        """
        question = {"place": worker.place, "index": index, "complaints": worker.complaints}
        answer = self._child.ask(question)
        if "status" in answer:
            raise WorkerError(last_line(worker.complaints) or f"ended with status {answer['status']} and said nothing")
        return answer

    def remove(self) -> None:
        """End the process."""
        self._child.stop()
        shutil.rmtree(self._base)


def last_line(path: str) -> str:
    """The last line of a text file that says anything; empty where none does."""
    if not os.path.exists(path):
        return ""
    with open(path, errors="replace") as lines:
        return ([text.strip() for text in lines if text.strip()] or [""])[-1]


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):  # it ended by itself meanwhile
        os.killpg(process.pid, signal.SIGKILL)
