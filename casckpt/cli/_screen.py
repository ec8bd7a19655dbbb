"""What every command does alike: options, opening a store to look into it, JSON, tables and progress.

JSON goes to standard output as one document: `{"command": …, "json_version": 1, …}`. Keys are only ever added. Bytes
are hex, times ISO 8601, and numbers that JSON lacks the strings "NaN", "Infinity" and "-Infinity".

Tables fit a terminal of 100 columns; without a terminal nothing is cut. Progress is drawn on standard error, and only
when that is a terminal.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

import click

from casckpt.cli import _exits
from casckpt.cli._text import shown
from casckpt.errors import BusyError, NotFoundError, ReadOnlyError, StorageError, UnsupportedFormatError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from casckpt.store.inspection import Inspection
    from casckpt.store.store import Store
    from casckpt.store.values import Snapshot

JSON_VERSION = 1
COLUMN_GAP, COLUMN_WIDTH_MIN = 2, 6
_WIDTH_WITHOUT_TERMINAL = 10_000

STATE_STYLES = {
    "consistent": "green",
    "whole": "green",
    "mixed": "yellow",
    "retired": "dim",
    "incomplete": "bold yellow",
    "damaged": "bold red",
}

store_argument = click.argument("path", metavar="STORE")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
run_option = click.option("--run", metavar="R", help="Name of the run. [default: the one written last]")


def ref_argument(name: str = "ref", *, is_required: bool = False) -> Callable[[Any], Any]:
    """A reference to a snapshot; "latest" unless one is required."""
    if is_required:
        return click.argument(name, metavar=name.upper())
    return click.argument(name, metavar=f"[{name.upper()}]", default="latest")


# --- stores ---


@contextlib.contextmanager
def looking(path: str, *, may_note_damage: bool = False) -> Iterator[tuple[Store, Inspection]]:
    """A store opened read-only: nothing of it is changed or built, and a training may go on meanwhile.

    With `may_note_damage`, opened for writing where that can be, so that its index remembers what is found.
    """
    from casckpt.store.inspection import Inspection

    with _opened(path, may_note_damage) as store:
        yield store, Inspection(store)


def _opened(path: str, may_note_damage: bool) -> Store:
    if may_note_damage and os.access(path, os.W_OK):
        with contextlib.suppress(ReadOnlyError, BusyError, StorageError, UnsupportedFormatError):
            return open_named(path)
    return open_named(path, read_only=True)


def open_named(path: str, **options: Any) -> Store:
    """The store that a person named. What a program would do where there is none is no advice to a person.

    Raises:
        As `casckpt.open`.
    """
    from casckpt.store.opening import open_store

    try:
        return open_store(path, **options)
    except NotFoundError as error:
        if "path" not in error.facts:
            raise
        raise NotFoundError(
            f"{os.path.abspath(path)}: no store here. Check the path: a store is a folder with a casckpt.json in it.",
            **error.facts,
        ) from error


def chosen_run(inspection: Inspection, run: str | None) -> str:
    """The run that is meant: the one named, else the one written last ("main" in an empty store)."""
    return inspection.check_run(run) if run is not None else inspection.last_run() or "main"


# --- JSON ---


def print_json(command: str, document: Mapping[str, Any]) -> None:
    """The one document of a command with `--json`."""
    whole = {"command": command, "json_version": JSON_VERSION, **document}
    click.echo(json.dumps(plain(whole), indent=2, ensure_ascii=True, allow_nan=False))


def plain(value: Any) -> Any:
    """A value as JSON can say it; see the module."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def snapshot_json(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot with its ratios; these are null where nothing was new."""
    has_new = snapshot.new_bytes > 0
    ratios = (snapshot.dedup_ratio, snapshot.compression) if has_new else (None, None)
    return {**snapshot.to_dict(), "dedup_ratio": ratios[0], "compression": ratios[1]}


# --- tables ---


def console() -> Console:
    """Standard output. NO_COLOR, TERM and COLUMNS are honoured."""
    from rich.console import Console

    found = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    if not found.is_terminal:
        found.width = _WIDTH_WITHOUT_TERMINAL
    return found


def table(*columns: str) -> Table:
    """A plain table; print it with `print_table`.

    A heading that starts with ">" is right-aligned; a column whose heading ends with "…" is cut, and one with "¶"
    wrapped, where the terminal is too narrow. The others keep their width.
    """
    from rich.table import Table

    found = Table(box=None, pad_edge=False, header_style="dim", show_header=any(columns))
    for column in columns:
        wraps = column.endswith("¶")
        found.add_column(
            column.lstrip(">").rstrip("…¶"),
            justify="right" if column.startswith(">") else "left",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
            ratio=1 if column.endswith(("…", "¶")) else None,  # only a mark: the table is not expanded
        )
    return found


def print_table(target: Table) -> None:
    """Print a table on standard output: what its elastic columns lack in room, they share."""
    from rich.cells import cell_len

    screen = console()
    natural = [
        max(cell_len(line) for cell in (column.header, *column.cells) for line in str(cell).split("\n") or [""])
        for column in target.columns
    ]
    elastic = [at for at, column in enumerate(target.columns) if column.ratio is not None]
    room = screen.width - COLUMN_GAP * (len(natural) - 1) - sum(natural) + sum(natural[at] for at in elastic)
    for left, at in zip(range(len(elastic), 0, -1), sorted(elastic, key=natural.__getitem__), strict=True):
        given = min(natural[at], max(room // left, COLUMN_WIDTH_MIN))
        room -= given
        natural[at] = given
    for column, width in zip(target.columns, natural, strict=True):
        column.width = width
    if screen.is_terminal:
        screen.print(target)
        return
    with screen.capture() as captured:
        screen.print(target)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))  # files want no padding


def state_text(state: str) -> Text:
    """A state in its colour."""
    from rich.text import Text

    return Text(state, style=STATE_STYLES.get(state, ""))


def add_row(target: Table, *cells: RenderableType, style: str | None = None) -> None:
    """A row; text in it is taken as it is, without markup, and made harmless."""
    from rich.text import Text

    target.add_row(*[Text(shown(cell)) if isinstance(cell, str) else cell for cell in cells], style=style)


def say(text: str, *, style: str | None = None, target: Console | None = None) -> None:
    """A line or paragraph, wrapped by words on a terminal only."""
    from rich.text import Text

    (target or console()).print(Text(shown(text), style=style or ""), soft_wrap=False)


# --- progress ---


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error, moved by calling it with (done, in all); None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def finish(code: int) -> None:
    """End the command with an exit code."""
    if code != _exits.FINE:
        click.get_current_context().exit(code)


def let_go_of(stream: TextIO) -> None:
    """Nobody reads it any more: what is left in its buffer must not raise when the interpreter flushes it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
