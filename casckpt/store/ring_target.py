"""A live ring to be restored: its own tree in place like any other target, its rows into their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from casckpt.format.snapshot import RingManifest
from casckpt.replay.placing import Placing, refuse_kind
from casckpt.replay.ring import Restoring, Ring
from casckpt.state.differences import mismatch
from casckpt.state.target import Target
from casckpt.store.ring_reader import RingReader, read_position

if TYPE_CHECKING:
    from casckpt.store.restore import Restorer, Stored


def make_target(live: Any, stored: Stored, restorer: Restorer, *, strict: bool, cast: bool) -> Target:
    """The target for one component, whatever kind of live object that is.

    Raises:
        MismatchError: a ring on one side only.
    """
    is_ring = isinstance(stored.manifest, RingManifest)
    if isinstance(live, Ring):
        live = Restoring(live)
    if isinstance(live, Restoring) != is_ring:
        kinds = ("a ring", f"a {type(live).__name__}") if is_ring else ("no ring", "a Ring")
        raise refuse_kind(stored.name, *kinds)
    if not isinstance(live, Restoring):
        return Target(stored.name, live, stored.structure, strict=strict, cast=cast)
    return (ColdTarget if live.is_cold else RingTarget)(live, stored, restorer, strict=strict, cast=cast)


class RingTarget(Target):
    """A ring whose rows come back. `prove` and `fill` are its own steps between `check` and `finish`."""

    def __init__(self, wanted: Restoring, stored: Stored, restorer: Restorer, *, strict: bool, cast: bool) -> None:
        super().__init__(stored.name, wanted.ring.probe(), stored.structure, strict=strict, cast=cast)
        self._wanted = wanted
        self._stored = stored
        self._restorer = restorer

    def check(self, scalars: bytes | memoryview, allow_pickle: bool = False) -> None:
        super().check(scalars, allow_pickle)
        reader = RingReader(self._restorer, self._stored, bytes(scalars))
        view = reader.view({}).trimmed(**self._wanted.trim._asdict())
        self._trimmed_count = reader.position.held - len(view)
        self._placing = Placing(self._wanted.ring, reader, view.first)
        differences = self._placing.differences()
        if differences:
            raise mismatch(differences)

    def prove(self) -> None:
        """Read and hash every row, keeping nothing."""
        self._placing.prove()

    def fill(self) -> None:
        """Put every row into its slot."""
        self.leaf_paths_touched += [f"{self.component}/columns/{name}" for name in self._wanted.ring.columns()]
        self._placing.fill()

    def finish(self, scalars: bytes | memoryview, allow_pickle: bool = False) -> None:
        super().finish(scalars, allow_pickle)
        buffer: Any = self._wanted.ring.buffer
        if self._placing.moves and buffer.mutable():
            buffer.rearrange(self._placing.moves)
        self._placing.finish()
        self._episode = self._wanted.end_episode(self._placing.position)

    def facts(self) -> dict[str, Any]:
        """What a restore report says of the rows."""
        placing = self._placing
        left_out = self._trimmed_count + placing.left_out_count
        note = [f"{placing.row_count} rows"]
        note += [f"{left_out} older ones left out"] if left_out else []
        note += [f"capacity {placing.change}"] if placing.is_resized else []
        note += [self._episode] if self._episode else []
        row_size = self._wanted.ring.row_size
        return {"rows": placing.row_count, "bytes": placing.row_count * row_size, "note": ", ".join(note)}


class ColdTarget(Target):
    """A ring that starts empty, by wish: nothing of it is read but where it stood, and what depends on it is named."""

    def __init__(self, wanted: Restoring, stored: Stored, restorer: Restorer, *, strict: bool, cast: bool) -> None:
        super().__init__(stored.name, wanted.ring.probe(), stored.structure, strict=False)
        self.blocks.clear()
        self._wanted = wanted
        self._stored = stored

    def check(self, scalars: bytes | memoryview, allow_pickle: bool = False) -> None:
        self._position = read_position(self._stored, bytes(scalars))

    def finish(self, scalars: bytes | memoryview, allow_pickle: bool = False) -> None:
        self._wanted.start_cold(self._position.total or 0, self._stored.ref.manifest)

    def facts(self) -> dict[str, Any]:
        """What a restore report says: that rows are missing, and what has to be looked at because of it."""
        names = list(self._wanted.dependents)
        what = "reset" if self._wanted.is_reset else "depend on the rows and were not reset"
        note = f"cold start: {self._position.held} rows left out" + (f"; {', '.join(names)}: {what}" if names else "")
        facts = {"rows": 0, "bytes": 0, "is_cold": True, "dependents": names, "is_reset": self._wanted.is_reset}
        return {**facts, "note": note}
