"""`casckpt du`: where the bytes of a store are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from casckpt.cli._screen import (
    add_row,
    console,
    json_option,
    looking,
    print_json,
    print_table,
    progress,
    say,
    store_argument,
    table,
)
from casckpt.cli._text import plural, ratio, share, size

if TYPE_CHECKING:
    from casckpt.store.survey import Survey

UNNAMED_SHOWN = 5


@click.command()
@store_argument
@json_option
def du(path: str, as_json: bool) -> None:
    """Say where the bytes are: by run and component, by kind of file, and what nothing refers to.

    A stored byte counts for the first snapshot that needs it. Sizes are apparent sizes of files.
    """
    from casckpt.store.survey import survey

    with looking(path) as (store, _):
        with progress("snapshots") as bar:
            found = survey(store, bar)
        if as_json:
            print_json("du", {"store": store.path, **document(found)})
            return
    if found.shares:
        print_table(_shares(found))
        console().print()
    print_table(_files(found))
    _print_notes(found)


def document(found: Survey) -> dict[str, Any]:
    """A survey with the counts of files spelled out."""
    kinds = ("packs", "timeline", "index", "tmp", "document", "other")
    files = {kind: dict(zip(("files", "bytes"), getattr(found, kind), strict=True)) for kind in kinds}
    rest = {key: value for key, value in found.to_dict().items() if key not in kinds}
    rest["unnamed_packs"] = [{"pack": pack, "bytes": count} for pack, count in found.unnamed_packs]
    return {"files": files, **rest}


def _shares(found: Survey) -> Any:
    target = table("run", "component…", ">snapshots", ">logical", ">new", ">stored", ">dedup", ">compr.")
    for run in dict.fromkeys(each.run for each in found.shares):
        rows = [each for each in found.shares if each.run == run]
        for each in rows:
            _add_share(target, run, each.component, str(each.snapshot_count), [each])
        if len(rows) > 1:
            _add_share(target, run, "all components", "", rows, style="bold")
    return target


def _add_share(target: Any, run: str, name: str, count: str, rows: list[Any], style: str | None = None) -> None:
    logical, new, stored = (sum(getattr(row, f"{kind}_bytes") for row in rows) for kind in ("logical", "new", "stored"))
    sizes = (size(logical), size(new), size(stored))
    ratios = (ratio(logical / new if new else None), ratio(new / stored if new and stored else None))
    add_row(target, run, name, count, *sizes, *ratios, style=style)


def _files(found: Survey) -> Any:
    target = table("on disk", ">files", ">bytes", ">share")
    rows = [(kind, *getattr(found, kind)) for kind in ("packs", "timeline", "index", "tmp", "document", "other")]
    for kind, count, total in rows:
        if count or kind in ("packs", "timeline"):
            add_row(target, kind, str(count), size(total), share(total, found.total_bytes))
    add_row(target, "all", str(sum(row[1] for row in rows)), size(found.total_bytes), "", style="bold")
    return target


def _print_notes(found: Survey) -> None:
    console().print()
    if found.retired_bytes:
        say(f"{size(found.retired_bytes)} are held by retired snapshots alone")
    say(f"{size(found.unreferenced_bytes)} of records are needed by no readable snapshot")
    if found.duplicate_bytes:
        say(f"{size(found.duplicate_bytes)} are further records of objects that have one")
    if found.unnamed_packs:
        total = sum(count for _, count in found.unnamed_packs)
        names = ", ".join(pack[:12] for pack, _ in found.unnamed_packs[:UNNAMED_SHOWN])
        more = "" if len(found.unnamed_packs) <= UNNAMED_SHOWN else " …"
        why = "no readable entry names" if found.unreadable_count else "no commit names, since it never finished"
        say(f"{plural(len(found.unnamed_packs), 'pack')} ({size(total)}) that {why}: {names}{more}")
    for left in found.leftovers:
        owner = "" if left.pid is None else f", process {left.pid}"
        say(f"tmp/{left.name}: {size(left.size_bytes)}, owner {left.owner}{owner}")
    if found.unreadable_count:
        count = plural(found.unreadable_count, "timeline entry")
        text = f"{count} cannot be read; what only their snapshots need counts as needed by none"
        say(text, style="red")
