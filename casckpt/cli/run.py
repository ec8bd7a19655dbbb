"""`casckpt run`: a command kept alive, see `casckpt.recovery.supervisor`."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
from collections.abc import Callable

import click

from casckpt.cli._screen import finish, let_go_of
from casckpt.errors import CasckptError, NotFoundError, StorageError


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--store", "store_path", metavar="STORE", help="Where COMMAND commits: for /metrics, and as progress.")
@click.option("--run", "name", metavar="R", help="The run in STORE that COMMAND continues. [default: any]")
@click.option("--restarts", default=10, metavar="N", show_default=True, help="Restarts in a row without progress.")
@click.option(
    "--silence", default=30.0, metavar="S", show_default=True, help="Seconds without a beat that are a failure."
)
@click.option(
    "--deadline", default=30.0, metavar="S", show_default=True, help="Seconds that the command gets at SIGTERM."
)
@click.option("--probe", metavar="COMMAND", help="A health probe; two failures in a row are a failure.")
@click.option("--port", type=int, metavar="N", help="Serve /healthz, /readyz and /metrics there.")
@click.option("--host", default="127.0.0.1", metavar="H", show_default=True, help="The address to serve on.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def run(
    store_path: str | None,
    name: str | None,
    restarts: int,
    silence: float,
    deadline: float,
    probe: str | None,
    port: int | None,
    host: str,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND and start it again when it fails: by exit code, by silence, or by its health probe.

    The command finds in its environment where to say that it is alive, and how it ended the last time. The exit code is
    that of its last life.
    """
    from casckpt.recovery.health import HealthServer
    from casckpt.recovery.supervisor import Settings, Supervisor, command_probe

    def tell(text: str) -> None:
        try:
            click.echo(f"casckpt: {text}", err=True)
        except OSError:  # a terminal that was closed, a pipe that nobody reads: no reason to end
            let_go_of(sys.stderr)

    watched = None if store_path is None else _Watched(store_path, name, tell)
    supervisor = Supervisor(
        command,
        settings=Settings(restarts_max=restarts, silence_min_s=silence, term_deadline_s=deadline),
        probe=None if probe is None else command_probe(probe),
        tell=tell,
        progress=(lambda: None) if watched is None else watched.newest,
    )
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    ends_heard = [each for each in ends if signal.getsignal(each) is not signal.SIG_IGN]  # `nohup` ignores SIGHUP
    old = {number: signal.signal(number, lambda *_: supervisor.end()) for number in ends_heard}
    try:
        with contextlib.ExitStack() as stack:
            if port is not None:
                served = HealthServer(supervisor.status, store_path=store_path, run=name, host=host, port=port)
                stack.enter_context(served)
            code = supervisor.run()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    finish(code)


class _Watched:
    """The store that the command commits to; why it cannot be read is told once.

    Raises:
        StorageError: it never can be a store.
    """

    def __init__(self, path: str, run: str | None, tell: Callable[[str], None]) -> None:
        self._path, self._run, self._tell = path, run, tell
        self._told = ""
        self._look(self._find_at_start)

    def newest(self) -> str | None:
        """Id of the newest snapshot, asked after a failure."""
        return self._look(self._say)

    def _look(self, unread: Callable[[CasckptError | OSError], None]) -> str | None:
        from casckpt.recovery.health import newest_snapshot

        found = newest_snapshot(self._path, self._run, unread=unread)
        return None if found is None else found.id

    def _find_at_start(self, error: CasckptError | OSError) -> None:
        if isinstance(error, StorageError) and error.errno == errno.ENOTDIR:
            raise error
        if not isinstance(error, NotFoundError):  # else the command will make it
            self._say(error)

    def _say(self, error: CasckptError | OSError) -> None:
        if str(error) != self._told:
            self._told = str(error)
            self._tell(f"no snapshot counts as progress while --store cannot be read: {error}")
