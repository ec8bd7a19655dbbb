"""`casckpt run`: a command kept alive, see `casckpt.recovery.supervisor`."""

from __future__ import annotations

import contextlib
import signal

import click

from casckpt.cli._screen import finish


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--store", "store_path", metavar="STORE", help="Whose newest snapshot /metrics tells of.")
@click.option("--restarts", default=10, metavar="N", show_default=True, help="Restarts in a row without progress.")
@click.option(
    "--silence", default=30.0, metavar="S", show_default=True, help="Seconds without a beat that are a failure."
)
@click.option(
    "--deadline", default=30.0, metavar="S", show_default=True, help="Seconds that the command gets at SIGTERM."
)
@click.option("--probe", metavar="COMMAND", help="A health probe; two failures in a row are a failure.")
@click.option("--port", type=int, metavar="N", help="Serve /healthz, /readyz and /metrics there.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def run(
    store_path: str | None,
    restarts: int,
    silence: float,
    deadline: float,
    probe: str | None,
    port: int | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND and start it again when it fails: by exit code, by silence, or by its health probe.

    The command finds in its environment where to say that it is alive, and how it ended the last time. The exit code is
    that of its last life.
    """
    from casckpt.recovery.health import HealthServer
    from casckpt.recovery.supervisor import Settings, Supervisor, command_probe

    supervisor = Supervisor(
        command,
        settings=Settings(restarts_max=restarts, silence_min_s=silence, term_deadline_s=deadline),
        probe=None if probe is None else command_probe(probe),
        tell=lambda text: click.echo(f"casckpt: {text}", err=True),
    )
    old = {number: signal.signal(number, lambda *_: supervisor.end()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.ExitStack() as stack:
            if port is not None:
                stack.enter_context(HealthServer(supervisor.status, store_path=store_path, port=port))
            code = supervisor.run()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    finish(code)
