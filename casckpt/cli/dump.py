"""`casckpt dump`: any record of a store as text, damaged or not. Exit code 1 when one of its checks fails."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import click

from casckpt.cli import _exits
from casckpt.cli._screen import (
    add_row,
    console,
    finish,
    json_option,
    looking,
    print_json,
    print_table,
    say,
    store_argument,
    table,
)
from casckpt.cli._text import plural, size
from casckpt.errors import InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from casckpt.store.dissect import Dissection

BYTES_SHOWN = 512
PARTS_SHOWN = 40
_BYTES_PER_LINE = 32
_HEX = re.compile(r"[0-9a-f]{8,64}")
_KINDS = ("entry", "pack", "object")


@click.command()
@store_argument
@click.argument("thing")
@click.option("--all", "show_all", is_flag=True, help="Every record and byte, not only the first ones.")
@json_option
def dump(path: str, thing: str, show_all: bool, as_json: bool) -> None:
    """Print any record of a store as text: fields, and which checks hold. Works on damaged ones as far as it can.

    THING is a timeline entry's number, 8 or more digits of a pack id or of an object's address (a snapshot, a manifest,
    a structure, a chunk), "document" or "index". "entry:", "pack:" or "object:" before it says which is meant.

    Exit code 0: every check holds, 1: one does not.
    """
    found = dissect(os.path.abspath(path), thing)
    if as_json:
        checks = [{"what": check.what, "ok": check.is_ok, "found": check.found} for check in found.checks]
        facts = {"thing": found.thing, "where": found.where, "size_bytes": found.size_bytes, "ok": found.is_ok}
        print_json("dump", {**facts, "checks": checks, "fields": found.fields, "parts": found.parts})
    else:
        _print(found, show_all)
    finish(_exits.FINE if found.is_ok else _exits.NO)


def dissect(root: str, thing: str) -> Dissection:
    """The record that a name means.

    Raises:
        NotFoundError, InvalidInputError: nothing or several things are meant.
    """
    from casckpt.store import dissect as dissecting

    kind, colon, name = thing.partition(":")
    kind, name = (kind, name) if colon and kind in _KINDS else ("", thing)
    name = name.lower()
    if thing == "document":
        return dissecting.dissect_document(root)
    if thing == "index":
        return dissecting.dissect_index(root, _store_id(root))
    if kind in ("", "entry") and name.isascii() and name.isdigit() and len(name) <= 20:
        return dissecting.dissect_entry(root, int(name))
    if kind == "entry" or not _HEX.fullmatch(name):
        raise InvalidInputError(
            f"{thing!r}: expected the number of a timeline entry, 8 to 64 hex digits of a pack or object, 'document' "
            "or 'index'.",
            thing=thing,
        )
    if kind in ("", "pack") and len(name) <= 32:
        try:
            return dissecting.dissect_pack(root, dissecting.find_pack(root, name))
        except NotFoundError:
            if kind:
                raise
    with looking(root) as (store, _):
        return dissecting.dissect_object(store, name)


def _store_id(root: str) -> Any:
    from casckpt.ids import StoreId
    from casckpt.storage.fs import LocalFileSystem
    from casckpt.store.opening import find_document

    document = find_document(LocalFileSystem(), root)
    if document is None:
        raise NotFoundError(f"{root}: no store here. Check the path.", path=root)
    return StoreId(bytes.fromhex(document.store_id))


def _print(found: Dissection, show_all: bool) -> None:
    say(f"{found.thing}, {size(found.size_bytes)}", style="bold")
    say(found.where, style="dim")
    limit = None if show_all else BYTES_SHOWN
    for line in lines_of(found.fields, limit):
        say(line)
    for check in found.checks:
        text = f"{'ok' if check.is_ok else 'FAILED'}  {check.what}" + (f": {check.found}" if check.found else "")
        say(text, style="green" if check.is_ok else "bold red")
    if found.parts:
        _print_parts(found.parts if show_all else found.parts[:PARTS_SHOWN], len(found.parts))


def _print_parts(parts: list[dict[str, Any]], count: int) -> None:
    console().print()
    target = table(">offset", "kind", ">codec", ">plain", ">stored", ">bases", "object", "payload", "where…")
    for part in parts:
        if "error" in part:
            add_row(target, str(part["offset"]), *[""] * 5, part["error"], "", str(part.get("where", "")), style="red")
            continue
        codec = f"{part['codec']}.{part['codec_version']}"
        numbers = (codec, str(part["plain_size"]), str(part["stored_size"]), str(len(part["bases"])))
        state = "ok" if part["is_payload_good"] else "DAMAGED"
        address = part["object_id"].hex()[:16]
        add_row(target, str(part["offset"]), part["kind"], *numbers, address, state, str(part.get("where", "")))
    print_table(target)
    if len(parts) < count:
        say(f"{plural(count, 'record')}, {count - len(parts)} more: --all", style="dim")


def lines_of(value: Any, limit: int | None, indent: str = "") -> list[str]:
    """Fields as indented lines; opaque bytes as hex, at most `limit` of them."""
    if isinstance(value, dict):
        lines = []
        for name, item in value.items():
            lines += _named(str(name), item, limit, indent)
        return lines or [f"{indent}{{}}"]
    if isinstance(value, list):
        lines = []
        for number, item in enumerate(value):
            lines += _named(str(number), item, limit, indent)
        return lines or [f"{indent}[]"]
    if isinstance(value, bytes):
        shown = value if limit is None else value[:limit]
        rows = range(0, len(shown), _BYTES_PER_LINE)
        lines = [f"{indent}{at:08x}  {shown[at : at + _BYTES_PER_LINE].hex(' ', 4)}" for at in rows]
        return lines + ([f"{indent}… {len(value) - len(shown)} more bytes: --all"] if len(shown) < len(value) else [])
    return [f"{indent}{line}" for line in str(value).split("\n")]


def _named(name: str, item: Any, limit: int | None, indent: str) -> list[str]:
    if isinstance(item, bytes) and len(item) <= _BYTES_PER_LINE:
        is_text = item and all(32 <= byte < 127 for byte in item)
        return [f"{indent}{name}: {item.decode() if is_text else item.hex() or 'empty'}"]
    if isinstance(item, dict | list | bytes) and item:
        if isinstance(item, list) and not any(isinstance(each, dict | list | bytes) for each in item):
            return [f"{indent}{name}: {', '.join(map(str, item))}"]
        return [f"{indent}{name}:", *lines_of(item, limit, f"{indent}  ")]
    text = str(item) if not isinstance(item, dict | list | bytes) else "none"
    return (
        [f"{indent}{name}: {text}"] if "\n" not in text else [f"{indent}{name}:", *lines_of(text, limit, f"{indent}  ")]
    )
