"""`python -m benchmarks.corpora`: build and list series; say what changes between commits and what that takes."""

from __future__ import annotations

import argparse
import sys

from benchmarks.corpora import NAMES, build, load
from benchmarks.corpora._generic import generic_share
from benchmarks.corpora._survey import changes


def main(arguments: list[str]) -> int:
    """Run one command. Building what is there already takes no time."""
    options = _parser().parse_args(arguments)
    try:
        {"list": _list, "build": _build, "changes": _changes, "difference": _difference}[options.command](options)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _list(options: argparse.Namespace) -> None:
    print(*NAMES, sep="\n")


def _build(options: argparse.Namespace) -> None:
    for name in options.names:
        series = build(name, options.folder, quick=options.quick)
        total = sum(series.raw_bytes(index) for index in range(series.count))
        print(f"{name}: {series.count} commits, {total:,} bytes, built in {series.facts['build_s']} s", flush=True)


def _changes(options: argparse.Namespace) -> None:
    for name in options.names:
        for kind, change in changes(load(options.folder, name)).items():
            print(f"{name} {kind}: {change.share:.2%} of {change.element_count:,} elements changed", flush=True)


def _difference(options: argparse.Namespace) -> None:
    for name in options.names:
        print(f"{name}: {generic_share(load(options.folder, name), options.limit):.4f} of raw", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpora", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the names of all series")
    building = commands.add_parser("build", help="build series that are not there yet")
    building.add_argument("--quick", action="store_true", help="tiny series of the same form, in seconds")
    changing = commands.add_parser("changes", help="how much changes from commit to commit, by component")
    generic = commands.add_parser("difference", help="what the plainest lossless differences would take")
    generic.add_argument("--limit", type=int, metavar="N", help="only the first N commits")
    for command in (building, changing, generic):
        command.add_argument("names", nargs="+", metavar="NAME", choices=NAMES)
        command.add_argument("--folder", required=True, help="where the series lie, each in a folder of its own")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
