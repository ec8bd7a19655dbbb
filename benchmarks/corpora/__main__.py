"""`python -m benchmarks.corpora`: build series, list them, and say how much changes between their commits."""

from __future__ import annotations

import argparse
import sys

from benchmarks.corpora import NAMES, build


def main(arguments: list[str]) -> int:
    """Run one command. Building what is there already takes no time."""
    options = _parser().parse_args(arguments)
    if options.command == "list":
        print(*NAMES, sep="\n")
        return 0
    for name in options.names:
        series = build(name, options.folder, quick=options.quick)
        total = sum(series.raw_bytes(index) for index in range(series.count))
        print(f"{name}: {series.count} commits, {total:,} bytes, built in {series.facts['build_s']} s", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpora", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the names of all series")
    building = commands.add_parser("build", help="build series that are not there yet")
    building.add_argument("names", nargs="+", metavar="NAME", choices=NAMES)
    building.add_argument("--folder", required=True, help="where the series lie, each in a folder of its own")
    building.add_argument("--quick", action="store_true", help="tiny series of the same form, in seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
