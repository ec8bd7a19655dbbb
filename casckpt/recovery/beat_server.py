"""Heartbeats and the learner's version over HTTP, for hosts that share no folder.

One small server beside the learner. Whoever knows the token may `POST /beat` (a `Beat` as JSON) and gets the learner's
version as the answer; `GET /pulses` lists everybody. The answer to a beat is how an actor learns that the learner was
recovered, and stops sending what it made for the generation before.

The token goes in a header and is compared in constant time. There is no encryption: put the port where only the
training can reach it.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from operator import index

import msgspec

from casckpt.arguments import FUNCTION, NUMBER, TEXT, WHOLE, checked, maybe, within
from casckpt.engine.beats import Beat, Liveness, Pulse, said
from casckpt.errors import InvalidInputError, StorageError
from casckpt.limits import BEAT_TIMEOUT_S
from casckpt.recovery.http_server import PORT_MAX, HttpServer
from casckpt.recovery.samples import Version
from casckpt.storage.process import System

TOKEN_HEADER = "X-Casckpt-Token"
TOKEN_LENGTH_MIN = 16
_BODY_SIZE_MAX = 4096
_IDLE_TIMEOUT_S = 10.0


class BeatServer(HttpServer):
    """Takes beats in and says which version the learner has. A context manager; serves in threads of its own.

    Attributes:
        is_closed: from `close` on; connections that clients keep are refused then, as new ones are.

    Args:
        version: called for each beat; gives the learner's version now.
        token: what clients must know; at least 16 characters.
        host, port: where to listen; port 0 takes a free one.

    Raises:
        InvalidInputError: the token is too short, or cannot stand in a header; or no such port can be.
        BusyError: somebody else listens there.
        StorageError: it cannot listen there for another reason.
    """

    @checked(version=FUNCTION, token=TEXT, host=TEXT, port=WHOLE, timeout_s=NUMBER, system=maybe(System))
    def __init__(
        self,
        version: Callable[[], Version],
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = BEAT_TIMEOUT_S,
        system: System | None = None,
    ) -> None:
        self._liveness = Liveness(timeout_s=timeout_s, system=system)
        self._lock = threading.Lock()
        self._version = version
        self._token = _checked(token).encode()
        self.is_closed = False
        super().__init__(host, port, _handler(self), name="casckpt-beats")

    def pulses(self) -> dict[str, Pulse]:
        """Everybody who ever sent a beat, by name."""
        with self._lock:
            return self._liveness.pulses()

    def take(self, token: str, beat: Beat) -> Version | None:
        """One beat; None for a wrong token."""
        if not self.is_known(token):
            return None
        with self._lock:
            self._liveness.see(beat.name, beat)
        return self._version()

    def is_known(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token)

    def close(self) -> None:
        """Stop listening. Whoever is being answered gets the answer."""
        self.is_closed = True
        super().close()


def _handler(server: BeatServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _IDLE_TIMEOUT_S

        def do_POST(self) -> None:
            try:
                size = int(self.headers.get("Content-Length", ""))
            except ValueError:
                size = -1
            if self.path != "/beat" or not 0 < size <= _BODY_SIZE_MAX:
                return self._answer(404 if self.path != "/beat" else 413, b"{}", is_last=True)
            if server.is_closed:
                return self._answer(503, b"{}", is_last=True)
            try:
                beat = msgspec.json.decode(self.rfile.read(size), type=Beat)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return self._answer(400, b"{}")
            version = server.take(self.headers.get(TOKEN_HEADER, ""), beat)
            if version is None:
                return self._answer(403, b"{}")
            self._answer(200, msgspec.json.encode({name: index(value) for name, value in version._asdict().items()}))

        def do_GET(self) -> None:
            if not server.is_known(self.headers.get(TOKEN_HEADER, "")):
                return self._answer(403, b"{}")
            if self.path != "/pulses":
                return self._answer(404, b"{}")
            self._answer(200, msgspec.json.encode(server.pulses()))

        def _answer(self, code: int, body: bytes, *, is_last: bool = False) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if is_last:  # a body that was not read must not be taken for the next request
                self.send_header("Connection", "close")
                self.close_connection = True
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Beats are not news."""

    return Handler


def _checked(token: str) -> str:
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise InvalidInputError("token: expected printable ASCII without blanks. Was it read with the end of its line?")
    if len(token) < TOKEN_LENGTH_MIN:
        raise InvalidInputError(
            f"token: expected at least {TOKEN_LENGTH_MIN} characters, found {len(token)}. Use secrets.token_hex()."
        )
    return token


class BeatClient:
    """An actor's side: sends beats, and learns the version. One connection, made again when it breaks.

    Raises:
        InvalidInputError: the token cannot stand in a header, or is shorter than any that a server takes; there is no
            such port.
    """

    @checked(host=TEXT, port=within(WHOLE, 1, PORT_MAX), name=TEXT, token=TEXT, timeout_s=NUMBER)
    def __init__(self, host: str, port: int, *, name: str, token: str, timeout_s: float = 5.0) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        self._name, self._token = name, _checked(token)
        self._counter = 0

    @checked(step=WHOLE, generation=WHOLE, phase=TEXT)
    def beat(self, step: int = -1, *, generation: int = 0, phase: str = "") -> Version:
        """Send a beat; the learner's version is the answer.

        Raises:
            StorageError: nobody answered, or the token is wrong. The next call tries again.
        """
        self._counter += 1
        body = msgspec.json.encode(said(self._name, self._counter, step, generation, phase))
        try:
            self._connection.request("POST", "/beat", body, {TOKEN_HEADER: self._token})
            response = self._connection.getresponse()
            content = response.read(_BODY_SIZE_MAX)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise StorageError(f"the learner did not answer: {error}. Hold samples and beat again.") from error
        if response.status == 503:
            raise StorageError("the learner listens no more. Hold samples and beat again.")
        if response.status != 200:
            raise StorageError(f"the learner refused a beat with {response.status}. Check the token.")
        with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
            found = msgspec.json.decode(content, type=dict[str, int])
            return Version(found["generation"], found["step"])
        raise StorageError("the learner's answer is no version. Is another server on that port?")

    def close(self) -> None:
        self._connection.close()
