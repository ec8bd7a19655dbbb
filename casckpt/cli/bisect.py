"""`casckpt bisect`: the first step at which two lines differ, or at which a check fails."""

from __future__ import annotations

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
    run_option,
    say,
    store_argument,
    table,
)
from casckpt.errors import InvalidInputError

PATHS_SHOWN = 20


@click.command()
@store_argument
@click.argument("a", metavar="[A]", required=False)
@click.argument("b", metavar="[B]", required=False)
@click.option("--check", metavar="COMMAND", help="Find the first step from A to B at which this command fails.")
@run_option
@json_option
def bisect(path: str, a: str | None, b: str | None, check: str | None, run: str | None, as_json: bool) -> None:
    """Find the first step at which the lines that end in A and B differ.

    Without A and B: the current branch against the line that it left, the proof that a resume went on exactly. Steps
    are compared by address; only what differs first is read.

    With --check, COMMAND runs for few of the steps from A (default: the first) to B (default: latest), with
    CASCKPT_STORE, CASCKPT_RUN, CASCKPT_STEP and CASCKPT_REF in its environment. It passes with 0, cannot tell with 125,
    and fails with any other code below 128.

    Exit code 0: no difference, no failure. 1: there is one.
    """
    from casckpt.recovery.bisection import bisect_check, command_check
    from casckpt.store.lines import compare_lines, continuation

    if check is None and (a is None) != (b is None):
        raise InvalidInputError("bisect: give both A and B, or neither for the line that the current branch left.")
    with looking(path) as (store, inspection):
        name = chosen_run(inspection, run)
        first, second = (None if ref is None else inspection.find(ref, name) for ref in (a, b))
        comparison = found = None
        if check is not None:
            last = second or inspection.find("latest", name)
            found = bisect_check(store, command_check(check, store.path), good=first, bad=last)
        elif first is not None:
            comparison = compare_lines(store, first, second)
        else:
            comparison = continuation(store, run=name)
        if as_json:
            parts = {"comparison": comparison, "check": found}
            documents = {key: part and part.to_dict() for key, part in parts.items()}
            print_json("bisect", {"store": store.path, **documents})
        else:
            say(str(found or comparison or "the current branch left no line behind: nothing was committed twice"))
            if comparison is not None and comparison.divergence is not None:
                _print_paths(comparison.divergence.paths)
    is_fine = (found is None or found.first_bad is None) and (comparison is None or comparison.divergence is None)
    finish(_exits.FINE if is_fine else _exits.NO)


def _print_paths(paths: tuple[str, ...]) -> None:
    target = table("differs…")
    for each in paths[:PATHS_SHOWN]:
        add_row(target, each)
    if len(paths) > PATHS_SHOWN:
        add_row(target, f"{len(paths) - PATHS_SHOWN} more: `casckpt diff`", style="dim")
    print_table(target)
