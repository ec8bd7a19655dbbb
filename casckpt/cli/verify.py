"""`casckpt verify`: damage, and which steps and components need what is damaged. Exit code 1 when there is some."""

from __future__ import annotations

from collections.abc import Iterable
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
    progress,
    say,
    state_text,
    store_argument,
    table,
)
from casckpt.cli._text import plural, size

if TYPE_CHECKING:
    from casckpt.store.inspection import Row
    from casckpt.store.values import VerifyReport

STEPS_SHOWN = 6
_HINT = " Run `casckpt verify`."  # of messages that are written for other commands


@click.command()
@store_argument
@click.option("--read-data", is_flag=True, help="Read and hash every object; costs reading the store.")
@json_option
def verify(path: str, read_data: bool, as_json: bool) -> None:
    """Look for damage, and name each step and component that has it. Repairs nothing.

    Without --read-data: timeline entries are decoded and their links checked, descriptions of components are read, and
    every object must lie in a file of the right size. Exit code 0: no damage found, 1: damage found.

    Damaged objects are remembered in the index, so that later commits store them again; where the store cannot be
    written, it is only read.
    """
    with looking(path, may_note_damage=True) as (store, inspection):
        with progress("objects read") as bar:
            report = store.verify(read_data=read_data, progress=bar)
        flawed = [row for row in inspection.history(with_retired=True).rows if row.reason] if not report.ok else []
        affected = affected_steps(report, flawed)
        if as_json:
            document = {"store": store.path, "ok": report.ok, **report.to_dict(), "affected": affected}
            print_json("verify", document)
        else:
            _print(report, affected, store.path)
    finish(_exits.FINE if report.ok else _exits.NO)


def affected_steps(report: VerifyReport, flawed: Iterable[Row]) -> list[dict[str, Any]]:
    """Each snapshot that needs something damaged, with its components; all of them where it cannot be read itself."""
    found: dict[str, dict[str, Any]] = {}
    for problem in report.problems:
        for run, branch, step, component, snapshot_id in problem.snapshots:
            row = found.setdefault(
                snapshot_id, {"run": run, "branch": branch, "step": step, "id": snapshot_id, "components": []}
            )
            if component not in row["components"]:
                row["components"].append(component)
    for each in flawed:
        if each.id and each.snapshot is None:
            place = {"run": each.run, "branch": each.branch, "step": each.step, "id": each.id}
            found[each.id] = {**place, "components": ["*"]}
    return sorted(found.values(), key=lambda row: (row["run"], row["step"], row["branch"]))


def _print(report: VerifyReport, affected: list[dict[str, Any]], path: str) -> None:
    how = f"{size(report.read_bytes)} read and hashed" if report.is_data_read else "data not read"
    say(f"{path}: {plural(report.snapshot_count, 'snapshot')}, {plural(report.object_count, 'object')}, {how}")
    if report.ok:
        say("no damage found", style="green")
        if not report.is_data_read:
            say("Add --read-data to read and hash every object.", style="dim")
        return
    say(f"{plural(len(report.problems), 'problem')} found", style="bold red")
    problems = table("kind", "what is wrong¶")
    for problem in report.problems:
        kind = "incomplete" if problem.kind in ("missing", "incomplete") else "damaged"
        text = state_text(kind)
        text.plain = problem.kind
        add_row(problems, text, problem.message.replace(_HINT, ""))
    print_table(problems)
    console().print()
    if affected:
        print_table(_affected_table(affected))
    whole = report.snapshot_count - len(affected)
    say(f"{plural(whole, 'snapshot')} of {report.snapshot_count} need nothing of what is damaged or missing.")
    otherwise = ", or go on from a whole step (`casckpt log`)" if whole > 0 else ": no step is whole without them"
    say(f"Copy the named files back from another copy of this store{otherwise}.")


def _affected_table(affected: list[dict[str, Any]]) -> Any:
    """One row per component of a branch: the steps that have it damaged."""
    steps: dict[tuple[str, str, str], list[int]] = {}
    for row in affected:
        for component in row["components"]:
            steps.setdefault((row["run"], row["branch"], component), []).append(row["step"])
    found = table("run", "branch", "component", ">snapshots", "steps…")
    for (run, branch, component), numbers in sorted(steps.items()):
        name = "all: the snapshot cannot be read" if component == "*" else component
        add_row(found, run, branch, name, str(len(numbers)), _steps(numbers))
    return found


def _steps(numbers: list[int]) -> str:
    if len(numbers) <= STEPS_SHOWN:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]}, {numbers[1]}, … {numbers[-2]}, {numbers[-1]}"
