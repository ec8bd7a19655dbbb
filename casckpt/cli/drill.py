"""`casckpt drill`: faults injected into a training of one's own. Exit code 1 when a promise broke."""

from __future__ import annotations

import click

from casckpt.cli import _exits
from casckpt.cli._screen import finish, json_option, print_json, say


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--store", "store_path", required=True, metavar="STORE", help="Where COMMAND commits. It will be damaged."
)
@click.option("--run", default="main", show_default=True, metavar="R", help="The run that COMMAND continues.")
@click.option("--scenario", "scenarios", multiple=True, metavar="NAME", help="Only this one; repeatable.")
@click.option("--rounds", default=1, show_default=True, metavar="N", help="Times that each scenario comes.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Decides when faults come.")
@click.option(
    "--silence", default=30.0, show_default=True, metavar="S", help="Seconds without a beat that are a failure."
)
@click.option("--timeout", default=120.0, show_default=True, metavar="S", help="Seconds to recover, at most.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def drill(
    store_path: str,
    run: str,
    scenarios: tuple[str, ...],
    rounds: int,
    seed: int,
    silence: float,
    timeout: float,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Inject faults into COMMAND, a training that recovers by itself, and say whether each was survived as promised.

    Scenarios: kill, hang, damage (of the newest snapshot), delete (it), kill-restoring. Use a store of its own.
    """
    from casckpt.recovery.drill import SCENARIOS, Drill
    from casckpt.recovery.supervisor import Settings

    found = Drill(
        command,
        store_path,
        run=run,
        settings=Settings(silence_min_s=silence, backoff_s=0.1, term_deadline_s=min(silence, 30.0)),
        seed=seed,
        timeout_s=timeout,
        tell=lambda text: click.echo(text, err=True),
    ).run((scenarios or SCENARIOS) * rounds)
    if as_json:
        print_json("drill", {"store": store_path, "run": run, **found.to_dict()})
    else:
        say(str(found))
    finish(_exits.FINE if found.ok else _exits.NO)
