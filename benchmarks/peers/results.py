"""What a run finds, as plain values that go to JSON and come back: figures per commit and per restore, nothing
derived."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Commit:
    """One commit. `added_bytes` is what the store grew by; `is_disturbed` means that `durable_s` says nothing."""

    index: int
    raw_bytes: int
    is_disturbed: bool
    stall_s: float
    durable_s: float
    added_bytes: int
    peak_bytes: int


@dataclass
class Restore:
    """One restore in a new process; `difference` is the first place that did not come back bit for bit."""

    index: int
    raw_bytes: int
    restore_s: float
    peak_bytes: int
    difference: str | None


@dataclass
class PeerResult:
    """Everything about one peer and one series; `failure` says why it did not run, or not to the end."""

    name: str
    product: str
    version: str
    level: str
    restores_from: str
    durability: str
    is_asynchronous: bool
    runs_programs: bool
    failure: str | None
    commits: list[Commit] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    closing_bytes: int = 0  # what the store grew by when it was closed; below 0 where something was given back

    @property
    def stored_bytes(self) -> int:
        """Of the whole series, closed."""
        return sum(commit.added_bytes for commit in self.commits) + self.closing_bytes


@dataclass
class CorpusResult:
    """One series."""

    name: str
    commit_count: int
    order: str
    peers: list[PeerResult]


def corpus_result(plain: dict[str, Any]) -> CorpusResult:
    """What `dataclasses.asdict` made of a result, as a result again."""
    peers = [
        PeerResult(
            **each
            | {"commits": [Commit(**commit) for commit in each["commits"]]}
            | {"restores": [Restore(**restore) for restore in each["restores"]]}
        )
        for each in plain["peers"]
    ]
    return CorpusResult(**plain | {"peers": peers})
