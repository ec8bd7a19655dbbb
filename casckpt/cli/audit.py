"""`casckpt audit`: leaves that are pickles, and what each would import. Nothing is unpickled.

Exit code 1 when there are some.

A pickle is a program; `pickletools` lists its instructions without running them. Imports are what a hostile pickle
needs: a name that is no part of the training's own libraries is a reason to look closer.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    progress,
    ref_argument,
    run_option,
    say,
    store_argument,
    table,
)
from casckpt.cli._text import plural, size
from casckpt.errors import CasckptError

if TYPE_CHECKING:
    from casckpt.store.contents import Contents
    from casckpt.store.inspection import Inspection
    from casckpt.store.values import Snapshot

_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING", "SHORT_BINSTRING")
_STORES = ("PUT", "BINPUT", "LONG_BINPUT")
_LOADS = ("GET", "BINGET", "LONG_BINGET")


@dataclass(frozen=True)
class OpaqueLeaf:
    """A pickle in a snapshot. `imports` are `module.name`; `error` says why they are not known."""

    snapshot: str
    run: str
    branch: str
    step: int
    path: str
    size_bytes: int
    imports: tuple[str, ...]
    error: str = ""


@click.command()
@store_argument
@ref_argument()
@run_option
@click.option("--all", "look_at_all", is_flag=True, help="Every snapshot of every run, retired ones too.")
@json_option
def audit(path: str, ref: str, run: str | None, look_at_all: bool, as_json: bool) -> None:
    """List leaves that are stored as pickles, and what each would import when it is read. Runs none of them.

    Exit code 0: there are none, 1: there are some, or a component could not be looked at.
    """
    with looking(path) as (store, inspection):
        if look_at_all:
            rows = inspection.history(with_retired=True).rows
            snapshots = [row.snapshot for row in rows if row.snapshot is not None]
            errors = [row.reason for row in rows if row.snapshot is None]
        else:
            snapshots, errors = [inspection.find(ref, chosen_run(inspection, run))], []
        with progress("snapshots") as bar:
            found, component_errors = _look(inspection, snapshots, bar)
        errors += component_errors
        if as_json:
            leaves = [vars(leaf) for leaf in found]
            document = {"ok": not found and not errors, "snapshot_count": len(snapshots), "leaves": leaves}
            print_json("audit", {"store": store.path, **document, "errors": errors})
        else:
            _print(found, errors, len(snapshots))
    finish(_exits.FINE if not found and not errors else _exits.NO)


def _look(inspection: Inspection, snapshots: list[Snapshot], bar: Any) -> tuple[list[OpaqueLeaf], list[str]]:
    """Each distinct component once, as of the newest snapshot that has it."""
    found, errors = [], []
    seen: set[str] = set()
    for done, snapshot in enumerate(snapshots, 1):
        for name, component in snapshot.components.items():
            if component.manifest in seen:
                continue
            seen.add(component.manifest)
            try:
                found += _opaque_leaves(inspection.contents(snapshot, name), snapshot)
            except CasckptError as error:
                errors.append(f"{snapshot.run}/{snapshot.branch}@{snapshot.step}: {error.message}")
        if bar is not None:
            bar(done, len(snapshots))
    return found, errors


def _opaque_leaves(contents: Contents, snapshot: Snapshot) -> list[OpaqueLeaf]:
    found = []
    for leaf in contents.leaves():
        if leaf.kind != "pickle" or leaf.leaf is None:
            continue
        try:
            imports, error = imports_of(_bytes_of(contents, leaf.leaf))
        except CasckptError as trouble:
            imports, error = (), trouble.message
        where = (snapshot.id, snapshot.run, snapshot.branch, snapshot.step)
        found.append(OpaqueLeaf(*where, leaf.path, leaf.size_bytes, imports, error))
    return found


def _bytes_of(contents: Contents, index: int) -> bytes:
    leaf = contents.structure.leaves[index]
    if leaf.block < 0:
        return b""
    return bytes(contents.read_blocks([leaf.block])[leaf.block][leaf.offset : leaf.offset + leaf.shape[0]])


def imports_of(pickled: bytes) -> tuple[tuple[str, ...], str]:
    """What a pickle would import, as `module.name`, and why the list may be short.

    Names are pushed as strings, or fetched from the memo, before STACK_GLOBAL takes the last two; where they come from
    elsewhere they are shown as "?".
    """
    found: list[str] = []
    strings: list[str] = []
    memo: dict[int, str] = {}
    last: str | None = None
    try:
        for code, argument, _ in pickletools.genops(pickled):
            if code.name in ("GLOBAL", "INST"):
                found.append(str(argument).replace(" ", ".", 1))
            elif code.name == "STACK_GLOBAL":
                module, name = ["?", "?", *strings][-2:]
                found.append(f"{module}.{name}")
            elif code.name in ("EXT1", "EXT2", "EXT4"):
                found.append(f"copyreg extension {argument}")
            last = _next_string(code.name, argument, memo, last)
            strings += [last] if last is not None and code.name in (*_STRINGS, *_LOADS) else []
    except (ValueError, EOFError, IndexError, UnicodeDecodeError) as error:
        return tuple(dict.fromkeys(found)), f"not a whole pickle: {error}"
    return tuple(dict.fromkeys(found)), ""


def _next_string(code: str, argument: Any, memo: dict[int, str], last: str | None) -> str | None:
    """The string on top of the stack after an instruction, as far as strings and the memo alone decide it."""
    if code in _STRINGS:
        return str(argument)
    if code == "MEMOIZE":
        memo[len(memo)] = last if last is not None else "?"
        return last
    if code in _STORES:
        memo[int(argument)] = last if last is not None else "?"
        return last
    return memo.get(int(argument), "?") if code in _LOADS else None


def _print(found: list[OpaqueLeaf], errors: list[str], count: int) -> None:
    for error in errors:
        say(error, style="red")
    if not found:
        say(f"{plural(count, 'snapshot')}: no pickles", style="" if errors else "green")
        return
    target = table("newest in", "path…", ">bytes", "imports…")
    for leaf in found:
        where = f"{leaf.run}/{leaf.branch}@{leaf.step}"
        add_row(target, where, leaf.path, size(leaf.size_bytes), ", ".join(leaf.imports) or leaf.error or "nothing")
    print_table(target)
    say(
        f"{plural(count, 'snapshot')}: {len(found)} pickles. They run only with allow_pickle=True.", style="bold yellow"
    )
