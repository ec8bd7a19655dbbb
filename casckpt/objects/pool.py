"""Thread pools of the process for hashing, encoding, reading and decoding: work that releases the GIL.

Background commits have pools of their own, whose threads yield to training.

A forked child starts without it and makes its own at first use: the parent's threads do not exist there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from casckpt.limits import POOL_THREADS_MAX

T = TypeVar("T")
R = TypeVar("R")

_NICE = 10  # below the thread that started it: a tenth of a core that training wants, all of one that it does not
_IO_THREADS = 2

_lock = threading.Lock()
_pools: dict[str, ThreadPoolExecutor] = {}
_mode = threading.local()


def thread_count() -> int:
    """Cores this process may use, at most POOL_THREADS_MAX."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, POOL_THREADS_MAX))


def submit(function: Callable[..., R], *arguments: object) -> Future[R]:
    return _submit("casckpt", thread_count(), function, arguments)


@contextlib.contextmanager
def background() -> Iterator[None]:
    """What this thread does and submits meanwhile yields to the rest of the process.

    For threads that do nothing else afterwards: a priority that was given up cannot be taken back.
    """
    _be_nice()
    _mode.is_background = True
    try:
        yield
    finally:
        _mode.is_background = False


def _be_nice() -> None:
    if sys.platform.startswith("linux"):  # elsewhere a priority is the process's, not the thread's
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)


def _submit(name: str, count: int, function: Callable[..., R], arguments: tuple[object, ...]) -> Future[R]:
    is_background = getattr(_mode, "is_background", False)
    key = f"{name}-background" if is_background else name
    with _lock:
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(count, thread_name_prefix=key)  # threads as nice as who starts them
        executor = _pools[key]
    try:
        return executor.submit(function, *arguments)
    except RuntimeError:
        # The interpreter is exiting and executors take no more work, but a background commit still has to finish.
        future: Future[R] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - handed to whoever asks for the result, as an executor would
            future.set_exception(error)
        return future


def submit_io(function: Callable[..., R], *arguments: object) -> Future[R]:
    """Run work that mostly waits for the disk on threads of its own, so that it does not hold up hashing."""
    return _submit("casckpt-io", _IO_THREADS, function, arguments)


def map_ordered(function: Callable[[T], R], items: Iterable[T], *, ahead: int) -> Generator[R, None, None]:
    """Results in order, with at most `ahead` tasks under way, so that memory stays bounded.

    When a task fails or the consumer stops, tasks that did not start are cancelled and running ones awaited: nothing
    touches the caller's memory after this generator is closed. Consume it inside
    `contextlib.closing`: an exception in the consumer's own code does not close a generator by itself.
    """
    pending: deque[Future[R]] = deque()
    iterator = iter(items)
    try:
        for item in iterator:
            pending.append(submit(function, item))
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        settle(pending)


def run_all(function: Callable[[T], object], items: Sequence[T]) -> None:
    """Call `function` with every item, on all pool threads, each taking the next when it is free; no order.

    After a failure no further item is begun; the first failure is raised when all threads have stopped.
    """
    counter = itertools.count()
    failures: list[BaseException] = []

    def work() -> None:
        while not failures:
            at = next(counter)  # one bytecode-level call: no two threads get the same number
            if at >= len(items):
                return
            try:
                function(items[at])
            except BaseException as error:  # noqa: BLE001 - handed to the caller below
                failures.append(error)

    futures = [submit(work) for _ in range(min(thread_count(), len(items)))]
    try:
        for future in futures:
            future.result()
    except BaseException as error:
        failures.append(error)  # an interrupt while waiting: the threads stop at their next item
        raise
    finally:
        settle(futures)
    if failures:
        raise failures[0]


def settle(futures: Iterable[Future[R]]) -> None:
    """Cancel what has not started, wait for the rest, and ignore how it ended."""
    for future in list(futures):
        if not future.cancel():
            future.exception()


def _forget() -> None:
    global _lock
    _pools.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
