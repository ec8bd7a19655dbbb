"""Figures as a picture per series: bytes over the commits, stalls, speeds, and size against speed.

SVG with text as text, and nothing of the clock in it: the same figures give the same file.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Iterable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peers.results import CorpusResult, PeerResult

MB = 1e6
OWN = "casckpt"
SIZE_IN = (13.0, 10.0)  # inches
_OTHERS = matplotlib.colormaps["tab20b"].colors  # type: ignore[attr-defined]
_OURS = ("#d62728", "#ff7f0e", "#8c1a1a", "#e377c2")


def draw(results: Iterable[CorpusResult], folder: str) -> list[str]:
    """One file per series, named after it; returns their paths."""
    os.makedirs(folder, exist_ok=True)
    return [_draw(result, os.path.join(folder, f"{result.name}.svg")) for result in results]


def _draw(result: CorpusResult, path: str) -> str:
    peers = [peer for peer in result.peers if peer.commits]
    colours = _colours(peers)
    figure = Figure(figsize=SIZE_IN, layout="constrained")
    grid = figure.subplots(2, 2)
    _bytes_over_commits(grid[0][0], peers, colours)
    _size_against_speed(grid[0][1], peers, colours)
    _bars(grid[1][0], peers, colours, "stall of a commit, ms (median)", [_stall_ms(peer) for peer in peers])
    _bars(
        grid[1][1], peers, colours, "slowest restore in a new process, MB/s", [_restore_speed(each) for each in peers]
    )
    figure.suptitle(
        f"{result.name}: {result.commit_count} commits of {_raw(peers[0]) / result.commit_count / MB:,.1f} MB"
    )
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": result.name}):
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path


def _colours(peers: Sequence[PeerResult]) -> dict[str, str]:
    ours, others = itertools.cycle(_OURS), itertools.cycle(_OTHERS)
    return {peer.name: next(ours if peer.name.startswith(OWN) else others) for peer in peers}


def _bytes_over_commits(axes: Axes, peers: Sequence[PeerResult], colours: dict[str, str]) -> None:
    for peer in peers:
        sums = list(itertools.accumulate(commit.added_bytes / MB for commit in peer.commits))
        width = 2.4 if peer.name.startswith(OWN) else 1.0
        axes.plot(range(1, len(sums) + 1), sums, color=colours[peer.name], linewidth=width, label=peer.name)
    axes.set(title="stored", xlabel="commits", ylabel="MB")
    axes.legend(fontsize="x-small", ncols=2)


def _size_against_speed(axes: Axes, peers: Sequence[PeerResult], colours: dict[str, str]) -> None:
    for peer in peers:
        share, speed = peer.stored_bytes / _raw(peer), _commit_speed(peer)
        axes.plot([share], [speed], "o", color=colours[peer.name])
        axes.annotate(peer.name, (share, speed), fontsize="x-small", xytext=(4, 3), textcoords="offset points")
    axes.set(title="size against speed: up and left is better", xlabel="share of raw", ylabel="durable commit, MB/s")
    axes.set_yscale("log")


def _bars(axes: Axes, peers: Sequence[PeerResult], colours: dict[str, str], name: str, values: Sequence[float]) -> None:
    axes.barh([peer.name for peer in peers], values, color=[colours[peer.name] for peer in peers])
    axes.set(title=name)
    axes.set_xscale("log")
    axes.tick_params(axis="y", labelsize="x-small")
    axes.invert_yaxis()


def _raw(peer: PeerResult) -> int:
    return sum(commit.raw_bytes for commit in peer.commits)


def _stall_ms(peer: PeerResult) -> float:
    return statistics.median(commit.stall_s for commit in peer.commits) * 1e3


def _commit_speed(peer: PeerResult) -> float:
    return statistics.median(commit.raw_bytes / MB / commit.durable_s for commit in peer.commits)


def _restore_speed(peer: PeerResult) -> float:
    return min((restore.raw_bytes / MB / restore.restore_s for restore in peer.restores), default=float("nan"))
