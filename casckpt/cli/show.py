"""`casckpt show`: everything about one snapshot but its data."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from casckpt.cli._screen import (
    add_row,
    chosen_run,
    console,
    json_option,
    looking,
    plain,
    print_json,
    print_table,
    ref_argument,
    run_option,
    say,
    snapshot_json,
    state_text,
    store_argument,
    table,
)
from casckpt.cli._text import moment, number, plural, ratio, size
from casckpt.errors import CasckptError, cut

if TYPE_CHECKING:
    from casckpt.format.entry import Envelope
    from casckpt.store.inspection import Inspection, Part
    from casckpt.store.values import Context, Snapshot

VALUE_WIDTH = 40
_ID_DIGITS = 12


@click.command()
@store_argument
@ref_argument()
@run_option
@click.option("--leaves", is_flag=True, help="Every leaf: path, dtype, shape, bytes; scalars with their values.")
@json_option
def show(path: str, ref: str, run: str | None, leaves: bool, as_json: bool) -> None:
    """Show one snapshot: components with their own steps, sizes, config, environment, metrics, labels, tags."""
    with looking(path) as (store, inspection):
        run = chosen_run(inspection, run)
        snapshot = inspection.find(ref, run)
        parts = inspection.parts(snapshot)
        context, reason = _context(store, snapshot)
        tags = [tag for each in inspection.runs() for tag, target in each.tags.items() if target == snapshot.id]
        envelope = inspection.envelope(snapshot)
        listed = {part.name: _leaves(inspection, snapshot, part.name) for part in parts} if leaves else {}
        if as_json:
            document = _document(snapshot, parts, context, tags, envelope)
            if leaves:
                document["leaves"] = {name: rows for name, (rows, _) in listed.items()}
                document["leaf_errors"] = {name: error for name, (_, error) in listed.items() if error}
            print_json("show", {"store": store.path, **document})
            return
        _print_facts(snapshot, tags, envelope)
        _print_context(context, reason)
        _print_parts(parts)
        for name, (rows, error) in listed.items():
            _print_leaves(name, rows, error)


def _context(store: Any, snapshot: Snapshot) -> tuple[Context | None, str]:
    try:
        return store.context(snapshot.id), ""
    except CasckptError as error:
        return None, error.message


def _leaves(inspection: Inspection, snapshot: Snapshot, name: str) -> tuple[list[dict[str, Any]], str]:
    """The leaves of a component as rows; scalars without values where these cannot be read."""
    try:
        contents = inspection.contents(snapshot, name)
    except CasckptError as error:
        return [], error.message
    values, reason = None, ""
    try:
        values = contents.scalars()
    except CasckptError as error:
        reason = error.message
    rows = []
    for leaf in contents.leaves():
        row = {**leaf.to_dict(), "value": None}
        if leaf.scalar is not None and values is not None:
            value = values[leaf.scalar]
            row["dtype"], row["value"] = type(value).__name__, cut(repr(value), VALUE_WIDTH)
        rows.append({key: row[key] for key in ("path", "kind", "dtype", "shape", "size_bytes", "leaf", "value")})
    return rows, reason


def _document(
    snapshot: Snapshot, parts: list[Part], context: Context | None, tags: list[str], envelope: Envelope
) -> dict[str, Any]:
    return {
        "snapshot": snapshot_json(snapshot),
        "tags": tags,
        "writer": {"host": envelope.host, "pid": envelope.pid},
        "components": {part.name: {**part.facts.to_dict(), **_measures(part)} for part in parts},
        "context": context.to_dict() if context else None,
    }


def _measures(part: Part) -> dict[str, Any]:
    names = ("leaf_count", "chunk_count", "stored_bytes", "state", "reason")
    return {name: getattr(part, name) for name in names}


def _print_facts(snapshot: Snapshot, tags: list[str], envelope: Envelope) -> None:
    kind = "consistent" if snapshot.is_consistent else "mixed: components of different steps"
    has_new = snapshot.new_bytes > 0
    facts = {
        "snapshot": snapshot.id,
        "place": f"run {snapshot.run}, branch {snapshot.branch}, step {snapshot.step}",
        "parent": snapshot.parent or "none",
        "committed": f"{moment(snapshot.created_at)} by process {envelope.pid} on {envelope.host}, "
        f"timeline entry {snapshot.seq}",
        "state": kind + (", retired" if snapshot.is_retired else ""),
        "sizes": f"logical {size(snapshot.logical_bytes)}, new {size(snapshot.new_bytes)}, "
        f"stored {size(snapshot.stored_bytes)}; dedup {ratio(snapshot.dedup_ratio if has_new else None)}, "
        f"compression {ratio(snapshot.compression if has_new else None)}",
        "tags": ", ".join(tags),
        "labels": ", ".join(f"{name}={value}" for name, value in snapshot.labels.items()),
        "metrics": ", ".join(f"{name}={number(value)}" for name, value in snapshot.metrics.items()),
    }
    _print_pairs(facts)


def _print_context(context: Context | None, reason: str) -> None:
    if context is None:
        say(f"config and environment cannot be read: {reason}", style="red")
        return
    versions = ", ".join(f"{name} {version}" for name, version in context.environment.items())
    config = "" if context.config is None else json.dumps(plain(context.config), ensure_ascii=False)
    _print_pairs({"schema": str(context.schema_version), "config": config, "versions": versions})


def _print_pairs(facts: dict[str, str]) -> None:
    grid = table("", "¶")
    grid.show_header = False
    grid.columns[0].style = "dim"
    for name, text in facts.items():
        if text:
            add_row(grid, f"{name:<9}", text)
    print_table(grid)


def _print_parts(parts: list[Part]) -> None:
    found = table(
        "component…", ">step", "necessity", ">leaves", ">chunks", ">logical", ">new", ">on disk", "manifest", "state"
    )
    for part in parts:
        facts = part.facts
        add_row(
            found,
            part.name,
            str(facts.step),
            facts.necessity,
            str(part.leaf_count),
            str(part.chunk_count),
            size(facts.logical_bytes),
            size(facts.new_bytes),
            size(part.stored_bytes),
            facts.manifest[:_ID_DIGITS],
            state_text(part.state),
        )
    console().print()
    print_table(found)
    for part in parts:
        if part.reason:
            say(f"{part.name}: {part.reason}", style="red")


def _print_leaves(name: str, rows: list[dict[str, Any]], error: str) -> None:
    console().print()
    say(f"{name}: {plural(len(rows), 'leaf') if len(rows) == 1 else f'{len(rows)} leaves'}", style="bold")
    if error:
        say(error, style="red")
    if not rows:
        return
    found = table("path…", "kind", "dtype", "shape", ">bytes", "value")
    for row in rows:
        shape = "×".join(map(str, row["shape"])) if row["shape"] else ""
        is_scalar = row["kind"] == "scalar"
        add_row(
            found,
            row["path"],
            row["kind"],
            cut(row["dtype"], VALUE_WIDTH),
            shape,
            "" if is_scalar else str(row["size_bytes"]),
            row["value"] or "",
        )
    print_table(found)
