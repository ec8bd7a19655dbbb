"""`casckpt coverage`: whether a snapshot has everything that a training of a known kind needs to go on.

Exit code 1 with `--strict` when it has not. Only structures are read, and the scalars of components that say themselves
what their capture lacks: a leaf `not_captured`, a list of "path: reason".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from casckpt.cli import _exits
from casckpt.cli._screen import (
    add_row,
    chosen_run,
    finish,
    json_option,
    looking,
    print_json,
    print_table,
    ref_argument,
    run_option,
    say,
    store_argument,
    table,
)

if TYPE_CHECKING:
    from casckpt.engine.templates import CoverageReport
    from casckpt.store.inspection import Inspection
    from casckpt.store.values import Snapshot


@click.command()
@store_argument
@ref_argument()
@click.option("--template", required=True, help="What the training is: ppo, sac, dqn, grpo or pbt.")
@click.option("--alias", "aliases", multiple=True, metavar="ROLE=PATH", help="Where a role is; repeatable.")
@click.option("--strict", is_flag=True, help="Exit with 1 when a required role is missing.")
@run_option
@json_option
def coverage(
    path: str, ref: str, template: str, aliases: tuple[str, ...], strict: bool, run: str | None, as_json: bool
) -> None:
    """Compare a snapshot with what a kind of training needs: present, missing, not capturable."""
    from casckpt.engine.templates import check_complete

    with looking(path) as (store, inspection):
        snapshot = inspection.find(ref, chosen_run(inspection, run))
        paths, gaps = _contents(inspection, snapshot)
        report = check_complete(template, paths, not_capturable=gaps, aliases=_pairs(aliases))
        if as_json:
            print_json("coverage", {"store": store.path, "snapshot": snapshot.id, **report.to_dict()})
        else:
            _print(snapshot, report)
    finish(_exits.NO if strict and not report.is_complete else _exits.FINE)


def _pairs(aliases: tuple[str, ...]) -> dict[str, list[str]]:
    pairs: dict[str, list[str]] = {}
    for alias in aliases:
        role, equals, at = alias.partition("=")
        if not equals or not at:
            raise click.BadParameter(f"{alias!r}: expected ROLE=PATH", param_hint="--alias")
        pairs.setdefault(role.strip(), []).append(at)
    return pairs


def _contents(inspection: Inspection, snapshot: Snapshot) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Leaf paths by component, and what the components themselves say they lack."""
    from casckpt.engine.templates import stated_gaps

    paths: dict[str, list[str]] = {}
    gaps: dict[str, str] = {}
    for name in snapshot.components:
        contents = inspection.contents(snapshot, name)
        leaves = list(contents.leaves())
        paths[name] = [leaf.path for leaf in leaves]
        gaps |= stated_gaps(name, leaves, contents.scalars)
    return paths, gaps


def _print(snapshot: Snapshot, report: CoverageReport) -> None:
    say(f"{snapshot}, template {report.template}")
    found = table("state", "role…", "where, or why it matters…")
    for each in report.roles:
        role = each.role if each.is_required else f"{each.role} (optional)"
        add_row(found, each.state, role, ", ".join(each.examples) if each.state == "present" else each.reason)
    print_table(found)
    for at, reason in report.not_capturable.items():
        say(f"{at}: {reason}", style="red")
    if report.is_complete:
        say("complete", style="green")
    else:
        say(f"not complete: {', '.join(report.missing) or 'something could not be captured'}", style="bold yellow")
