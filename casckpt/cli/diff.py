"""`casckpt diff`: what differs between two snapshots. Exit code 1 when something does, like diff."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from casckpt.cli import _exits
from casckpt.cli._screen import (
    add_row,
    chosen_run,
    console,
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
from casckpt.cli._text import plural, share

if TYPE_CHECKING:
    from casckpt.store.compare import ComponentDiff, Diff, LeafDiff

LEAVES_SHOWN = 20
_STYLES = {"equal": "dim", "changed": "yellow", "added": "green", "removed": "red"}


@click.command()
@store_argument
@ref_argument("a", is_required=True)
@ref_argument("b", is_required=True)
@run_option
@click.option("--all", "show_all", is_flag=True, help=f"Every leaf, not only {LEAVES_SHOWN} per component.")
@json_option
def diff(path: str, a: str, b: str, run: str | None, show_all: bool, as_json: bool) -> None:
    """Compare two snapshots by component and leaf: changed elements, largest change.

    Components of equal address are not read. Exit code 0: equal, 1: something differs.
    """
    with looking(path) as (store, inspection):
        run = chosen_run(inspection, run)
        found = store.diff(*(inspection.find(ref, run) for ref in (a, b)))
        if as_json:
            print_json("diff", {"store": store.path, **found.to_dict()})
        else:
            _print(found, None if show_all else LEAVES_SHOWN)
    finish(_exits.FINE if found.is_equal else _exits.NO)


def _print(found: Diff, limit: int | None) -> None:
    say(f"a  {found.a}")
    say(f"b  {found.b}")
    if found.is_equal:
        say("equal: every component has the same address", style="green")
        return
    target = table("component, leaf…", "change", ">elements", ">share", ">largest", "from → to…")
    for component in found.components:
        _add_component(target, component, limit)
    console().print()
    print_table(target)


def _add_component(target: Any, component: ComponentDiff, limit: int | None) -> None:
    changed = sum(leaf.changed_count for leaf in component.leaves)
    elements = f"{len(component.leaves)} leaves" if len(component.leaves) != 1 else "1 leaf"
    about = (elements, "", "", f"{plural(changed, 'element')}" if changed else "") if component.leaves else ("",) * 4
    add_row(target, component.name, component.change, *about, style=_STYLES[component.change])
    leaves = component.leaves if limit is None else component.leaves[:limit]
    for leaf in leaves:
        _add_leaf(target, leaf)
    if len(leaves) < len(component.leaves):
        add_row(target, f"  {len(component.leaves) - len(leaves)} more: --all", *[""] * 5, style="dim")


def _add_leaf(target: Any, leaf: LeafDiff) -> None:
    counted = leaf.element_count > 0
    values = f"{leaf.before} → {leaf.after}" if leaf.before or leaf.after else ""
    add_row(
        target,
        f"  {leaf.path}",
        leaf.change,
        f"{leaf.changed_count}/{leaf.element_count}" if counted else "",
        share(leaf.changed_count, leaf.element_count) if counted else "",
        "" if leaf.largest_change is None else f"{leaf.largest_change:.4g}",
        values,
    )
