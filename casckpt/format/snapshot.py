"""The objects of the Merkle tree: snapshot → manifest → structure and chunks.

A `Snapshot` holds nothing that depends on a clock, a host or a random number: the same training from the same parent
on the same branch gives the same id. Metrics and labels belong to the timeline entry, where later
annotations join them.

A ring's manifest has *parts* beside its own payload: manifests of segments (rows in order, each payload written once),
or of groups, which have nothing but parts. Whoever follows references treats a part like any other manifest.
"""

from __future__ import annotations

import msgspec

from casckpt.errors import CorruptionError
from casckpt.format import wire
from casckpt.ids import DIGEST_SIZE, ObjectId
from casckpt.limits import CHUNK_SIZE_MAX, CHUNK_SIZE_MIN, GROUP_LEVEL_MAX, LEAF_COUNT_MAX, NODE_FANOUT

SNAPSHOT_VERSION = 1
CONTEXT_VERSION = 1
MANIFEST_VERSION = 1
RING_MANIFEST_VERSION = 2

_RING_HEAD = b"\x99"  # an array of nine: MessagePack of a RingManifest, where a Manifest has seven
_ROW_COUNT_MAX = (1 << 63) - 1

EXACT, RELOADABLE, DROPPABLE = 0, 1, 2
NECESSITIES = ("exact", "reloadable", "droppable")


class ComponentRef(msgspec.Struct, frozen=True, array_like=True):
    """A component in a snapshot: its manifest, and the step at which it was captured."""

    manifest: bytes
    step: int
    logical_bytes: int
    necessity: int = EXACT


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """One step of one run. `parent` is weak: a restore never follows it."""

    version: int
    run: str
    branch: str
    step: int
    parent: bytes
    context: bytes
    components: dict[str, ComponentRef]


class Context(msgspec.Struct, frozen=True, array_like=True):
    """What surrounds a state and rarely changes: user schema version, config (canonical JSON), library versions."""

    version: int
    schema_version: int
    config: bytes
    environment: dict[str, str]


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """A component: its structure and its chunks in payload order.

    `ids` holds chunk ids, 32 bytes each, while there are at most NODE_FANOUT of them; beyond that it holds ids of
    nodes, each of which is the concatenation of up to NODE_FANOUT chunk ids.
    """

    version: int
    structure: bytes
    chunk_size: int
    scalars_size: int
    plain_size: int
    chunk_count: int
    ids: bytes

    @property
    def has_nodes(self) -> bool:
        return self.chunk_count > NODE_FANOUT


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a ring.

    `level` is 0 for a segment, whose manifest is an ordinary one, and more for a group, all of whose parts have less.
    `step` is that of the commit that stored the last of its rows.
    """

    manifest: bytes
    row_count: int
    step: int
    level: int


class RingManifest(Manifest, frozen=True, array_like=True):
    """A manifest whose component is more than its payload: parts, oldest rows first.

    `first_row` is the number of the first row of the first part, counted from the first row ever written; 0 in a group.
    """

    first_row: int
    parts: tuple[Part, ...]


def parts_of(manifest: Manifest) -> tuple[Part, ...]:
    """The parts of a manifest; none but for a ring or a group."""
    return manifest.parts if isinstance(manifest, RingManifest) else ()


def encode_snapshot(snapshot: Snapshot) -> bytes:
    return wire.encode(snapshot)


def decode_snapshot(plain: bytes, what: str) -> Snapshot:
    snapshot = wire.decode(Snapshot, plain, what)
    wire.check_version(snapshot.version, SNAPSHOT_VERSION, what)
    for field in (snapshot.parent, snapshot.context):
        if len(field) not in (0, DIGEST_SIZE):
            raise CorruptionError(f"{what}: an id of {len(field)} bytes", what=what)
    for name, ref in snapshot.components.items():
        is_possible = ref.step >= 0 and ref.logical_bytes >= 0 and wire.is_name(name)
        if not is_possible or len(ref.manifest) != DIGEST_SIZE or ref.necessity not in (EXACT, RELOADABLE, DROPPABLE):
            raise CorruptionError(f"{what}: component {name!r} is malformed", what=what)
    return snapshot


def decode_context(plain: bytes, what: str) -> Context:
    context = wire.decode(Context, plain, what)
    wire.check_version(context.version, CONTEXT_VERSION, what)
    return context


def decode_manifest(plain: bytes, what: str) -> Manifest:
    is_ring = plain[:1] == _RING_HEAD
    manifest: Manifest = wire.decode(RingManifest if is_ring else Manifest, plain, what)
    version = RING_MANIFEST_VERSION if is_ring else MANIFEST_VERSION
    wire.check_version(manifest.version, version, what)
    count = manifest.chunk_count
    id_count = -(-count // NODE_FANOUT) if manifest.has_nodes else count
    if (
        manifest.version != version
        or len(manifest.structure) != DIGEST_SIZE
        or not CHUNK_SIZE_MIN <= manifest.chunk_size <= CHUNK_SIZE_MAX
        or not 0 <= count <= LEAF_COUNT_MAX
        or not 0 <= manifest.scalars_size <= manifest.plain_size <= count * manifest.chunk_size
        or len(manifest.ids) != id_count * DIGEST_SIZE
        or not _are_rows_possible(manifest)
    ):
        raise CorruptionError(f"{what}: manifest fields contradict each other", what=what)
    return manifest


def _are_rows_possible(manifest: Manifest) -> bool:
    if not isinstance(manifest, RingManifest):
        return True
    stop = manifest.first_row + sum(each.row_count for each in manifest.parts)
    return manifest.first_row >= 0 and stop <= _ROW_COUNT_MAX and all(map(_is_possible, manifest.parts))


def _is_possible(part: Part) -> bool:
    return (
        len(part.manifest) == DIGEST_SIZE
        and 0 < part.row_count <= _ROW_COUNT_MAX
        and 0 <= part.step <= _ROW_COUNT_MAX
        and 0 <= part.level <= GROUP_LEVEL_MAX
    )


def split_ids(ids: bytes, what: str) -> list[ObjectId]:
    """The ids in a manifest's `ids` field or in a node."""
    wire.check_digests(ids, what)
    return [ObjectId(ids[at : at + DIGEST_SIZE]) for at in range(0, len(ids), DIGEST_SIZE)]
