"""Who may use a handle, and when: the process that opened it, until it is closed, one writing thread at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from casckpt.errors import BusyError, InvalidInputError


class Turns:
    """The right to use one store handle."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self.timeout_s = timeout_s
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._holder = ""
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        """Closed, or inherited by a forked child."""
        return self._is_closed or os.getpid() != self._pid

    def end(self) -> None:
        """Every later use is an error."""
        self._is_closed = True

    def check(self) -> None:
        """Raise unless the handle may be used here and now.

        Raises:
            InvalidInputError: it is closed, or another process opened it.
        """
        if self._is_closed:
            raise InvalidInputError(f"store {self._path}: this handle is closed. Open it again.", path=self._path)
        if os.getpid() != self._pid:
            raise InvalidInputError(
                f"store {self._path}: this handle belongs to process {self._pid}, this is {os.getpid()}. Open "
                "the store again in the child process.",
                path=self._path,
            )

    @contextlib.contextmanager
    def take(self, what: str, *, is_patient: bool = False) -> Iterator[None]:
        """Write alone; the same thread may nest. Who `is_patient` waits for as long as it takes.

        Raises:
            BusyError: another thread has been writing for the whole timeout; `holder` says what it does.
        """
        if not self._lock.acquire(timeout=-1 if is_patient else self.timeout_s):
            raise BusyError(
                f"store {self._path}: this handle is busy with {self._holder} after {self.timeout_s} s. Use one handle "
                "per thread, or wait.",
                holder=self._holder,
            )
        before, self._holder = self._holder, f"{what} in thread {threading.current_thread().name!r}"
        try:
            yield
        finally:
            self._holder = before
            self._lock.release()
