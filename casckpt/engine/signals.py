"""The end announced by a signal: one more save at a safe point, or at a deadline, or none.

* The first SIGTERM or SIGINT asks for a save at the next safe point. When it is durable, `step` raises SystemExit.
* Where no safe point comes before the deadline, and the loop stands inside `engine.pause()` (an evaluation, say), the
  save is made there and then, and the process ends. Outside of a pause state may be half way through an update: stderr
  says so, and the safe point is waited for as long as the system lets the process live.
* The second signal ends the process at once. The store is valid at every moment, so that this costs no more than what
  came after the newest save.

The interpreter runs signal handlers between two instructions of the main thread, which may be inside one long call. So
a thread of its own listens, by the file descriptor that the C handler writes to.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from casckpt.errors import CasckptError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP = 0  # written by the guard itself; no signal has this number


class Saves(Protocol):
    """What a guard needs of an engine."""

    def request_stop(self, name: str, number: int) -> None:
        """Save everything at the next safe point, and then end."""

    def save_in_pause(self, name: str) -> bool:
        """Save everything now, if the loop stands still; whether it did."""


@contextlib.contextmanager
def listening(engine: Saves, deadline_s: float) -> Iterator[None]:
    """Listen for the end until the block is left; only in the main thread.

    Args:
        engine: what is saved.
        deadline_s: seconds from the first signal to a save that waits for no safe point. Leave time for the save.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    old = {number: signal.signal(number, _heard) for number in SIGNALS}
    old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(reader, engine, deadline_s), name="casckpt-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old.items():
            signal.signal(number, handler)
        writer.send(bytes([_STOP]))
        thread.join()
        reader.close()
        writer.close()


def _heard(number: int, frame: Any) -> None:
    """The handler in Python: the thread has been told already."""


def _listen(reader: socket.socket, engine: Saves, deadline_s: float) -> None:
    first = 0
    deadline: float | None = None
    while True:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([reader], [], [], left_s)[0]:
            deadline = None
            _at_deadline(engine, first, deadline_s)
            continue
        for number in reader.recv(64):
            if number == _STOP:
                return
            if first:
                _say(f"{signal.Signals(number).name} again: ending now, without another save")
                _end(number)
            if number in SIGNALS:
                first, deadline = number, time.monotonic() + deadline_s
                name = signal.Signals(number).name
                engine.request_stop(name, number)
                _say(f"{name}: saving at the next safe point, or in {deadline_s:g} s; once more to end at once")


def _at_deadline(engine: Saves, number: int, deadline_s: float) -> None:
    name = signal.Signals(number).name
    try:
        is_saved = engine.save_in_pause(name)
    except (CasckptError, OSError) as error:
        _say(f"{name}: the save at the deadline failed: {error}")
        return
    if is_saved:
        _say(f"{name}: saved at the deadline, inside a pause")
        _end(number)
    _say(f"{name}: no safe point in {deadline_s:g} s and no pause; state may be in change, so nothing was saved yet")


def _say(text: str) -> None:
    print(f"casckpt: {text}", file=sys.stderr, flush=True)


def _end(number: int) -> None:
    """End the process without waiting for its main thread, which may never come back."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(128 + number)
