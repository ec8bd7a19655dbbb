"""A small HTTP server beside a training: listens at once, serves in threads of its own, ends when it is closed."""

from __future__ import annotations

import errno
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TypeVar

from casckpt.errors import BusyError, InvalidInputError, StorageError

Server = TypeVar("Server", bound="HttpServer")
PORT_MAX = 65535
_POLL_S = 0.05  # how long closing waits for the loop at most


class HttpServer:
    """A server and its thread; a context manager.

    Args:
        host, port: where to listen; port 0 takes a free one.
        handler: answers a request.
        name: of the thread.

    Raises:
        InvalidInputError: no such port can be.
        BusyError: somebody else listens there.
        StorageError: it cannot listen there for another reason: no such address, or no right to.
    """

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler], *, name: str) -> None:
        self._server = _listen(host, port, handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name=name, daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self: Server) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _listen(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    """A server that listens, with a thread for each request."""
    if not 0 <= port <= PORT_MAX:
        raise InvalidInputError(f"port={port}: expected 0 to {PORT_MAX}; 0 takes a free one", port=port)
    try:
        server = ThreadingHTTPServer((host, port), handler)
    except OSError as error:
        what = f"{host}:{port}: cannot listen: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            raise BusyError(f"{what}. Give another port, or 0 for a free one.", port=port) from error
        raise StorageError(f"{what}. Give an address of this machine.", errno=error.errno) from error
    server.daemon_threads = True
    return server
