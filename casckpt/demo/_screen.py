"""What a person sees: live progress, and the tables at the end.

On a terminal a bar moves per training process; elsewhere a plain line is written every tenth of the way, so that a log
file stays readable. Only `rich` is used to draw, and nothing is computed here but medians.
"""

from __future__ import annotations

import shlex
from statistics import median
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.tree import Tree

from casckpt.demo._drive import Outcome, Phase
from casckpt.demo._proof import Claim

ROWS_PER_PHASE = 8
SHORT_DIGEST = 12
DESCRIPTIONS = {
    "reference": "train without interruption",
    "killed": "train again, until SIGKILL",
    "resumed": "resume in a new process",
    "branch": "branch off an earlier step",
}


class ProgressScreen:
    """Progress of the running phase, as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<27}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("return {task.fields[mean_return]:>5.1f}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._last = 0

    def __enter__(self) -> ProgressScreen:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, name: str, first: int, last: int) -> None:
        """Start a bar for the updates `first` to `last`."""
        self._last = last
        description = DESCRIPTIONS[name]
        self._task = self._progress.add_task(description, total=last, completed=first - 1, mean_return=0.0)
        if not self._console.is_terminal:
            self._console.print(f"{name}: {description}, updates {first} to {last}")

    def committed(self, name: str, event: dict[str, Any]) -> None:
        """Move the bar."""
        step, mean_return = event["step"], event["metrics"]["return"]
        if self._task is not None:
            self._progress.update(self._task, completed=step, mean_return=mean_return)
        if not self._console.is_terminal and (step % max(1, self._last // 10) == 0 or step == self._last):
            self._console.print(f"  {name} update {step} of {self._last}: return {mean_return:.1f}")

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        if self._task is not None:
            self._progress.stop_task(self._task)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_outcome(console: Console, outcome: Outcome, store: str, *, elapsed_s: float) -> None:
    """All tables, the summary, and the commands to go on with."""
    console.print()
    console.print(commit_table(outcome.phases))
    console.print(_medians(outcome), highlight=False)
    console.print(proof_table(outcome))
    console.print(_verdict(outcome), highlight=False)
    console.print()
    console.print(line_tree(outcome))
    console.print()
    console.print(total_table(outcome))
    console.print(f"{elapsed_s:.0f} s in all. The store stays in [bold]{store}[/bold]. Go on with:", highlight=False)
    for command in next_commands(store, outcome):
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)


def next_commands(store: str, outcome: Outcome) -> list[str]:
    """Commands that show what was left behind."""
    path = shlex.quote(store)
    branch, line = next((name, line) for name, line in outcome.lines.items() if name != "main")
    return [
        f"casckpt log {path} --run demo",
        f"casckpt show {path} latest --run demo",
        f"casckpt diff {path} main@{line[-1].step} {shlex.quote(branch)} --run demo",
    ]


def commit_table(phases: dict[str, Phase]) -> Table:
    """What commits cost, beside `torch.save` with fsync of the same state in the same process."""
    table = _table("Commits (a selection), and torch.save with fsync of the same state")
    for heading in ("step", "return", "logical", "new", "stored", "commit", "torch.save", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for phase in phases.values():
        table.add_section()
        table.add_row(f"[cyan]{phase.name}[/cyan]", *[""] * 7)
        for commit in _selection(phase.commits):
            table.add_row(
                str(commit["step"]),
                f"{commit['metrics']['return']:.1f}",
                decimal(commit["logical_bytes"]),
                decimal(commit["new_bytes"]),
                decimal(commit["stored_bytes"]),
                f"{commit['commit_s'] * 1e3:.1f} ms",
                f"{commit['torch_save_s'] * 1e3:.1f} ms",
                decimal(commit["torch_save_bytes"]),
            )
    return table


def proof_table(outcome: Outcome) -> Table:
    """One row per thing compared: what all sources say, or what each says where they differ."""
    table = _table("\nKilled and resumed, against never interrupted")
    for heading in ("compared", "manifest id, both runs", "values, live and restored", ""):
        table.add_column(heading)
    for what in dict.fromkeys(claim.what for claim in outcome.claims):
        about = {claim.aspect: claim for claim in outcome.claims if claim.what == what}
        manifest = about.pop("manifest", None)
        (rest,) = about.values()
        label = what if rest.aspect == "values" else f"{rest.aspect}: {what}"
        holds = rest.holds and (manifest is None or manifest.holds)
        mark = "[green]✓[/green]" if holds else "[bold red]✗[/bold red]"
        table.add_row(label, _found(manifest) if manifest else "", _found(rest), mark)
    return table


def line_tree(outcome: Outcome) -> Tree:
    """The branches of run `demo`: first and last step of each, and where the second one came from."""
    tree = Tree("Lines of run demo")
    by_id = {snapshot.id: snapshot for line in outcome.lines.values() for snapshot in line}
    for name, line in outcome.lines.items():
        first, last = line[0], line[-1]
        facts = [f"{first.metrics['return']:.1f} to {last.metrics['return']:.1f}"]
        if first.parent in by_id:
            parent = by_id[first.parent]
            facts.append(f"from {parent.branch}@{parent.step}")
        facts += [f"{key}={value}" for key, value in first.labels.items()]
        tree.add(f"[bold]{name}[/bold]: steps {first.step} to {last.step}, return {', '.join(facts)}")
    return tree


def total_table(outcome: Outcome) -> Table:
    """Sums by run, and the ratios."""
    table = _table("Totals. Dedup is logical ÷ new, compression is new ÷ stored")
    for heading in ("run", "commits", "logical", "new", "stored", "dedup", "compression"):
        table.add_column(heading, justify="left" if heading == "run" else "right", no_wrap=True)
    for run, totals in outcome.totals.items():
        table.add_row(
            run,
            str(totals.commit_count),
            decimal(totals.logical_bytes),
            decimal(totals.new_bytes),
            decimal(totals.stored_bytes),
            f"{totals.dedup_ratio:.1f}×",
            f"{totals.compression:.2f}×",
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")


def _medians(outcome: Outcome) -> str:
    commits = [commit for phase in outcome.phases.values() for commit in phase.commits]
    commit_ms, torch_save_ms = (median(c[key] for c in commits) * 1e3 for key in ("commit_s", "torch_save_s"))
    return f"Median of {len(commits)}: commit {commit_ms:.1f} ms, torch.save with fsync {torch_save_ms:.1f} ms."


def _selection(commits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    stride = -(-len(commits) // ROWS_PER_PHASE) or 1
    return [commit for i, commit in enumerate(commits) if (len(commits) - 1 - i) % stride == 0]


def _found(claim: Claim) -> str:
    if claim.holds:
        return _short(next(iter(claim.found.values())))
    return "\n".join(f"{source}: {_short(said)}" for source, said in claim.found.items())


def _short(said: str) -> str:
    return said[:SHORT_DIGEST] if len(said) == 64 else said.split(" ")[0] + " …"


def _verdict(outcome: Outcome) -> str:
    steps = len(outcome.phases["reference"].commits)
    if outcome.is_identical:
        return f"[bold green]Bit-identical[/bold green], and so is every component at each of {steps} steps."
    where = outcome.divergence or "not in any manifest: see the ✗ above"
    return f"[bold red]Different.[/bold red] First divergence by manifest id: {where}."
