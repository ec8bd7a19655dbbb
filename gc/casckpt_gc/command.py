"""`casckpt gc plan|collect|compact`, `casckpt patrol`, `casckpt repair`.

Found by `casckpt` through the entry-point group `casckpt.commands`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from casckpt.cli import _exits
from casckpt.cli._screen import (
    add_row,
    finish,
    json_option,
    looking,
    open_named,
    print_json,
    print_table,
    say,
    store_argument,
    table,
)
from casckpt.errors import InvalidInputError

if TYPE_CHECKING:
    from casckpt.store.store import Store
    from casckpt_gc.plan import Plan
    from casckpt_gc.retention import Best, Retention, Thinning

_DIGITS_MAX = 18  # of a count
_RULES = (
    click.option("--run", metavar="R", help="Name of the run. [default: the only one]"),
    click.option("--branch", metavar="B", help="Name of the branch. [default: the one written last]"),
    click.option("--latest", type=click.IntRange(min=1), metavar="N", help="Keep the newest N."),
    click.option("--every-steps", type=click.IntRange(min=1), metavar="M", help="Keep the first of each M steps."),
    click.option("--every-hours", type=float, metavar="T", help="Keep one per T hours."),
    click.option(
        "--best", multiple=True, metavar="METRIC[:min][:K]", help="Keep the best, or K best, by a metric. Repeatable."
    ),
    click.option("--thin", multiple=True, metavar="COMPONENT", help="Withdraw a component of older ones. Repeatable."),
    click.option(
        "--thin-after", type=click.IntRange(min=1), default=1, metavar="K", help="Spare the newest K. [default: 1]"
    ),
    click.option("--no-compact", is_flag=True, help="Only drop packs of which nothing is needed; seal no entries."),
)


def _with_rules(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_RULES):
        command = option(command)
    return command


@click.group()
def gc() -> None:
    """Delete what retention lets go, safely beside running commits and restores."""


@gc.command("plan")
@store_argument
@_with_rules
@json_option
def plan_command(path: str, run: str | None, as_json: bool, **rules: Any) -> None:
    """Say what a collection would do. Changes nothing.

    Without a rule every snapshot stays, and only what nothing needs goes.
    """
    with _opened(path, run) as store:
        found = _plan(store, rules)
        if as_json:
            print_json("gc plan", {"store": store.path, **found.to_dict()})
            return
        _print_plan(found)


@gc.command()
@store_argument
@_with_rules
@click.option("--grace", type=float, metavar="S", help="Seconds for readers without a lease, twice. [default: 60]")
@json_option
def collect(path: str, run: str | None, grace: float | None, as_json: bool, **rules: Any) -> None:
    """Retire, withdraw and delete. Waits for readers; safe to stop and to run again.

    Without a rule every snapshot stays, and only what nothing needs goes.
    """
    with _opened(path, run) as store:
        found = _plan(store, rules)
        if not as_json:
            _print_plan(found)
        _print_report("gc collect", found, grace, as_json=as_json)


@gc.command()
@store_argument
@click.option(
    "--budget", type=click.IntRange(min=1), default=1024, metavar="MIB", help="At most so much. [default: 1024]"
)
@click.option(
    "--small-after", type=click.IntRange(min=1), metavar="N", help="Encode what the newest N do not have as small."
)
@click.option("--grace", type=float, metavar="S", help="Seconds for readers without a lease, twice. [default: 60]")
@json_option
def compact(path: str, budget: int, small_after: int | None, grace: float | None, as_json: bool) -> None:
    """Rewrite packs of which little is needed, merge small ones, seal old entries. No snapshot is retired."""
    from casckpt_gc.compaction import Compaction
    from casckpt_gc.plan import plan
    from casckpt_gc.screen import postponed_lines

    with _opened(path, None, is_any_run_good=True) as store:
        rules = Compaction(budget_bytes=budget << 20, cold_after=small_after, is_thorough=True)
        found = plan(store, compaction=rules)
        _print_report("gc compact", found, grace, as_json=as_json)
        for line in [] if as_json else postponed_lines(found):
            say(f"{line}. Give a larger --budget, or run it again")


@click.command()
@store_argument
@click.option("--budget", type=click.IntRange(min=1), default=1024, metavar="MIB", help="Read so much. [default: 1024]")
@click.option("--seconds", type=float, default=60.0, metavar="S", help="Take so long at most. [default: 60]")
@json_option
def patrol(path: str, budget: int, seconds: float, as_json: bool) -> None:
    """Check the packs that were checked longest ago, and the disk. Exit code 1 when something is wrong."""
    from casckpt_gc.patrol import patrol as walk

    with _opened(path, None, is_any_run_good=True) as store:
        found = walk(store, budget_bytes=budget << 20, budget_s=seconds)
    if as_json:
        print_json("patrol", {"store": path, **found.to_dict()})
    else:
        say(str(found))
    finish(_exits.NO if found.findings or found.health.state == "stop" else _exits.FINE)


@click.command()
@store_argument
@click.option("--from", "other", metavar="OTHER", help="Another copy of this store, whole where this one is not.")
@click.option("--execute", is_flag=True, help="Do it. Without it nothing is changed.")
@json_option
def repair(path: str, other: str | None, execute: bool, as_json: bool) -> None:
    """Say what is damaged and what can be healed; with --execute, heal it. Nothing is discarded."""
    from casckpt_gc.repair import repair as heal

    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_named(other, read_only=True)) if other else None
        store = stack.enter_context(_opened(path, None, is_any_run_good=True))
        found = heal(store, source, execute=execute)
    if as_json:
        print_json("repair", {"store": path, **found.to_dict()})
    else:
        say(found.text("pass --execute"))
    is_damaged = (found.heals or found.entries or found.epochs) and not execute
    is_lost = found.lost_by or found.lost_epochs or not all(each.is_healed for each in found.entries)
    finish(_exits.NO if is_lost or is_damaged else _exits.FINE)


# --- stores and rules ---


def _opened(path: str, run: str | None, *, is_any_run_good: bool = False) -> Store:
    """A store opened for writing in a run that is there."""
    with looking(path) as (_, inspection):
        names = [each.name for each in inspection.runs()]
        if run is not None:
            inspection.check_run(run)
    if run is None and len(names) > 1 and not is_any_run_good:
        raise click.UsageError(f"this store has several runs ({', '.join(names)}): name one with --run.")
    return open_named(path, run=run or (names[-1] if names else "main"))


def _plan(store: Store, rules: Mapping[str, Any]) -> Plan:
    from casckpt_gc.compaction import COMPACTION
    from casckpt_gc.plan import plan

    compaction = None if rules["no_compact"] else COMPACTION
    found = plan(store, _retention(rules), _thinning(rules), branch=rules["branch"], compaction=compaction)
    if found.unknown_metrics:  # a slip of the pen must not let go what it was to keep
        names = ", ".join(map(repr, found.unknown_metrics))
        raise InvalidInputError(
            f"--best: no snapshot of {found.run}/{found.branch} has a metric {names}. Nothing is retired. Run "
            "`casckpt log`; leave the rule out if nothing is to be kept by it."
        )
    return found


def _retention(rules: Mapping[str, Any]) -> Retention | None:
    from casckpt_gc.retention import Retention

    if not rules["best"] and all(rules[name] is None for name in ("latest", "every_steps", "every_hours")):
        return None
    best = [_best(text) for text in rules["best"]]
    return Retention(rules["latest"] or 1, rules["every_steps"], rules["every_hours"], best)


def _best(text: str) -> Best:
    """`return`, `return:3`, `loss:min`, `loss:min:3`."""
    from casckpt_gc.retention import MODES, Best

    metric, *rest = text.split(":")
    mode = rest.pop(0) if rest and rest[0] in MODES else "max"
    count = rest.pop(0) if rest and rest[0].isascii() and rest[0].isdigit() else "1"
    if rest or not metric or len(count) > _DIGITS_MAX:
        raise InvalidInputError(f"--best {text!r}: expected METRIC, METRIC:min, METRIC:K or METRIC:min:K.")
    return Best(metric, int(count), mode)


def _thinning(rules: Mapping[str, Any]) -> tuple[Thinning, ...]:
    from casckpt_gc.retention import Thinning

    return (Thinning(rules["thin"], keep_latest=rules["thin_after"]),) if rules["thin"] else ()


# --- screens ---


def _print_plan(found: Plan) -> None:
    from casckpt_gc.screen import frees_text, plan_rows

    target = table("collect", ">how many", ">bytes", "which…")
    for row in plan_rows(found):
        add_row(target, *row)
    print_table(target)
    say(frees_text(found))


_UNDONE = ("unknown_components", "postponed_count", "postponed_bytes", "postponed_object_count")  # of a plan


def _print_report(name: str, plan: Plan, grace_s: float | None, *, as_json: bool) -> None:
    """Execute a plan, and say what was done and, in JSON, what was not."""
    report = plan.execute(grace_s=grace_s)
    if as_json:
        undone = {each: getattr(plan, each) for each in _UNDONE}
        print_json(name, {"store": plan.path, **dataclasses.asdict(report), **undone})
    else:
        say(str(report))
