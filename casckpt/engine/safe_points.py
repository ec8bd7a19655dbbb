"""Where the loop stands: at a safe point, inside an update, or in a pause; and which thread may say so.

A safe point is a call by the thread that trains, outside of an update. In a pause the loop promises that nothing
changes, and another thread may save.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from casckpt.errors import InvalidInputError


class SafePoints:
    """What one engine knows of its loop. The thread of the first call is the one that trains."""

    def __init__(self) -> None:
        self._owner: int | None = None
        self._updating = 0
        self._pausing = threading.Lock()
        self._is_paused = False

    def check(self, what: str) -> None:
        """Refuse what is called elsewhere than at a safe point.

        Raises:
            InvalidInputError: inside an update, or by another thread.
        """
        if self._updating:
            raise InvalidInputError(
                f"{what} inside `with engine.update()`: state is half way through a change. Call it after the block, "
                "or `request_save()` here, which is kept for the next step."
            )
        thread = threading.get_ident()
        self._owner = self._owner or thread
        if thread != self._owner:
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
