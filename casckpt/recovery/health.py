"""How a supervised training is, over HTTP: `/healthz`, `/readyz`, and `/metrics` for Prometheus.

`healthz` is 200 while the command runs and its probes pass; `readyz` once it has told of a step. Both, and the step of
`metrics`, speak of the life that runs now, not of one that ended; totals count all lives. The store is opened
read-only for each request of `metrics`, so that the numbers are those of the files, not of the training's own account.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

from casckpt.arguments import TEXT, WHOLE, checked, maybe
from casckpt.errors import CasckptError
from casckpt.recovery.http_server import HttpServer
from casckpt.recovery.supervisor import Status
from casckpt.store.inspection import Inspection
from casckpt.store.opening import open_store
from casckpt.store.store import Store
from casckpt.store.values import Snapshot

_IDLE_TIMEOUT_S = 10.0


class HealthServer(HttpServer):
    """Answers from a supervisor's status and a store. A context manager; serves in threads of its own.

    Args:
        status: of the supervisor.
        store_path: None to leave the store's numbers out.
        run: whose snapshots are told of; None for those of any run in the store.
        host, port: where to listen; port 0 takes a free one.

    Raises:
        InvalidInputError: no such port can be.
        BusyError: somebody else listens there.
        StorageError: it cannot listen there for another reason.
    """

    @checked(status=Status, store_path=maybe(TEXT), run=maybe(TEXT), host=TEXT, port=WHOLE)
    def __init__(
        self,
        status: Status,
        *,
        store_path: str | None = None,
        run: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._status = status
        self._store_path, self._run = store_path, run
        super().__init__(host, port, _handler(self), name="casckpt-health")

    def answer(self, path: str) -> tuple[int, str]:
        """Status code and text for a path."""
        status = self._status
        if path == "/healthz":
            is_well = status.is_running and status.probe_failures == 0
            return (200, "ok\n") if is_well else (503, "not running\n" if not status.is_running else "probes fail\n")
        if path == "/readyz":
            return (200, "ok\n") if status.is_running and status.step >= 0 else (503, "no step yet\n")
        if path == "/metrics":
            return 200, self._metrics()
        return 404, "healthz, readyz, metrics\n"

    def _metrics(self) -> str:
        status = self._status
        values: dict[str, float] = {
            "casckpt_up": float(status.is_running),
            "casckpt_restarts_total": status.restart_count,
            "casckpt_step": status.step,
            "casckpt_probe_failures": status.probe_failures,
            "casckpt_save_failures_total": status.failed_saves,
            "casckpt_saves_postponed_total": status.postponed_saves,
        }
        if self._store_path is not None:
            values.update(_store_values(self._store_path, self._run))
        return "".join(f"{name} {value:.17g}\n" for name, value in values.items())


def newest_snapshot(
    path: str, run: str | None = None, *, unread: Callable[[CasckptError | OSError], None] = lambda error: None
) -> Snapshot | None:
    """What a run, or any, committed last; None where there is nothing, or it cannot be read now: `unread` hears why."""
    try:
        with open_store(path, read_only=True) as store:
            return _newest(store, run)
    except (CasckptError, OSError) as error:
        unread(error)
        return None


def _newest(store: Store, run: str | None) -> Snapshot | None:
    rows = Inspection(store).history(run, limit=1).rows
    return next((row.snapshot for row in rows if row.snapshot is not None), None)


def _store_values(path: str, run: str | None) -> dict[str, float]:
    """The newest snapshot, its age, and free space; a store that cannot be opened says so by a number too."""
    try:
        with open_store(path, read_only=True) as store:
            newest = _newest(store, run)
            values = {"casckpt_store_readable": 1.0, "casckpt_disk_free_bytes": float(shutil.disk_usage(path).free)}
            if newest is not None:
                values["casckpt_newest_snapshot_step"] = newest.step
                values["casckpt_newest_snapshot_age_seconds"] = max(0.0, time.time() - newest.created_at.timestamp())
            return values
    except (CasckptError, OSError):
        return {"casckpt_store_readable": 0.0}


def _handler(server: HealthServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _IDLE_TIMEOUT_S

        def do_GET(self) -> None:
            code, text = server.answer(self.path)
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests of a monitor are not news."""

    return Handler
