"""`casckpt log`: the history of a store, newest first, with damage as rows and never as a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from casckpt.cli._screen import (
    add_row,
    chosen_run,
    console,
    json_option,
    looking,
    print_json,
    print_table,
    run_option,
    say,
    snapshot_json,
    state_text,
    store_argument,
    table,
)
from casckpt.cli._text import pairs, plural, ratio, size

if TYPE_CHECKING:
    from rich.table import Table

    from casckpt.store.inspection import History, Row, Run

DEFAULT_COUNT = 20
BRANCHES_SHOWN = 6
ID_DIGITS = 8
WIDTH_WITH_IDS = 112  # columns; on narrower terminals metrics are worth more than ids


class _Shape(NamedTuple):
    """Which columns a table has: branches in the first one, and snapshot ids."""

    with_branches: bool
    with_ids: bool


@click.command()
@store_argument
@run_option
@click.option("--branch", metavar="B", help="Only this branch and its ancestors.")
@click.option("--all-runs", is_flag=True, help="All runs.")
@click.option(
    "-n", "--count", type=click.IntRange(0), default=DEFAULT_COUNT, show_default=True, help="Snapshots; 0 for all."
)
@click.option("--retired", is_flag=True, help="Retired snapshots too.")
@json_option
def log(
    path: str, run: str | None, branch: str | None, all_runs: bool, count: int, retired: bool, as_json: bool
) -> None:
    """List runs, branches and steps, with metrics, sizes and state.

    State: consistent, mixed (components of different steps), retired, incomplete (files are not here), damaged.
    """
    if all_runs and (run or branch):
        raise click.UsageError("--all-runs goes with neither --run nor --branch.")
    with looking(path) as (store, inspection):
        runs = inspection.runs()
        shown_run = None if all_runs else chosen_run(inspection, run)
        history = inspection.history(
            None if all_runs or not runs else shown_run, branch, limit=count or None, with_retired=retired
        )
        if as_json:
            print_json("log", _document(store.path, runs, shown_run, history))
            return
        _print(store.path, runs, shown_run, history)


def _document(path: str, runs: list[Run], run: str | None, history: History) -> dict[str, Any]:
    return {
        "store": path,
        "run": run,
        "runs": [each.to_dict() for each in runs],
        "rows": [_row_document(row) for row in history.rows],
        "has_more": history.has_more,
        "hidden_retired_count": history.hidden_count,
    }


def _row_document(row: Row) -> dict[str, Any]:
    return {**row.to_dict(), "snapshot": None if row.snapshot is None else snapshot_json(row.snapshot)}


def _print(path: str, runs: list[Run], run: str | None, history: History) -> None:
    screen = console()
    say(f"{path}: {plural(len(runs), 'run')}, {plural(sum(each.snapshot_count for each in runs), 'snapshot')}")
    for each in runs:
        _print_run(each, is_shown=run in (None, each.name))
    if history.rows:
        screen.print()
        print_table(_table(history, with_runs=run is None))
    elif not runs:
        say("no snapshot yet")
    notes = [f"{row.step if row.step is not None else f'entry {row.seq}'}: {row.reason}" for row in _flawed(history)]
    if notes:
        screen.print()
        for note in notes:
            say(note, style="red")
        say(f"Run `casckpt verify {path}`.")
    _print_hints(history)


def _print_run(run: Run, *, is_shown: bool) -> None:
    lines = []
    for branch in run.branches[-BRANCHES_SHOWN:]:
        fork = f" from {branch.fork[:12]}" if branch.fork else ""
        lines.append(f"{branch.name} (head {branch.head_step}{fork}{', current' if branch.is_current else ''})")
    if len(run.branches) > BRANCHES_SHOWN:
        lines.append(f"{len(run.branches) - BRANCHES_SHOWN} more")
    tags = f"; tags {', '.join(run.tags)}" if run.tags else ""
    text = f"run {run.name}: {plural(run.snapshot_count, 'snapshot')}; branches {', '.join(lines)}{tags}"
    say(text, style=None if is_shown else "dim")


def _table(history: History, *, with_runs: bool) -> Table:
    """All rows; with `with_runs` under a heading per run, the run written last first."""
    shape = _Shape(
        with_branches=with_runs or len({row.branch for row in history.rows if row.id}) > 1,
        with_ids=console().width >= WIDTH_WITH_IDS,
    )
    sizes = (">logical", ">new", ">stored", ">dedup", ">compr.")
    step = "step…" if shape.with_branches else ">step"
    found = table(step, *["id"] * shape.with_ids, "committed", *sizes, "state", "metrics…")
    for run in dict.fromkeys(row.run for row in history.rows) if with_runs else [None]:
        if run is not None:
            add_row(found, run or "in no run that is known", style="bold")
        for row in history.rows:
            if run in (None, row.run):
                _add(found, row, shape)
    return found


def _add(target: Table, row: Row, shape: _Shape) -> None:
    name = "?" if row.step is None else f"{row.branch}@{row.step}" if shape.with_branches else str(row.step)
    head = (name, row.id[:ID_DIGITS]) if shape.with_ids else (name,)
    snapshot = row.snapshot
    if snapshot is None:
        where = f"entry {row.seq}" if row.seq == row.last_seq else f"entries {row.seq}–{row.last_seq}"
        add_row(target, *head, *[""] * 6, state_text(row.state), where)
        return
    tags = "".join(f"[{tag}] " for tag in row.tags)
    has_new = snapshot.new_bytes > 0
    add_row(
        target,
        *head,
        snapshot.created_at.astimezone().strftime("%m-%d %H:%M"),
        size(snapshot.logical_bytes),
        size(snapshot.new_bytes),
        size(snapshot.stored_bytes),
        ratio(snapshot.dedup_ratio if has_new else None),
        ratio(snapshot.compression if has_new else None),
        state_text(row.state),
        tags + pairs(snapshot.metrics),
    )


def _flawed(history: History) -> list[Row]:
    return [row for row in history.rows if row.reason]


def _print_hints(history: History) -> None:
    hints = ["older ones: -n 0"] if history.has_more else []
    if history.hidden_count:
        hints.append(f"{plural(history.hidden_count, 'retired snapshot')} not shown: --retired")
    if hints:
        say("; ".join(hints), style="dim")
