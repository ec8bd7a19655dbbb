"""Child processes that act on a store together: each runs a snippet, and waits at a gate until all are ready."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_PRELUDE = """
import json, os, signal, sys, warnings
import numpy as np
import casckpt
from casckpt.errors import *

def say(**facts):
    print(json.dumps(facts), flush=True)

def gate():
    say(ready=True)
    sys.stdin.readline()

path, me = sys.argv[1], int(sys.argv[2])
"""
_TIMEOUT_S = 300.0


class Racer:
    """One child process; talks JSON lines on stdout and waits for lines on stdin."""

    def __init__(self, code: str, path: str, me: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + code, path, str(me)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> dict[str, Any]:
        """The next line it says."""
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, f"a child ended early: {self.process.stderr.read()}"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def release(self) -> None:
        """Let it go on from its gate."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def finish(self) -> list[dict[str, Any]]:
        """All further lines, once it has ended well."""
        out, err = self.process.communicate(timeout=_TIMEOUT_S)
        assert self.process.returncode == 0, err
        return [json.loads(line) for line in out.splitlines()]

    def kill(self) -> None:
        """End it for certain, stopped or not."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@contextmanager
def racing(codes: Sequence[str], path: str) -> Iterator[list[Racer]]:
    """Start one child per snippet and wait until all stand at their gate; none is left when the block ends."""
    racers = [Racer(code, path, me) for me, code in enumerate(codes)]
    try:
        for racer in racers:
            assert racer.hear() == {"ready": True}
        yield racers
    finally:
        for racer in racers:
            racer.kill()
