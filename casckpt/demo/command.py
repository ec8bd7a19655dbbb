"""The command `casckpt demo`: options in, phases run, tables or one JSON document out.

Exit codes: 0 when the resumed run is bit-identical, 1 when it is not (or Gymnasium is missing), 130 after Ctrl-C,
others as for every command. Heavy imports happen after the options are known to be right.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

if TYPE_CHECKING:
    from casckpt.demo._drive import DemoPlan, Outcome

EXIT_DIFFERENT, EXIT_INTERRUPTED = 1, 130
DEFAULT_UPDATES = 40
UPDATES_MIN = 4  # one step to branch from, one before the kill, the killed one, and one after
DEFAULT_STORE = "casckpt-demo"


@click.command()
@click.option("--store", metavar="DIR", help=f"Where the store is made. [default: ./{DEFAULT_STORE}, or the next free]")
@click.option("--updates", type=click.IntRange(UPDATES_MIN), default=DEFAULT_UPDATES, show_default=True)
@click.option("--kill-at", type=click.IntRange(2), metavar="K", help="Kill in update K. [default: half way]")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def demo(store: str | None, updates: int, kill_at: int | None, seed: int, as_json: bool) -> None:
    """Train a real PPO, kill it, resume it, prove that nothing was lost, and branch off.

    About a minute on two cores. Everything happens on this machine, and only in the store's folder and beside it.
    """
    kill_at = kill_at or updates // 2
    if kill_at >= updates:
        raise click.BadParameter(f"{kill_at} is not before the last update, {updates}.", param_hint="--kill-at")
    if importlib.util.find_spec("gymnasium") is None:
        raise click.ClickException('the demo needs Gymnasium. Run `pip install "casckpt[demo]"`.')
    console = Console(stderr=as_json)
    path = _choose_store(store)
    try:
        is_identical = _run(console, path, updates=updates, kill_at=kill_at, seed=seed, as_json=as_json)
    except KeyboardInterrupt:
        console.print(f"Stopped. What was committed so far is in {path}.", highlight=False)
        raise SystemExit(EXIT_INTERRUPTED) from None
    if not is_identical:
        raise SystemExit(EXIT_DIFFERENT)


def _choose_store(given: str | None) -> str:
    if given is not None:
        if os.path.lexists(given) and not (os.path.isdir(given) and not os.listdir(given)):
            raise click.BadParameter(f"{given} is already there. Name a folder that is not.", param_hint="--store")
        if not os.path.isdir(os.path.dirname(os.path.abspath(given))):
            raise click.BadParameter(f"the folder that {given} would be in is not there.", param_hint="--store")
        return given
    candidate, n = DEFAULT_STORE, 1
    while os.path.lexists(candidate):
        n += 1
        candidate = f"{DEFAULT_STORE}-{n}"
    return candidate


def _run(console: Console, path: str, *, updates: int, kill_at: int, seed: int, as_json: bool) -> bool:
    from casckpt.demo._drive import DemoPlan, run_demo
    from casckpt.demo._ppo import PpoConfig
    from casckpt.demo._screen import ProgressScreen, print_outcome

    plan = DemoPlan(
        store=path,
        config=PpoConfig(seed=seed, updates=updates),
        kill_at=kill_at,
        branch_from=max(1, kill_at // 2),
        branch_updates=max(2, updates // 12),
        branch_seed=seed + 1000,
    )
    before = time.monotonic()
    with ProgressScreen(console) as screen:
        outcome = run_demo(plan, screen)
    elapsed_s = time.monotonic() - before
    if as_json:
        click.echo(json.dumps(_document(plan, outcome, elapsed_s), indent=2))
    else:
        print_outcome(console, outcome, path, elapsed_s=elapsed_s)
    return outcome.is_identical


def _document(plan: DemoPlan, outcome: Outcome, elapsed_s: float) -> dict[str, Any]:
    return {
        "plan": asdict(plan),
        "is_identical": outcome.is_identical,
        "first_divergence": outcome.divergence,
        "claims": [claim.to_dict() for claim in outcome.claims],
        "phases": {name: asdict(phase) for name, phase in outcome.phases.items()},
        "totals": {
            run: {**asdict(totals), "dedup_ratio": totals.dedup_ratio, "compression": totals.compression}
            for run, totals in outcome.totals.items()
        },
        "branches": {name: [s.step for s in line] for name, line in outcome.lines.items()},
        "elapsed_s": elapsed_s,
    }
