"""`casckpt doctor`: what is wrong with a store or this machine, and what to do. Exit code 1 when there is a problem.

Looks at what a store depends on, then at the store from outside (document, index, locks, leftovers), and last opens it
read-only for a verification without data. Writes small probes into the store's `tmp/`, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import click

from casckpt.cli import _exits
from casckpt.cli._checks import OK, PROBLEM, WARN, Finding
from casckpt.cli._screen import add_row, finish, json_option, looking, print_json, print_table, say, table
from casckpt.cli._text import plural, size
from casckpt.errors import CasckptError

KNOWN_NAMES = {"casckpt.json", "packs", "timeline", "index", "tmp", "leases", "trash", "quarantine", "reserve"}
_STYLES = {OK: "green", WARN: "yellow", PROBLEM: "bold red"}


@click.command()
@click.argument("path", metavar="[STORE]", required=False)
@json_option
def doctor(path: str | None, as_json: bool) -> None:
    """Say what is wrong with a store or this machine, and what to do. Repairs nothing.

    Without STORE: only this machine. Exit code 0: no problem (perhaps warnings), 1: a problem.
    """
    findings = list(examine(None if path is None else os.path.abspath(path)))
    problems = sum(1 for finding in findings if finding.level == PROBLEM)
    if as_json:
        document = {"store": path, "ok": problems == 0, "findings": [finding._asdict() for finding in findings]}
        print_json("doctor", document)
    else:
        _print(findings, problems)
    finish(_exits.NO if problems else _exits.FINE)


def examine(root: str | None) -> Iterator[Finding]:
    """All findings, one after the other."""
    from casckpt.cli import _checks
    from casckpt.ids import StoreId
    from casckpt.storage.fs import LocalFileSystem
    from casckpt.store.opening import find_document

    yield from _checks.environment()
    if root is None:
        return
    try:
        document = find_document(LocalFileSystem(), root)
    except CasckptError as error:
        yield Finding("format", PROBLEM, error.message)
        return
    if document is None:
        is_there = os.path.isdir(root)
        text = f"{root}: {'a folder without a store' if is_there else 'no such folder'}"
        yield Finding("store", PROBLEM, text, "Check the path: a store is a folder with a casckpt.json in it.")
        return
    yield from _checks.document(document)
    yield from _checks.folder(root)
    yield from _checks.strangers(os.listdir(root), KNOWN_NAMES)
    yield from _checks.index(root, StoreId(bytes.fromhex(document.store_id)))
    yield from _leftovers(root)
    yield from _checks.timeline(lambda: _problems(root))


def _problems(root: str) -> list[tuple[str, str]]:
    """What a verification without data finds, each as (kind, message)."""
    with looking(root) as (store, _):
        return [(problem.kind, problem.message) for problem in store.verify(read_data=False).problems]


def _leftovers(root: str) -> Iterator[Finding]:
    from casckpt.store.survey import leftovers

    found = list(leftovers(root))
    for owner, level, hint in (
        ("dead", WARN, "Harmless: a writer died. They may be removed."),
        ("unknown", WARN, "Made on another machine or before a reboot: remove them once no writer is left there."),
        ("running", OK, ""),
    ):
        files = [each for each in found if each.owner == owner]
        if files:
            total = size(sum(each.size_bytes for each in files))
            text = f"{plural(len(files), 'file')} ({total}) in tmp/, owner {owner}: {files[0].name}"
            yield Finding("leftovers", level, text, hint)


def _print(findings: list[Finding], problems: int) -> None:
    target = table("", "", "¶")
    target.show_header = False
    from rich.text import Text

    for finding in findings:
        level = Text(finding.level, style=_STYLES[finding.level])
        text = f"{finding.text}\n→ {finding.next_step}" if finding.next_step else finding.text
        add_row(target, level, finding.topic, text)
    print_table(target)
    warnings = sum(1 for finding in findings if finding.level == WARN)
    style = "bold red" if problems else "yellow" if warnings else "green"
    say(f"{plural(problems, 'problem')}, {plural(warnings, 'warning')}", style=style)
