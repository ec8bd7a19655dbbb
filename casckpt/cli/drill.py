"""`casckpt drill`: faults injected into a training of one's own, or the demo's. Exit code 1 when a promise broke."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import click

from casckpt.cli import _exits
from casckpt.cli._screen import finish, json_option, print_json, say

if TYPE_CHECKING:
    from casckpt.demo.distributed._drill import DistributedReport
    from casckpt.recovery.drill import DrillReport


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--store", "store_path", required=True, metavar="STORE", help="Where COMMAND commits. It will be damaged."
)
@click.option("--run", default="main", show_default=True, metavar="R", help="The run that COMMAND continues.")
@click.option("--scenario", "scenarios", multiple=True, metavar="NAME", help="Only this one; repeatable.")
@click.option("--demo", "is_demo", is_flag=True, help="Instead of COMMAND, a distributed PPO: a learner, four actors.")
@click.option("--rounds", default=1, show_default=True, metavar="N", help="Times that each scenario comes.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Decides when faults come.")
@click.option(
    "--silence", default=30.0, show_default=True, metavar="S", help="Seconds without a beat that are a failure."
)
@click.option("--timeout", default=120.0, show_default=True, metavar="S", help="Seconds to recover, at most.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def drill(
    store_path: str,
    run: str,
    scenarios: tuple[str, ...],
    is_demo: bool,
    rounds: int,
    seed: int,
    silence: float,
    timeout: float,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Inject faults into COMMAND, a training that recovers by itself, and say whether each was survived as promised.

    Scenarios: kill, hang, damage (of the newest snapshot), delete (it), kill-restoring. With --demo also kill-actor,
    hang-actor, stale-sample and full-disk. Use a store of its own.
    """
    if is_demo == bool(command):
        raise click.UsageError("Give a COMMAND after `--`, or --demo.")

    def tell(text: str) -> None:
        click.echo(text, err=True)

    found: DrillReport | DistributedReport
    if is_demo:
        found = _drill_demo(store_path, scenarios, rounds, seed=seed, silence_s=silence, timeout_s=timeout, tell=tell)
    else:
        from casckpt.recovery.drill import SCENARIOS, Drill
        from casckpt.recovery.supervisor import Settings

        found = Drill(
            command,
            store_path,
            run=run,
            settings=Settings(silence_min_s=silence, backoff_s=0.1, term_deadline_s=min(silence, 30.0)),
            seed=seed,
            timeout_s=timeout,
            tell=tell,
        ).run((scenarios or SCENARIOS) * rounds)
    if as_json:
        print_json("drill", {"store": store_path, "run": run, **found.to_dict()})
    else:
        say(str(found))
    finish(_exits.FINE if found.ok else _exits.NO)


def _drill_demo(store_path: str, scenarios: tuple[str, ...], rounds: int, **options: Any) -> DistributedReport:
    if importlib.util.find_spec("gymnasium") is None:
        raise click.ClickException('the demo needs Gymnasium. Run `pip install "casckpt[demo]"`.')
    if not sys.platform.startswith("linux"):
        raise click.ClickException("the demo fills a disk by a limit that only Linux sets from outside.")
    from casckpt.demo.distributed._drill import ALL_SCENARIOS, DistributedDrill

    return DistributedDrill(store_path, **options).run((scenarios or ALL_SCENARIOS) * rounds)
