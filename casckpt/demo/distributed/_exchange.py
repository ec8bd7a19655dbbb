"""The learner's socket: items out, samples in.

One thread per connection answers an actor's messages. An item is handed to one actor at a time; it is handed out again
when that actor's connection ends, or when it stopped beating. A sample is taken when the gate admits its version and
its item is still wanted; whatever comes late, twice, or from a line that was left is refused with the reason. Nothing
here decides what to do with a sample: `gather` returns one per item, in the order of the items.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from types import TracebackType

import msgspec

from casckpt.demo.distributed._messages import (
    FRAME_SIZE_MAX,
    Ask,
    Give,
    Rows,
    Task,
    Verdict,
    Wait,
    decode_request,
    encode,
    rows_of,
)
from casckpt.errors import InvalidInputError
from casckpt.recovery import SampleGate, Version

_LOOK_S = 0.1
_END_S = 2.0  # for a connection to end; one that never answered its challenge does not, and is left


class Exchange:
    """Listens on loopback. A context manager; serves in threads of its own.

    Args:
        gate: admits samples; asked under this object's lock.
        key: what actors must know.
        silent: names of the actors that do not beat any more; their items are handed out again.
    """

    def __init__(self, gate: SampleGate, key: str, *, silent: Callable[[], set[str]] = set) -> None:
        self._gate, self._key, self._silent = gate, key.encode(), silent
        self._condition = threading.Condition()
        self._weights = b""
        self._todo: deque[int] = deque()
        self._out: dict[int, tuple[str, int]] = {}  # item → who plays it, over which connection
        self._done: dict[int, tuple[Version, Rows]] = {}
        self._is_closing = threading.Event()
        self._listener = Listener(("127.0.0.1", 0), backlog=16)  # each connection is challenged in its own thread
        self._threads = [threading.Thread(target=self._accept, name="casckpt-exchange", daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._listener.address
        return str(host), int(port)

    def gather(
        self, items: Sequence[int], weights: bytes, *, waiting: Callable[[], None] = lambda: None
    ) -> list[tuple[Version, Rows]]:
        """Have these items played with these weights; blocks until all are.

        Args:
            waiting: called now and then meanwhile.
        """
        with self._condition:
            self._weights, self._todo = weights, deque(items)
            self._out, self._done = {}, {}
            self._condition.notify_all()
            while len(self._done) < len(items):
                self._condition.wait(_LOOK_S)
                self._take_back()
                waiting()
            done, self._done = self._done, {}
            return [done[item] for item in items]

    def advance(self, step: int) -> None:
        """The learner has come to a later step."""
        with self._condition:
            self._gate.advance(step)

    def close(self) -> None:
        """Stop listening; connections end."""
        self._is_closing.set()
        with contextlib.suppress(OSError):
            socket.create_connection(self.address, timeout=1).close()  # wakes the thread that accepts
        for thread in self._threads:
            thread.join(_END_S)
        self._listener.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        for number in itertools.count():
            connection = self._listener.accept()
            if self._is_closing.is_set():
                connection.close()
                return
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(
                target=self._serve, args=(connection, number), name="casckpt-exchange-actor", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: Connection, number: int) -> None:
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            while not self._is_closing.is_set():
                if connection.poll(_LOOK_S):
                    message = decode_request(connection.recv_bytes(FRAME_SIZE_MAX))
                    connection.send_bytes(encode(self._answer(message, number)))
        except (OSError, EOFError, AuthenticationError, msgspec.DecodeError):
            pass  # it is gone, or it is no actor of this training: either way its items go to others
        finally:
            connection.close()
            with self._condition:
                self._give_back({item for item, (_, through) in self._out.items() if through == number})

    def _answer(self, message: Ask | Give, number: int) -> Task | Wait | Verdict:
        with self._condition:
            if isinstance(message, Give):
                return Verdict(self._take(message))
            if not self._todo:
                self._condition.wait(_LOOK_S)
            if not self._todo:
                return Wait()
            item = self._todo.popleft()
            self._out[item] = message.name, number
            return Task(self._gate.version, item, self._weights)

    def _take(self, sample: Give) -> str:
        """Why a sample is refused; empty when it is taken."""
        reason = self._gate.admit(Version(*sample.version))
        if reason:
            return reason
        if sample.item in self._done or not (sample.item in self._out or sample.item in self._todo):
            return f"item {sample.item} is settled, or not of this update"
        try:
            self._done[sample.item] = Version(*sample.version), rows_of(sample)
        except InvalidInputError as error:
            return error.message
        self._out.pop(sample.item, None)
        if sample.item in self._todo:  # it was taken back, and its first actor came after all
            self._todo.remove(sample.item)
        self._condition.notify_all()
        return ""

    def _take_back(self) -> None:
        names = self._silent() if self._out else set()
        self._give_back({item for item, (name, _) in self._out.items() if name in names})

    def _give_back(self, items: set[int]) -> None:
        for item in sorted(items):
            del self._out[item]
            self._todo.append(item)
        if items:
            self._condition.notify_all()
