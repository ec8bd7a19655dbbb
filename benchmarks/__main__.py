"""`python -m benchmarks`: run rows, print them as a table, and write them as JSON if asked."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import chains, commit, engine, footprint, kinds, replay, replay_peers, restore, scale, stall
from benchmarks._harness import MIB, Measurement, Settings
from benchmarks._machine import facts, file_system

Row = Callable[[Settings], Iterator[Measurement]]

ROWS: dict[str, Row] = {
    "T1": commit.new_content,
    "T2": commit.unchanged,
    "T3": stall.stall,
    "T3w": stall.training,
    "T3e": engine.first_save,
    "T3we": engine.training,
    "T4": restore.restore,
    "T5": chains.chains,
    "T5k": kinds.kinds,
    "T7": commit.light,
    "T8": scale.scale,
    "T9": replay.replay,
    "T9p": replay_peers.peers,
    "R01": replay.pool,
    "T10": footprint.memory,
    "T10r": replay.memory,
    "T11": footprint.startup,
    "T12": footprint.overhead,
}

QUICK: dict[str, Any] = {
    "size_bytes": 64 * MIB,
    "pair_count": 5,
    "commit_count": 30,
    "history_count": 500,
    "stall_count": 10,
    "training_s": 0.0,
    "start_count": 5,
}


def main(arguments: list[str]) -> int:
    """Run the rows asked for. The exit status is 0 whatever the figures are: a busy machine is no failure."""
    options = _parser().parse_args(arguments)
    names = options.rows.split(",") if options.rows else list(ROWS)
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        print(f"unknown row {', '.join(unknown)}; there are {', '.join(ROWS)}", file=sys.stderr)
        return 2
    settings = _settings(options)
    machine = facts(settings.folder)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for name, value in machine.items():
        console.print(f"{name:12} {value}", highlight=False)
    found: list[Measurement] = []
    for name in names:
        for measurement in ROWS[name](settings):
            found.append(measurement)
            print(_line(measurement), file=sys.stderr, flush=True)
            if options.json:  # after each figure: an interrupted run keeps what it has
                _write_json(options.json, arguments, machine, settings, found)
    console.print(_table(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rows", help=f"which, with commas between: {','.join(ROWS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small states, few repetitions, no training row")
    parser.add_argument("--size-mb", type=int, help="bytes of the large states, in MiB (default 512; quick 64)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to write: a folder on a real disk")
    parser.add_argument("--corpora", metavar="DIR", help="where T5 finds or builds its series (default: tiny ones)")
    parser.add_argument("--json", metavar="FILE", help="write everything there too")
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    if file_system(options.folder) in ("tmpfs", "ramfs"):
        print(
            f"{options.folder} is in memory: figures of durable writes mean nothing there (--folder)", file=sys.stderr
        )
    chosen = dict(QUICK) if options.quick else {}
    if options.size_mb:
        chosen["size_bytes"] = options.size_mb * MIB
    return Settings(folder=options.folder, corpora=options.corpora, **chosen)


def _table(found: list[Measurement]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("row", "case", "subject", "baseline", "figure", "spread", "n", "target", "reached"):
        table.add_column(title, justify="right" if title in ("figure", "spread", "n", "target") else "left")
    for each in found:
        target = "" if each.target is None else f"{'≥' if each.is_floor else '≤'} {each.target:g}"
        table.add_row(
            each.row,
            each.case,
            each.subject,
            each.baseline,
            f"{each.value:.3g} {each.unit}",
            f"{each.low:.3g} – {each.high:.3g}",
            str(each.sample_count),
            target,
            {None: "", True: "yes", False: "NO"}[each.is_reached],
        )
    return table


def _line(each: Measurement) -> str:
    return f"{each.row}: {each.case}: {each.value:.3g} {each.unit} ({each.low:.3g} – {each.high:.3g})"


def _write_json(
    path: str, arguments: list[str], machine: dict[str, str], settings: Settings, found: list[Measurement]
) -> None:
    document = {
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "machine": machine,
        "settings": asdict(settings),
        "rows": [asdict(each) | {"is_reached": each.is_reached} for each in found],
    }
    with open(path, "w") as stream:
        json.dump(document, stream, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
