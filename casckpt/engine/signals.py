"""The end announced by a signal: one more save at a safe point, or at a deadline, or none.

* The first SIGTERM or SIGINT asks for a save at the next safe point. When it is durable, `step` raises SystemExit.
* Where no safe point comes before the deadline, and the loop stands inside `engine.pause()` (an evaluation, say), the
  save is made there and then, and the process ends. Outside of a pause state may be half way through an update: stderr
  says so, and the safe point or a pause is waited for as long as the system lets the process live.
* Where the block ends first, so does the process: a signal is never lost.
* The second signal ends the process at once. The store is valid at every moment, so that this costs no more than what
  came after the newest save. A further SIGTERM under a supervisor does not: the manager of a job sends it to each of
  its processes, and the supervisor passes its own on; the deadline is the supervisor's.

The interpreter runs signal handlers between two instructions of the main thread, which may be inside one long call. So
a thread of its own listens, by the file descriptor that the C handler writes to. A forked worker would write to it too:
there it is taken away.
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
from dataclasses import dataclass
from typing import Any, Protocol

from casckpt.engine.beats import FOLDER
from casckpt.errors import InvalidInputError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK_S = 0.1  # how often, once the deadline is over, to look for a pause
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

    Raises:
        InvalidInputError: in another thread than the main one.
        SystemExit: at the end of the block, when a signal came and no safe point after it.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise InvalidInputError(
            f"on_signals in thread {thread.name!r}: Python tells signals to the main thread alone. Open the block "
            "there and train in it, or call `request_stop(name, number)` from a handler of your own."
        )
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = _Before({}, signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False))
    for number in SIGNALS:  # from here on each is heard by one of both handlers
        before.handlers[number] = signal.signal(number, _heard)
    _listening.append(before)
    heard: list[int] = []
    is_over = threading.Event()
    thread = threading.Thread(
        target=_listen, args=(reader, engine, deadline_s, heard, is_over), name="casckpt-signals", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        if before in _listening:  # not in a forked child: there it is undone, and the other end is the parent's
            before.put_back(signal.SIGINT, signal.SIGTERM)
            is_over.set()
            writer.send(bytes([_STOP]))
            thread.join()
        reader.close()
        writer.close()
    if heard:
        _say(f"{signal.Signals(heard[0]).name}: no safe point came after it; ending where `on_signals` ends")
        raise SystemExit(128 + heard[0])


@dataclass(eq=False)
class _Before:
    """What a guard replaced."""

    handlers: dict[signal.Signals, Any]
    wakeup_fd: int

    def put_back(self, *numbers: signal.Signals) -> None:
        _listening.remove(self)
        for number in numbers:
            signal.signal(number, self.handlers[number])
        signal.set_wakeup_fd(self.wakeup_fd)


_listening: list[_Before] = []  # guards of this process, the innermost last
_masks: list[set[signal.Signals | int]] = []  # of the thread that is forking


def _before_fork() -> None:
    """Hold signals back until the child cannot write to its parent any more."""
    _masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if _listening else ()))


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _undo_in_child() -> None:
    """Workers that are forked end by SIGTERM, and do not tell their parent of a signal of their own.

    SIGINT from a terminal goes to all of them: it stays unheard there, so that the parent's last save finds them alive.
    """
    while _listening:
        _listening[-1].put_back(signal.SIGTERM)
    _after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_undo_in_child)


def _heard(number: int, frame: Any) -> None:
    """The handler in Python: the thread has been told already."""


def _listen(
    reader: socket.socket, engine: Saves, deadline_s: float, heard: list[int], is_over: threading.Event
) -> None:
    deadline: float | None = None
    while True:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([reader], [], [], left_s)[0]:
            deadline = None  # a save that hangs must not make this thread deaf to the second signal
            threading.Thread(
                target=_at_deadline, args=(engine, heard[0], deadline_s, is_over), name="casckpt-deadline", daemon=True
            ).start()
            continue
        for number in reader.recv(64):
            if number == _STOP:
                return
            if number not in SIGNALS:
                continue  # every signal with a handler in Python is told of
            if heard and number == signal.SIGTERM and FOLDER in os.environ:
                continue
            if heard:
                _say(f"{signal.Signals(number).name} again: ending now, without another save")
                _end(number)
            else:
                heard.append(number)
                deadline = time.monotonic() + deadline_s
                name = signal.Signals(number).name
                engine.request_stop(name, number)
                _say(f"{name}: saving at the next safe point, or in {deadline_s:g} s; once more to end at once")


def _at_deadline(engine: Saves, number: int, deadline_s: float, is_over: threading.Event) -> None:
    """Save in the pause in which the loop stands, or in the next one, and end the process; until the block is left."""
    name = signal.Signals(number).name
    is_said = False
    try:
        while not engine.save_in_pause(name):
            if not is_said:
                is_said = True
                waited = f"{name}: no safe point in {deadline_s:g} s and no pause"
                _say(f"{waited}; state may be in change, so nothing was saved yet")
            if is_over.wait(_LOOK_S):
                return
    except Exception as error:  # noqa: BLE001 - whatever a provider raises: training goes on to its safe point
        _say(f"{name}: the save at the deadline failed: {type(error).__name__}: {error}")
        return
    _say(f"{name}: saved at the deadline, inside a pause")
    _end(number)


def _say(text: str) -> None:
    print(f"casckpt: {text}", file=sys.stderr, flush=True)


def _end(number: int) -> None:
    """End the process without waiting for its main thread, which may never come back."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(128 + number)
