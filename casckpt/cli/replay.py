"""`casckpt replay`: rings looked at, and written as Arrow or Parquet files that need no casckpt."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

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
    snapshot_json,
    store_argument,
    table,
)
from casckpt.cli._text import plural, size
from casckpt.errors import AlreadyExistsError, InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from casckpt.replay.view import RingView
    from casckpt.store.inspection import Inspection
    from casckpt.store.store import Store
    from casckpt.store.values import Snapshot

FORMATS = ("arrow", "parquet")


@click.group()
def replay() -> None:
    """Look at rings of rows, and take them out."""


@replay.command()
@store_argument
@click.argument("ref", metavar="REF")
@click.argument("component", metavar="COMPONENT")
@run_option
@json_option
def show(path: str, ref: str, component: str, run: str | None, as_json: bool) -> None:
    """Show where a ring stood, its columns, and its segments. Reads no rows."""
    with looking(path) as (store, inspection):
        snapshot, view = _find(store, inspection, ref, component, run)
        if as_json:
            _print_json(store, snapshot, component, view, None)
            return
        say(f"{snapshot}, component {component}: {view}")
        say(f"head slot {view.head}, tail slot {view.tail}, {plural(len(view), 'row')}")
        columns = table("column…", "kind", "dtype", "shape", ">bytes a row")
        for name, column in view.columns.items():
            shape = "×".join(map(str, column.shape))
            add_row(columns, name, column.kind, column.dtype, shape, str(column.row_size))
        print_table(columns)
        segments = table(">first row", ">rows", ">step")
        for start, row_count, step in view.segments():
            add_row(segments, str(start), str(row_count), str(step))
        print_table(segments)


@replay.command()
@store_argument
@click.argument("ref", metavar="REF")
@click.argument("component", metavar="COMPONENT")
@click.argument("file", metavar="FILE")
@click.option("--format", "file_format", type=click.Choice(FORMATS), help="[default: by the ending of FILE]")
@click.option("--column", "columns", multiple=True, metavar="NAME", help="A column; repeatable. [default: all]")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="The newest rows alone.")
@click.option("--since-step", type=int, metavar="N", help="Rows alone that were first committed at this step or later.")
@click.option("--max-age", type=click.FloatRange(min=0), metavar="SECONDS", help="The same, by time before REF.")
@run_option
@json_option
def export(
    path: str,
    ref: str,
    component: str,
    file: str,
    file_format: str | None,
    columns: tuple[str, ...],
    last: int | None,
    since_step: int | None,
    max_age: float | None,
    run: str | None,
    as_json: bool,
) -> None:
    """Write a ring's rows in order into FILE: Arrow IPC (.arrow) or Parquet (.parquet), one segment after the other.

    Shapes and dtypes that Arrow has not are in the metadata of the schema. The file must not be there yet. It appears
    whole, or not at all.
    """
    kind = file_format or os.path.splitext(file)[1].removeprefix(".")
    if kind not in FORMATS:
        raise InvalidInputError(f"{file}: which format? Name the file .arrow or .parquet, or give --format.")
    with looking(path) as (store, inspection):
        snapshot, view = _find(store, inspection, ref, component, run)
        view = view.trimmed(rows=last, since_step=since_step, max_age_s=max_age)
        row_count = _write(view, file, kind, list(columns) or None)
        if as_json:
            _print_json(store, snapshot, component, view, {"path": file, "format": kind, "rows": row_count})
        else:
            say(f"{snapshot}: {plural(row_count, 'row')}, {size(os.path.getsize(file))} in {file}")


def _find(store: Store, inspection: Inspection, ref: str, component: str, run: str | None) -> tuple[Snapshot, RingView]:
    """A ring of a snapshot.

    Raises:
        NotFoundError: the component is none; the message lists those that are.
    """
    from casckpt.replay.view import RingView

    snapshot = inspection.find(ref, chosen_run(inspection, run))
    found = store.restore(snapshot.id, only=[component], allow_mixed=True).get(component)
    if not isinstance(found, RingView):
        raise NotFoundError(f"{component!r} of {snapshot} is no ring: `casckpt show` lists what it is.", name=component)
    return snapshot, found


def _print_json(store: Store, snapshot: Snapshot, component: str, view: RingView, file: dict[str, Any] | None) -> None:
    names = ("kind", "dtype", "shape", "row_size")
    document = {
        "store": store.path,
        "snapshot": snapshot_json(snapshot),
        "component": component,
        "ring": {name: getattr(view, name) for name in ("capacity", "head", "tail", "first", "total")},
        "columns": {name: dict(zip(names, column, strict=True)) for name, column in view.columns.items()},
        "segments": [dict(zip(("first_row", "rows", "step"), each, strict=True)) for each in view.segments()],
        "file": file,
    }
    print_json("replay", document)


def _write(view: RingView, path: str, kind: str, columns: list[str] | None) -> int:
    """Write beside the target, then give the file its name."""
    if os.path.lexists(path):
        raise AlreadyExistsError(f"{path} is there already. Remove it, or name another file.", path=path)
    folder, name = os.path.split(os.path.abspath(path))
    working = os.path.join(folder, f".{name}.{secrets.token_hex(6)}.tmp")
    try:
        row_count = view.write(working, kind, columns)
        os.link(working, path)
    except FileExistsError:
        raise AlreadyExistsError(f"{path} is there already. Remove it, or name another file.", path=path) from None
    finally:
        if os.path.lexists(working):
            os.unlink(working)
    return row_count
