"""`casckpt runs` and `casckpt branches`: what there is, by name."""

from __future__ import annotations

import click

from casckpt.cli._screen import (
    add_row,
    chosen_run,
    json_option,
    looking,
    print_json,
    print_table,
    run_option,
    say,
    store_argument,
    table,
)


@click.command()
@store_argument
@json_option
def runs(path: str, as_json: bool) -> None:
    """List the runs of a store, the one written last at the end."""
    with looking(path) as (store, inspection):
        found = inspection.runs()
        if as_json:
            print_json("runs", {"store": store.path, "runs": [run.to_dict() for run in found]})
            return
    if not found:
        say("no runs yet")
        return
    target = table("run…", ">snapshots", ">branches", "current branch", ">head step", "tags…")
    for run in found:
        current = next(branch for branch in run.branches if branch.is_current)
        facts = (run.name, str(run.snapshot_count), str(len(run.branches)), current.name, str(current.head_step))
        add_row(target, *facts, ", ".join(run.tags))
    print_table(target)


@click.command()
@store_argument
@run_option
@json_option
def branches(path: str, run: str | None, as_json: bool) -> None:
    """List the branches of a run: heads, and which snapshot each one continues."""
    with looking(path) as (store, inspection):
        run = chosen_run(inspection, run)
        found = next((each.branches for each in inspection.runs() if each.name == run), ())
        if as_json:
            document = {"store": store.path, "run": run, "branches": [branch.to_dict() for branch in found]}
            print_json("branches", document)
            return
    if not found:
        say("no branches yet")
        return
    target = table("", "branch…", ">head step", "head", "continues")
    for branch in found:
        mark = "*" if branch.is_current else ""
        add_row(target, mark, branch.name, str(branch.head_step), branch.head[:12], (branch.fork or "")[:12])
    print_table(target)
