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
    """What one engine knows of its loop.

    The thread of the first step or save is the one that trains, until it ends; then another one may be.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._trainer: threading.Thread | None = None
        self._choosing = threading.Lock()
        self._updating = self._pausing = 0
        self._saver: threading.Thread | None = None
        self._still = threading.RLock()  # held while another thread saves in a pause

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a child that was forked from the process that trains."""
        return os.getpid() != self._pid

    def check(self, what: str, *, is_training: bool = True) -> None:
        """Refuse what is called elsewhere than at a safe point.

        Args:
            what: for messages.
            is_training: whether the caller is the thread that trains from now on, if there is none.

        Raises:
            InvalidInputError: inside an update or a save, by another thread, or in a forked child.
        """
        if self.is_elsewhere:
            raise InvalidInputError(
                f"{what} in process {os.getpid()}: this engine trains in process {self._pid}. Make another one in the "
                "child, on a store that is opened there under another run name."
            )
        thread = threading.current_thread()
        with self._choosing:
            trainer = self._trainer if self._trainer is not None and self._trainer.is_alive() else None
            if trainer is None and is_training:
                self._trainer = thread
        if trainer not in (None, thread):
            raise InvalidInputError(
                f"{what} from thread {thread.name!r}: only the thread that trains ({trainer.name!r}) knows when state "
                "is at rest. Call `request_save()`, which is kept for its next step."
            )
        if self._updating:
            raise InvalidInputError(
                f"{what} inside `with engine.update()`: state is half way through a change. Call it after the block, "
                "or `request_save()` here, which is kept for the next step."
            )
        if self._saver is thread:
            raise InvalidInputError(
                f"{what} by what is being saved: a provider says its state and nothing else. Call it from the loop, or "
                "`request_save()` here, which is kept for the next step."
            )

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """While the block is open, nothing is a safe point, not even a pause."""
        with self._still:
            self._updating += 1
        try:
            yield
        finally:
            with self._still:
                self._updating -= 1

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While the block is open, this thread reads state, and no other one does."""
        with self._still:
            self._saver = threading.current_thread()
        try:
            yield
        finally:
            with self._still:
                self._saver = None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """While the block is open, another thread may save; it is left when no save is under way in it."""
        with self._still:
            self._pausing += 1
        try:
            yield
        finally:
            with self._still:
                self._pausing -= 1

    @contextlib.contextmanager
    def in_pause(self) -> Iterator[bool]:
        """For another thread: whether the loop stands in a pause and nothing else, which is so until the block ends."""
        with self._still:
            yield self._pausing > 0 and not self._updating and self._saver is None
