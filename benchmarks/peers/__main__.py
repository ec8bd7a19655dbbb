"""`python -m benchmarks.peers`: run peers over series, print the tables, and write all figures as JSON if asked."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console

from benchmarks._machine import facts, file_system
from benchmarks.corpora import NAMES
from benchmarks.peers import report
from benchmarks.peers.registry import DEFAULT, PEERS
from benchmarks.peers.results import CorpusResult, corpus_result
from benchmarks.peers.run import GB, Options, described, run_corpus

WIDTH = 250  # of the tables where there is no terminal


def main(arguments: list[str]) -> int:
    """Run, or print tables again. The exit status is 0 whatever the figures are."""
    options = _parser().parse_args(arguments)
    if options.table:
        with open(options.table) as stream:
            results = [corpus_result(each) for each in json.load(stream)["corpora"]]
        print(report.markdown(results), end="")
        if options.plots:
            from benchmarks.peers import plots  # loads matplotlib

            plots.draw(results, options.plots)
        return 0
    if not (options.list or (options.corpus and options.folder and options.work)):
        print("give --corpus, --folder and --work; or --list; or --table FILE", file=sys.stderr)
        return 2
    names = {"all": list(PEERS), None: list(DEFAULT)}.get(options.peers) or options.peers.split(",")
    corpora = (options.corpus or "").split(",")
    unknown = [name for name in names if name not in PEERS] + [
        name for name in corpora if name not in NAMES and not options.list
    ]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; peers: {', '.join(PEERS)}; series: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    if options.list:
        _list(names)
        return 0
    return _run(arguments, options, corpora, names)


def _run(arguments: list[str], options: argparse.Namespace, corpora: list[str], names: list[str]) -> int:
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    os.makedirs(options.work, exist_ok=True)
    machine = facts(options.work)
    for name, value in machine.items():
        console.print(f"{name:12} {value}", highlight=False)
    if file_system(options.work) in ("tmpfs", "ramfs"):
        print(f"{options.work} is in memory: figures of durable commits mean nothing there", file=sys.stderr)
    chosen = Options(
        corpora=options.folder,
        work=options.work,
        disk_bytes=int(options.disk_gb * GB),
        limit=options.limit,
        restore_count=options.restores,
    )
    results: list[CorpusResult] = []
    for corpus in corpora:
        results.append(run_corpus(corpus, names, chosen, lambda line: print(line, file=sys.stderr, flush=True)))
        if options.json:  # after each series: an interrupted run keeps what it has
            _write_json(options.json, arguments, machine, results)
        console.print(report.console_table(results[-1]))
        for remark in report.remarks(results[-1]):
            console.print(remark, highlight=False)
    return 0


def _list(names: list[str]) -> None:
    """What each peer is, and whether it runs here."""
    for name in names:
        peer = described(name, Options(corpora="", work=""))
        state = f"not here: {peer.failure}" if peer.failure else f"version {peer.version}"
        print(f"{name}: {peer.product} ({peer.level or 'defaults'}), {state}; durability: {peer.durability}")


def _write_json(path: str, arguments: list[str], machine: dict[str, str], results: list[CorpusResult]) -> None:
    document: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.peers", *arguments]),
        "machine": machine,
        "corpora": [asdict(result) for result in results],
    }
    with open(path, "w") as stream:
        json.dump(document, stream, indent=1, ensure_ascii=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--corpus", metavar="NAME[,NAME]", help="series that `python -m benchmarks.corpora` built")
    parser.add_argument("--folder", help="where the series lie")
    parser.add_argument("--work", help="where to write: a folder on a real disk; what the run writes there is removed")
    parser.add_argument("--peers", help=f"names with commas between, or all; default: {','.join(DEFAULT)}")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N commits of each series")
    parser.add_argument(
        "--restores", type=int, default=5, metavar="N", help="snapshots to restore (default 5, least 3)"
    )
    parser.add_argument("--disk-gb", type=float, default=15.0, help="disk that a run may take (default 15)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there too")
    parser.add_argument("--table", metavar="FILE", help="print the tables of such a file in Markdown, and run nothing")
    parser.add_argument("--plots", metavar="DIR", help="with --table: draw a picture of each series there")
    parser.add_argument("--list", action="store_true", help="say which peers there are, and which can run here")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
