"""Who may use a handle, and when: the process that opened it, until it is closed, one writing thread at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from casckpt.errors import BusyError, InvalidInputError


class Claim:
    """A lock that names its holder to whoever waits for it in vain.

    Args:
        path: of the store, for messages.
        lock: a lock of `threading`, which says whether the same thread may nest.
    """

    def __init__(self, path: str, timeout_s: float, lock: Any) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._lock = lock
        self._holder = ""

    @contextlib.contextmanager
    def take(self, what: str, *, is_patient: bool = False) -> Iterator[None]:
        """Be alone. Who `is_patient` waits for as long as it takes.

        Raises:
            BusyError: another thread has had it for the whole timeout; `holder` says what it does.
        """
        if not self._lock.acquire(timeout=-1 if is_patient else self._timeout_s):
            raise BusyError(
                f"store {self._path}: this handle is busy with {self._holder} after {self._timeout_s} s. Use one "
                "handle per thread, or wait.",
                holder=self._holder,
            )
        before, self._holder = self._holder, f"{what} in thread {threading.current_thread().name!r}"
        try:
            yield
        finally:
            self._holder = before
            self._lock.release()


class Turns:
    """The right to use one store handle.

    Attributes:
        staging: held while state is captured and copied aside.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self.timeout_s = timeout_s
        self._pid = os.getpid()
        self._writing = Claim(path, timeout_s, threading.RLock())
        self.staging = Claim(path, timeout_s, threading.Lock())
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

    def take(self, what: str, *, is_patient: bool = False) -> contextlib.AbstractContextManager[None]:
        """Write alone; the same thread may nest. See `Claim.take`."""
        return self._writing.take(what, is_patient=is_patient)
