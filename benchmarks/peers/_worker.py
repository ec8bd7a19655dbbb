"""The processes that touch peers: one that commits a series as it is told to, and a new one for each restore.

The runner talks to them in lines of JSON, a question and an answer at a time. What a peer prints goes to standard
error, so that nothing but answers comes out. Every state is loaded, and moved into the live tensors, outside the
clock; the machine's write-back queue is emptied before each timed commit, so that nobody pays for another's dirty
pages. Restores are forked from a process that imported torch and numpy and did nothing else, which saves the seconds
of that import.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.corpora import Series, load
from benchmarks.peers._tree import Live, blank, state_difference
from benchmarks.peers.contract import Peer
from benchmarks.peers.registry import PEERS

Answer = Callable[[dict[str, Any]], None]

RESET_PEAK = "5"  # proc(5): resets VmHWM


class Committer:
    """One peer, one series, and the state of the training run that commits it."""

    def __init__(self, peer: Peer, series: Series) -> None:
        self._peer = peer
        self._series = series
        self._live = Live()
        self._size_bytes = 0
        peer.load()
        peer.start()

    def commit(self, index: int, scribbles: bool) -> dict[str, Any]:
        """Commit one state; `scribbles` changes the live tensors as soon as `begin` returns, and spoils `durable_s`."""
        self._live.update(self._series.state(index))
        prepared = self._peer.prepare(self._live.state)
        gc.collect()
        os.sync()
        memory = Memory()
        start = time.perf_counter()
        wait = self._peer.begin(index, prepared)
        stall_s = time.perf_counter() - start
        if scribbles:
            self._live.scribble()
        wait()
        durable_s = time.perf_counter() - start
        peak_bytes = memory.peak_bytes()
        before, self._size_bytes = self._size_bytes, self._peer.size()
        added = self._size_bytes - before
        return {"stall_s": stall_s, "durable_s": durable_s, "added_bytes": added, "peak_bytes": peak_bytes}

    def forget(self, index: int) -> dict[str, Any]:
        """Remove one snapshot's files."""
        self._peer.forget(index)
        self._size_bytes = self._peer.size()
        return {}

    def close(self) -> dict[str, Any]:
        """The last command: what an index or a log that is kept for writers takes, they may give back now."""
        self._peer.close()
        return {"closing_bytes": self._peer.size() - self._size_bytes}


class Memory:
    """The highest resident memory of this process since it was made, beyond what was resident then."""

    def __init__(self) -> None:
        with open("/proc/self/clear_refs", "w") as control:
            control.write(RESET_PEAK)
        self._before = _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Programs that a peer runs are not part of it."""
        return _status_bytes("VmHWM") - self._before


def _status_bytes(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def restored(peer: Peer, series: Series, index: int) -> dict[str, Any]:
    """Restore one commit, timed after the imports, and compare it with the series."""
    peer.load()
    template = blank(series.state(index)) if peer.needs_template else None
    gc.collect()
    memory = Memory()
    start = time.perf_counter()
    state = peer.restore(index, template)
    restore_s = time.perf_counter() - start
    peak_bytes = memory.peak_bytes()
    told = state_difference(series.state(index), state)
    return {"restore_s": restore_s, "peak_bytes": peak_bytes, "difference": told}


def serve_commits(series: Series, place: dict[str, str], answer: Answer) -> None:
    """One peer, for as long as there are commands."""
    committer = Committer(_peer(place), series)
    for line in sys.stdin:
        command = json.loads(line)
        answer(getattr(committer, command.pop("do"))(**command))


def serve_restores(series: Series, answer: Answer) -> None:
    """Each question in a child, whose exit status is the answer when it gave none."""
    for line in sys.stdin:
        question = json.loads(line)
        child = os.fork()
        if child == 0:
            _restore_and_exit(series, question, answer)
        _, status = os.waitpid(child, 0)
        if status:
            answer({"status": os.waitstatus_to_exitcode(status)})


def _restore_and_exit(series: Series, question: dict[str, Any], answer: Answer) -> None:
    status = 1
    try:
        complaints = os.open(question["complaints"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (complaints, 1), (complaints, 2)):
            os.dup2(descriptor, target)
        answer(restored(_peer(question["place"]), series, question["index"]))
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it was, the child must never return into its parent's loop
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _peer(place: dict[str, str]) -> Peer:
    return PEERS[place["peer"]](place["folder"], place["scratch"])


def main(arguments: list[str]) -> None:
    """`commit CORPORA CORPUS PLACE` or `restore CORPORA CORPUS`."""
    what, corpora, corpus, *place = arguments
    answer = _answers()
    series = load(corpora, corpus)
    if what == "commit":
        serve_commits(series, json.loads(place[0]), answer)
    else:
        serve_restores(series, answer)


def _answers() -> Answer:
    """A function that writes to what was standard output, which becomes standard error for everybody else."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        channel.write(json.dumps(content) + "\n")
        channel.flush()

    return answer


if __name__ == "__main__":
    main(sys.argv[1:])
