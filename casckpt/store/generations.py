"""Generations: which process may commit to a run after a recovery.

A learner may be thought dead and only be cut off; it comes back and goes on. So every recovery opens a new generation
of the run, an entry of the timeline, before it restores anything. A handle belongs to the generation that was the
newest when it was opened, or to the one that it opened itself. The order of the timeline decides: a commit that takes
a number above a newer generation than its handle's is not published (`FencedError`), whenever it was begun.

Reading is free to all generations. A fenced handle stays fenced until it recovers the run itself.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from casckpt.arguments import TEXTS, WHOLE, checked, maybe
from casckpt.errors import FencedError, cut
from casckpt.format.document import GENERATIONS
from casckpt.format.entry import Generation as GenerationEntry
from casckpt.store.opening import add_feature
from casckpt.store.settle import is_text
from casckpt.store.store import Store
from casckpt.store.values import Snapshot, Value

_REASON_LENGTH_MAX, _REASON_COUNT_MAX = 1000, 100  # they are for people, and an entry is small


@dataclass(frozen=True)
class Generation(Value):
    """A recovery of a run.

    Attributes:
        number: 1 for the first.
        snapshot: id of what it continues; None from the start.
        reasons: why it was opened, and why newer snapshots were passed over.
        opened_at, host, pid: when and by whom, by the writer's own account.
    """

    run: str
    number: int
    snapshot: str | None
    reasons: tuple[str, ...]
    opened_at: datetime.datetime
    host: str
    pid: int

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "opened_at": self.opened_at.isoformat()}

    def __str__(self) -> str:
        what = "from the start" if self.snapshot is None else f"from {self.snapshot[:12]}"
        who = f"{self.opened_at:%Y-%m-%d %H:%M:%S} UTC by pid {self.pid} on {self.host}"
        return f"generation {self.number} of {self.run}: {what}, {who}" + "".join(f"; {why}" for why in self.reasons)


@checked(store=Store)
def own_generation(store: Store) -> int:
    """The generation that a handle belongs to; 0 before the first recovery of its run."""
    return store._committer.generation


@checked(store=Store, snapshot=maybe(Snapshot), reasons=TEXTS, expected=maybe(WHOLE))
def open_generation(
    store: Store, snapshot: Snapshot | None, reasons: Sequence[str] = (), *, expected: int | None = None
) -> int:
    """Open the next generation of a handle's run, and belong to it; durable when this returns.

    From then on no other handle that is open now commits to the run.

    Args:
        store: open for writing.
        snapshot: what the recovery continues; None for a fresh start.
        reasons: for people; cut to 100 of 1000 characters each.
        expected: the newest generation that the caller knows of; None to fence whichever there is.

    Returns:
        Its number.

    Raises:
        FencedError: a newer generation than `expected` exists; nothing was opened.
    """
    texts = [cut(text if is_text(text) else ascii(text), _REASON_LENGTH_MAX) for text in reasons]
    snapshot_id = b"" if snapshot is None else bytes.fromhex(snapshot.id)
    with store._writing("open_generation"):
        add_feature(store, GENERATIONS)
        while True:
            store._keeper.catch_up()
            applied = store._keeper.applied()
            newest = store._catalog.generation(store.run).number
            if expected is not None and newest != expected:
                store.on_fenced(True)
                raise FencedError(
                    f"run {store.run!r}: generation {newest} was opened meanwhile, expected {expected}. Somebody else "
                    "recovers this run; stop, or look again with `casckpt log`.",
                    run=store.run,
                    generation=expected,
                    newer=newest,
                )
            body = GenerationEntry(store.run, newest + 1, snapshot_id, texts[:_REASON_COUNT_MAX])
            entry = store._committer.append(body, applied)
            if entry is not None:
                store._keeper.catch_up_after_commit(entry, {})
                store._committer.generation = body.number
                store.on_fenced(False)
                return body.number


@checked(store=Store)
def list_generations(store: Store) -> list[Generation]:
    """The recoveries of a handle's run, oldest first. Reads one entry each."""
    store._keeper.catch_up()
    found = []
    for row in reversed(store._catalog.generations(store.run)):
        envelope = store._timeline.read(row.seq).envelope
        body = envelope.body
        assert isinstance(body, GenerationEntry)
        opened_at = datetime.datetime.fromtimestamp(envelope.written_at_ns / 1e9, tz=datetime.timezone.utc)
        who = (opened_at, envelope.host, envelope.pid)
        found.append(Generation(body.run, body.number, body.snapshot.hex() or None, tuple(body.reasons), *who))
    return found
