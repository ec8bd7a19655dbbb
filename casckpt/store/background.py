"""Commits on a thread of their own: the caller pays for staging, the thread for everything else.

At most two saves are under way, one being written and one staged behind it; a third waits for the first
(`Store.reserve` may allow more). A failure is never silent: it is raised by the handle's `result()`, and if nobody
asked there, by the store's next call and by `close()`.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from casckpt.errors import BusyError, SaveFailedError
from casckpt.objects import pool
from casckpt.store.values import Snapshot

IN_FLIGHT_MAX = 2


class SaveHandle:
    """A commit under way.

    Attributes:
        step: the step being committed.
        stall_s: seconds that `commit_async` kept the caller.
        work_s: seconds that hashing, writing and publishing took, by the store's monotonic clock; 0 until it is done.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.stall_s = 0.0
        self.work_s = 0.0
        self._done = threading.Event()
        self._snapshot: Snapshot | None = None
        self._error: BaseException | None = None
        self._seen = threading.Event()  # somebody was told that it failed

    @classmethod
    def of(cls, snapshot: Snapshot, work_s: float) -> SaveHandle:
        """The handle of a commit that is durable already."""
        handle = cls(snapshot.step)
        handle._finish(snapshot, None, work_s)
        return handle

    def done(self) -> bool:
        """Whether the commit has ended, well or not."""
        return self._done.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended badly; looking here is no asking how it ended."""
        return self._error is not None

    @property
    def is_told(self) -> bool:
        """Whether somebody has asked how it ended: a failure is then known."""
        return self._seen.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended, without asking how.

        Raises:
            BusyError: it is still under way after `timeout` seconds.
        """
        if not self._done.wait(timeout):
            raise BusyError(
                f"the commit of step {self.step} is still under way after {timeout} s. Wait longer.", step=self.step
            )

    def result(self, timeout: float | None = None) -> Snapshot:
        """The snapshot, once it is durable.

        Raises:
            SaveFailedError: the commit failed; `__cause__` says why.
            BusyError: it is still under way after `timeout` seconds.
        """
        error = self.exception(timeout)
        if error is not None:
            raise self.failure() from error
        assert self._snapshot is not None
        return self._snapshot

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why the commit failed, or None; waits like `result`."""
        self.wait(timeout)
        self._seen.set()
        return self._error

    def outcome(self) -> Snapshot:
        """What `result` gives, or the failure itself; whoever asks here is not told of a failure, but fails with it."""
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._snapshot is not None
        return self._snapshot

    def failure(self, later: Sequence[SaveHandle] = ()) -> SaveFailedError:
        """The error to raise for a failed save; `later` ones that failed too are told with it."""
        told = [self, *later]
        for handle in told:
            handle._seen.set()
        return SaveFailedError(" ".join(map(_message, told)), step=self.step, steps=[handle.step for handle in told])

    def _finish(self, snapshot: Snapshot | None, error: BaseException | None, work_s: float) -> None:
        self._snapshot, self._error, self.work_s = snapshot, error, work_s
        self._done.set()

    def __repr__(self) -> str:
        state = "under way" if not self.done() else ("failed" if self._error else "done")
        return f"<save of step {self.step}: {state}>"


def _message(handle: SaveHandle) -> str:
    return f"The background commit of step {handle.step} failed: {handle._error} The step was not committed."


def _tell_unseen(seen: threading.Event, message: str) -> None:
    """The last chance to say it: the interpreter ends, and the store was never closed."""
    if not seen.is_set():
        print(f"casckpt: {message}", file=sys.stderr)


class Background:
    """Saves of one store handle, in order, on one thread that lives while there is work.

    Args:
        clock: monotonic seconds, for `work_s`.
        in_flight_max: how many saves may be under way.
        name: of the thread.
    """

    def __init__(
        self, clock: Callable[[], float], in_flight_max: int = IN_FLIGHT_MAX, *, name: str = "casckpt-commit"
    ) -> None:
        self._name = name
        self.in_flight_max = in_flight_max
        self._clock = clock
        self._lock = threading.Condition()
        self._queue: list[tuple[SaveHandle, Callable[[], Snapshot]]] = []
        self._handles: list[SaveHandle] = []
        self._thread: threading.Thread | None = None

    def make_room(self, timeout_s: float) -> None:
        """Wait until a save may be staged: fewer than `in_flight_max` under way."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while len(self._queue) >= self.in_flight_max:
                if not self._lock.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise BusyError(
                        f"{len(self._queue)} background commits are still under way after {timeout_s} s (steps "
                        f"{[handle.step for handle, _ in self._queue]}). Commit less often or raise lock_timeout_s.",
                        holder="this handle's background thread",
                    )

    def start(self, handle: SaveHandle, work: Callable[[], Snapshot]) -> None:
        with self._lock:
            self._queue.append((handle, work))
            self._handles.append(handle)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name)  # not daemon: exit waits
                self._thread.start()

    def _run(self) -> None:
        with pool.background():
            self._work()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                handle, work = self._queue[0]
            started = self._clock()
            try:
                snapshot = work()
                handle._finish(snapshot, None, self._clock() - started)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to whoever waits for this save
                handle._finish(None, error, self._clock() - started)
                atexit.register(_tell_unseen, handle._seen, _message(handle))  # should nobody ask before the end
            finally:
                del work
                with self._lock:
                    self._queue.pop(0)
                    self._lock.notify_all()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all saves under way."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for handle in self.under_way():
            if not handle._done.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise BusyError(f"step {handle.step} is still being committed after {timeout_s} s", step=handle.step)

    def under_way(self) -> list[SaveHandle]:
        with self._lock:
            return [handle for handle, _ in self._queue]

    def find(self, step: Any) -> SaveHandle | None:
        """The save under way of a step, if there is one."""
        return next((handle for handle in self.under_way() if handle.step == step), None)

    def last_step(self) -> int | None:
        """The step of the newest save under way; one whose result is known is not, whatever is still put away."""
        return next((handle.step for handle in reversed(self.under_way()) if not handle.done()), None)

    def forget_failures(self) -> None:
        """Take failures up to now as told."""
        with self._lock:
            for handle in self._handles:
                if handle.done():
                    handle._seen.set()

    def raise_failures(self) -> None:
        """Raise the failures that nobody has seen yet, in one error.

        Raises:
            SaveFailedError: with the first failure as `__cause__`; `steps` are all that failed.
        """
        with self._lock:
            done = [handle for handle in self._handles if handle.done()]
            self._handles = [handle for handle in self._handles if handle not in done]
        failed = [handle for handle in done if handle._error is not None and not handle._seen.is_set()]
        if failed:
            raise failed[0].failure(failed[1:]) from failed[0]._error
