"""A run: every peer commits the same states of one series in the same order, then restores some of them in new
processes.

Where disk and memory allow, all peers are alive at once and *alternate*: each commits state 0, then each state 1, and
so on, starting with another peer each time, so that drift of the machine hits all. Otherwise they run *one after the
other*, and what a peer stored is removed before the next one starts; snapshots that will not be restored are then
removed at once where they have files of their own. A peer that fails keeps what was measured until then, and says
why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.corpora import load
from benchmarks.peers._process import Restorer, Worker, WorkerError
from benchmarks.peers.registry import PEERS
from benchmarks.peers.results import Commit, CorpusResult, PeerResult, Restore

GB = 10**9
PROCESS_SIZE = GB // 3  # memory of a worker beside its states
STATE_COPIES = 3  # of a state in a worker: loaded, live, and staged by the peer
ALTERNATING_MEMORY = 10 * GB  # beyond it, peers run one after the other
ALTERNATING, IN_TURN = "alternating per commit", "one peer after the other"


@dataclass(frozen=True)
class Options:
    """What a run may use."""

    corpora: str
    work: str
    disk_bytes: int = 15 * GB
    limit: int | None = None  # commits
    restore_count: int = 5


@dataclass
class Runner:
    """One peer in a run: its worker, what it found, and whether snapshots are removed as soon as they were measured."""

    worker: Worker
    result: PeerResult
    forgets: bool
    disk_bytes: int

    def commit(self, index: int, raw_bytes: int, *, scribbles: bool, is_restored: bool) -> None:
        """Commit one state, unless this peer failed before."""
        if self.result.failure:
            return
        scribbles = scribbles and self.result.is_asynchronous
        try:
            found = self.worker.ask("commit", index=index, scribbles=scribbles)
            self.result.commits.append(Commit(index=index, raw_bytes=raw_bytes, is_disturbed=scribbles, **found))
            if self.forgets and not is_restored:
                self.worker.ask("forget", index=index)
        except WorkerError as error:
            self.result.failure = f"commit {index}: {error}"
            return
        if not self.forgets and sum(commit.added_bytes for commit in self.result.commits) > self.disk_bytes:
            self.result.failure = f"stopped after commit {index}: no more disk allowed"

    def restore(self, restorer: Restorer, index: int, raw_bytes: int) -> None:
        """Restore one state, if it was committed."""
        if index >= len(self.result.commits):
            return
        try:
            found = restorer.restore(self.worker, index)
            self.result.restores.append(Restore(index=index, raw_bytes=raw_bytes, **found))
        except WorkerError as error:
            self.result.failure = f"restore {index}: {error}"

    def close(self) -> None:
        """Tell the peer that this was its last commit, and end its process: memory is for the restores."""
        if not self.result.failure:
            try:
                self.result.closing_bytes = self.worker.ask("close")["closing_bytes"]
            except WorkerError as error:
                self.result.failure = f"close: {error}"
        self.worker.stop()


def run_corpus(corpus: str, names: list[str], options: Options, told: Callable[[str], None]) -> CorpusResult:
    """Run these peers over one series; `told` hears of progress. What was written to `options.work` is removed."""
    series = load(options.corpora, corpus)
    count = min(series.count, options.limit or series.count)
    raw_bytes = [series.raw_bytes(index) for index in range(count)]
    results = {name: described(name, options) for name in names}
    able = [name for name in names if results[name].failure is None]
    alternates = (
        len(able) * sum(raw_bytes) <= options.disk_bytes
        and len(able) * (PROCESS_SIZE + STATE_COPIES * max(raw_bytes)) <= ALTERNATING_MEMORY
    )
    for group in [able] if alternates else [[name] for name in able]:
        _run_group(corpus, [results[name] for name in group], raw_bytes, options, told)
    order = ALTERNATING if alternates else IN_TURN
    return CorpusResult(name=corpus, commit_count=count, order=order, peers=list(results.values()))


def described(name: str, options: Options) -> PeerResult:
    """A peer without figures; `failure` says why it cannot run here."""
    peer = PEERS[name](options.work, options.work)
    failure = peer.why_not()
    return PeerResult(
        name=name,
        product=peer.product,
        version="" if failure else peer.version(),
        level=peer.level,
        restores_from=peer.restores,
        durability=peer.durability,
        is_asynchronous=peer.is_asynchronous,
        runs_programs=peer.program is not None,
        failure=failure,
    )


def _run_group(
    corpus: str, results: list[PeerResult], raw_bytes: list[int], options: Options, told: Callable[[str], None]
) -> None:
    """Run peers that are alive at the same time."""
    count = len(raw_bytes)
    restored = evenly(count, options.restore_count)
    who = results[0].name if len(results) == 1 else f"{len(results)} peers"
    runners: list[Runner] = []
    restorer = Restorer(corpora=options.corpora, corpus=corpus, work=options.work)
    try:
        for result in results:
            worker = Worker(result.name, corpora=options.corpora, corpus=corpus, work=options.work)
            can_forget = PEERS[result.name](options.work, options.work).can_forget
            forgets = can_forget and sum(raw_bytes) > options.disk_bytes
            runners.append(Runner(worker, result, forgets, options.disk_bytes))
        for index in range(count):
            first = index % len(runners)
            for runner in runners[first:] + runners[:first]:
                runner.commit(index, raw_bytes[index], scribbles=index == middle(count), is_restored=index in restored)
            told(f"{corpus}: {who}: commit {index} of {count}")
        for runner in runners:
            runner.close()
        for index in restored:
            for runner in runners:
                runner.restore(restorer, index, raw_bytes[index])
            told(f"{corpus}: {who}: restore {index}")
    finally:
        restorer.remove()
        for runner in runners:
            runner.worker.remove()


def evenly(count: int, wanted: int) -> list[int]:
    """Up to `wanted` numbers below `count` at equal distances, the first, the middle and the last among them."""
    wanted = max(3, wanted)
    return sorted({position * (count - 1) // (wanted - 1) for position in range(wanted)} | {middle(count)})


def middle(count: int) -> int:
    """The number in the middle of those below `count`."""
    return (count - 1) // 2
