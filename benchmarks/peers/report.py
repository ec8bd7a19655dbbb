"""Tables out of results: one per series, on the terminal or in Markdown. Everything derived from figures is derived
here.

MB are 10^6 bytes of raw state, whatever was stored of them. Speeds and restores are of durable commits and of new
processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from rich.table import Table

from benchmarks.peers.contract import BOUNDED, OWN_FILES, REPOSITORY
from benchmarks.peers.results import Commit, CorpusResult, PeerResult, Restore

MB = 1e6
INDEPENDENT = {OWN_FILES: "yes", REPOSITORY: "yes", BOUNDED: "bounded"}  # a chain that is replayed: no
HEADERS = (
    "peer",
    "version",
    "options",
    "stored MB",
    "share of raw",
    "last commit MB",
    "commit MB/s",
    "stall ms, median / max",
    "restore s, first / middle / last",
    "worst restore",
    "independent",
    "exact",
    "peak MB",
)


def rows(result: CorpusResult) -> list[tuple[str, ...]]:
    """The table's cells, for peers that committed anything."""
    return [_row(peer) for peer in result.peers if peer.commits]


def title(result: CorpusResult) -> str:
    """What stands above the table."""
    raw = max((sum(commit.raw_bytes for commit in peer.commits) for peer in result.peers), default=0)
    return f"{result.name}: {result.commit_count} commits, {raw / MB:,.1f} MB raw, {result.order}"


def remarks(result: CorpusResult) -> list[str]:
    """What the table cannot say: who did not run, or not to the end, and what did not come back exactly."""
    found = [f"{peer.name}: {peer.failure}" for peer in result.peers if peer.failure]
    for peer in result.peers:
        wrong = next((restore for restore in peer.restores if restore.difference), None)
        if wrong:
            found.append(f"{peer.name}: commit {wrong.index} did not come back: {wrong.difference}")
    return found


def console_table(result: CorpusResult) -> Table:
    """For the terminal."""
    table = Table(title=title(result), box=None, pad_edge=False)
    for header in HEADERS:
        table.add_column(header, justify="left" if header in HEADERS[:3] else "right")
    for row in rows(result):
        table.add_row(*row)
    return table


def markdown(results: Iterable[CorpusResult]) -> str:
    """For a document."""
    parts = []
    for result in results:
        lines = [HEADERS, ["---"] * len(HEADERS), *rows(result)]
        parts += [f"### {title(result)}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
        parts += ["\n".join(f"* {remark}" for remark in remarks(result))] if remarks(result) else []
    return "\n\n".join(parts) + "\n"


def _row(peer: PeerResult) -> tuple[str, ...]:
    raw = sum(commit.raw_bytes for commit in peer.commits)
    stalls = [commit.stall_s * 1e3 for commit in peer.commits]
    peaks = [commit.peak_bytes / MB for commit in peer.commits] + [restore.peak_bytes / MB for restore in peer.restores]
    return (
        peer.name,
        peer.version,
        peer.level,
        f"{peer.stored_bytes / MB:,.2f}",
        f"{peer.stored_bytes / raw:.4f}",
        f"{peer.commits[-1].added_bytes / MB:,.3f}",
        f"{_commit_speed(peer.commits):,.1f}",
        f"{statistics.median(stalls):,.1f} / {max(stalls):,.1f}",
        _restore_times(peer.restores),
        _worst(peer.restores),
        INDEPENDENT.get(peer.restores_from, "no"),
        _exactness(peer.restores),
        "–" if peer.runs_programs else f"{max(peaks):,.0f}",
    )


def _commit_speed(commits: list[Commit]) -> float:
    speeds = [commit.raw_bytes / MB / commit.durable_s for commit in commits if not commit.is_disturbed]
    return statistics.median(speeds) if speeds else 0.0


def _restore_times(restores: list[Restore]) -> str:
    if not restores:
        return "–"
    chosen = restores[0], restores[(len(restores) - 1) // 2], restores[-1]
    return " / ".join(f"{restore.restore_s:.3g}" for restore in chosen)


def _worst(restores: list[Restore]) -> str:
    if not restores:
        return "–"
    worst = max(restores, key=lambda restore: restore.restore_s / max(1, restore.raw_bytes))
    return f"{worst.restore_s:.3g} s, {worst.raw_bytes / MB / worst.restore_s:,.3g} MB/s"


def _exactness(restores: list[Restore]) -> str:
    if not restores:
        return "–"
    return "NO" if any(restore.difference for restore in restores) else "yes"
