"""Where the loop stands: at a safe point, inside an update, or in a pause; and which thread of what process says so.

A safe point is a call by the thread that trains, outside of an update. In a pause the loop promises that nothing
changes, and another thread may save.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from casckpt.errors import InvalidInputError


class SafePoints:
    """What one engine knows of its loop. The thread of the first call is the one that trains."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._owner: dict[str, int] = {}  # the thread, once there is one: `setdefault` decides between two at once
        self._updating = 0
        self._pausing = threading.Lock()
        self._is_paused = False

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a child that was forked from the process that trains."""
        return os.getpid() != self._pid

    def check(self, what: str) -> None:
        """Refuse what is called elsewhere than at a safe point.

        Raises:
            InvalidInputError: inside an update, by another thread, or in a forked child.
        """
        if self.is_elsewhere:
            raise InvalidInputError(
                f"{what} in process {os.getpid()}: this engine trains in process {self._pid}. Make another one in the "
                "child, on a store that is opened there under another run name."
            )
        if self._updating:
            raise InvalidInputError(
                f"{what} inside `with engine.update()`: state is half way through a change. Call it after the block, "
                "or `request_save()` here, which is kept for the next step."
            )
        thread = threading.get_ident()
        if thread != self._owner.setdefault("thread", thread):
            raise InvalidInputError(
                f"{what} from thread {threading.current_thread().name!r}: only the thread that trains knows when state "
                "is at rest. Call `request_save()`, which is kept for its next step."
            )

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """While the block is open, nothing is a safe point."""
        self._updating += 1
        try:
            yield
        finally:
            self._updating -= 1

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """While the block is open, another thread may save; it is left when no save is under way in it."""
        self._is_paused = True
        try:
            yield
        finally:
            with self._pausing:
                self._is_paused = False

    @contextlib.contextmanager
    def in_pause(self) -> Iterator[bool]:
        """For another thread: whether the loop stands in a pause, which is not left before this block is."""
        with self._pausing:
            yield self._is_paused
