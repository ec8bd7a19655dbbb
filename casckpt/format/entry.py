"""A timeline entry: the file whose appearance under its number is the commit point.

::

    header  64   magic "CASENTR1", seq u64, body size u64, inline size u64, store id 16, check 16 (over bytes 0..48)
    body         MessagePack (`Envelope`)
    inline       records (`record`, unpadded), one after the other
    trailer 32   blake3 of everything before = the entry's digest

`previous` links to the digest of the entry before; where that entry was damaged or missing when this one was
written, it is the blake3 of the bytes found, or zeros. Entry 0 is `Create`.
"""

from __future__ import annotations

import struct

import msgspec

from casckpt.digest import check16, digest
from casckpt.errors import CorruptionError, InvalidInputError, UnsupportedFormatError
from casckpt.format import wire
from casckpt.format.record import RecordHeader, decode_header, encode_header
from casckpt.ids import DIGEST_SIZE, PACK_ID_SIZE, EntryDigest, StoreId
from casckpt.limits import ENTRY_SIZE_MAX, PACK_COUNT_PER_ENTRY_MAX

MAGIC = b"CASENTR1"
ENTRY_HEADER = struct.Struct("<8sQQQ16s")
HEADER_SIZE = ENTRY_HEADER.size + 16  # 64
TRAILER_SIZE = DIGEST_SIZE
STEP_MAX = (1 << 63) - 1
MetricValue = bool | int | float | str


class PackRef(msgspec.Struct, frozen=True, array_like=True):
    """A pack that this entry makes part of the store."""

    pack_id: bytes
    size: int
    footer_check: bytes


class Create(msgspec.Struct, frozen=True, array_like=True, tag="create"):
    document: bytes


class Commit(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """A new snapshot as head of a branch whose head was `expected_head` (empty: the branch is new)."""

    run: str
    branch: str
    step: int
    snapshot: bytes
    expected_head: bytes
    packs: list[PackRef]
    metrics: dict[str, MetricValue]
    labels: dict[str, str]
    new_bytes: dict[str, int]


class Supersede(msgspec.Struct, frozen=True, array_like=True, tag="supersede"):
    """A snapshot of a step in place of `replaced`, which was committed before with other components."""

    run: str
    branch: str
    step: int
    snapshot: bytes
    replaced: bytes
    packs: list[PackRef]
    metrics: dict[str, MetricValue]
    labels: dict[str, str]
    new_bytes: dict[str, int]


class Annotate(msgspec.Struct, frozen=True, array_like=True, tag="annotate"):
    snapshot: bytes
    metrics: dict[str, MetricValue]
    labels: dict[str, str]


class Tag(msgspec.Struct, frozen=True, array_like=True, tag="tag"):
    """`snapshot` empty: the tag is taken away."""

    run: str
    name: str
    snapshot: bytes


class Retire(msgspec.Struct, frozen=True, array_like=True, tag="retire"):
    snapshot: bytes


class Prune(msgspec.Struct, frozen=True, array_like=True, tag="prune"):
    """Each of these snapshots is retired."""

    snapshots: list[bytes]


class Thin(msgspec.Struct, frozen=True, array_like=True, tag="thin"):
    """These components of a snapshot are withdrawn on purpose; the others stay."""

    snapshot: bytes
    components: list[str]


class Condemn(msgspec.Struct, frozen=True, array_like=True, tag="condemn"):
    """No later entry relies on a record in one of these packs; `replacements` are packs that hold copies of some."""

    packs: list[bytes]
    replacements: list[PackRef]


class Generation(msgspec.Struct, frozen=True, array_like=True, tag="generation"):
    """A recovery of a run: above it, only writers of this generation or a later one commit to the run.

    It continues `snapshot` (empty: from the start); `reasons` are for people.
    """

    run: str
    number: int
    snapshot: bytes
    reasons: list[str]


class EpochRef(msgspec.Struct, frozen=True, array_like=True):
    """An epoch (`epoch`): its number, the size of its file in bytes, its digest."""

    number: int
    size: int
    digest: bytes


class Seal(msgspec.Struct, frozen=True, array_like=True, tag="seal"):
    """The entries of these epochs, which follow one another and the one sealed last, have no inlined objects any more.

    `replacements` are packs that hold copies of those that are needed.
    """

    epochs: list[EpochRef]
    replacements: list[PackRef]


Body = Create | Commit | Supersede | Annotate | Tag | Retire | Prune | Thin | Condemn | Generation | Seal


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Who wrote an entry, when (ns since the epoch, for people only), after what, and what it says."""

    write_id: bytes
    previous: bytes
    written_at_ns: int
    host: str
    pid: int
    body: Body


class InlineRecord(msgspec.Struct, frozen=True):
    """A record inside an entry: header, where it starts in the file, payload bytes."""

    header: RecordHeader
    offset: int
    payload: bytes


class Entry(msgspec.Struct, frozen=True):
    seq: int
    store_id: StoreId
    envelope: Envelope
    records: list[InlineRecord]
    digest: EntryDigest
    size: int
    is_sealed: bool = False  # read from an epoch: objects that were inlined in it are left out


def encode_entry(seq: int, store_id: StoreId, envelope: Envelope, records: list[tuple[RecordHeader, bytes]]) -> bytes:
    """The whole file. `records` are (header, payload); offsets follow from the order.

    Raises:
        InvalidInputError: it would be larger than ENTRY_SIZE_MAX.
    """
    body = wire.encode(envelope)
    inline = b"".join(
        part for header, payload in records for part in (encode_header(header, is_aligned=False), payload)
    )
    encoded = frame_entry(seq, store_id, body, inline)
    if len(encoded) > ENTRY_SIZE_MAX:
        raise InvalidInputError(
            f"timeline entry {seq}: {len(encoded)} bytes, at most {ENTRY_SIZE_MAX} are allowed. Use fewer components "
            "or shorter names, and put large tables into the state.",
            seq=seq,
        )
    return encoded


def frame_entry(seq: int, store_id: StoreId, body: bytes, inline: bytes) -> bytes:
    """The whole file, of an encoded envelope and encoded records."""
    fixed = ENTRY_HEADER.pack(MAGIC, seq, len(body), len(inline), store_id)
    content = b"".join((fixed, check16(fixed), body, inline))
    return content + digest(content)


def decode_entry(data: bytes, seq: int, what: str) -> Entry:
    """Decode and check everything except that inline payloads hash to their object ids.

    Raises:
        CorruptionError: any byte of it is not as written, or it is another number's entry.
        UnsupportedFormatError: intact, but of a kind that this release does not know.
    """
    if not HEADER_SIZE + TRAILER_SIZE <= len(data) <= ENTRY_SIZE_MAX:
        raise CorruptionError(f"{what}: {len(data)} bytes cannot be a timeline entry", what=what, seq=seq)
    if data[:8] != MAGIC:
        raise CorruptionError(f"{what}: not a timeline entry (starts with {bytes(data[:8])!r})", what=what, seq=seq)
    if digest(memoryview(data)[:-TRAILER_SIZE]) != data[-TRAILER_SIZE:]:
        raise CorruptionError(f"{what}: digest mismatch. Run `casckpt verify`.", what=what, seq=seq)
    _, found_seq, body_size, inline_size, store_id = ENTRY_HEADER.unpack_from(data)
    if found_seq != seq:
        raise CorruptionError(f"{what}: holds entry {found_seq}, expected {seq}", what=what, seq=seq)
    if HEADER_SIZE + body_size + inline_size + TRAILER_SIZE != len(data):
        raise CorruptionError(f"{what}: lengths {body_size} + {inline_size} do not add up", what=what, seq=seq)
    envelope = _decode_envelope(data[HEADER_SIZE : HEADER_SIZE + body_size], what)
    records = _decode_records(data, HEADER_SIZE + body_size, what)
    return Entry(seq, StoreId(store_id), envelope, records, EntryDigest(data[-TRAILER_SIZE:]), len(data))


def _decode_envelope(body: bytes, what: str) -> Envelope:
    try:
        envelope = wire.decode(Envelope, body, what)
    except CorruptionError as error:
        # The digest held, so the bytes are as written: an unknown tag is a newer writer, not damage.
        if "Invalid value" in str(error.__cause__):
            raise UnsupportedFormatError(
                f"{what}: entry of a kind this release does not know ({error.__cause__}). Upgrade casckpt.", what=what
            ) from error
        raise
    _check_body(envelope.body, what)
    return envelope


def _check_body(body: Body, what: str) -> None:
    """Bounds that the index's keys and rows rely on."""
    if isinstance(body, Create):
        return
    if isinstance(body, Condemn):
        _check_packs(body.replacements, what)
        if len(body.packs) > PACK_COUNT_PER_ENTRY_MAX or any(len(each) != PACK_ID_SIZE for each in body.packs):
            raise CorruptionError(f"{what}: malformed list of condemned packs", what=what)
        return
    if isinstance(body, Seal):
        _check_packs(body.replacements, what)
        numbers = [each.number for each in body.epochs]
        is_run = bool(numbers) and numbers == list(range(max(0, numbers[0]), numbers[0] + len(numbers)))
        if not is_run or any(len(each.digest) != DIGEST_SIZE or each.size < 0 for each in body.epochs):
            raise CorruptionError(f"{what}: malformed list of epochs", what=what)
        return
    if isinstance(body, Prune):
        if not body.snapshots or any(len(each) != DIGEST_SIZE for each in body.snapshots):
            raise CorruptionError(f"{what}: malformed list of snapshots", what=what)
        return
    sizes = (0, DIGEST_SIZE) if isinstance(body, Tag | Generation) else (DIGEST_SIZE,)
    if len(body.snapshot) not in sizes:
        raise CorruptionError(f"{what}: malformed snapshot id", what=what)
    if isinstance(body, Tag) and not (wire.is_name(body.run) and wire.is_name(body.name)):
        raise CorruptionError(f"{what}: malformed run or tag name", what=what)
    if isinstance(body, Generation) and not (wire.is_name(body.run) and 0 < body.number <= STEP_MAX):
        raise CorruptionError(f"{what}: malformed run name or generation {body.number}", what=what)
    if isinstance(body, Thin) and not (body.components and all(wire.is_name(name) for name in body.components)):
        raise CorruptionError(f"{what}: malformed component names", what=what)
    if isinstance(body, Supersede) and (len(body.replaced) != DIGEST_SIZE or body.replaced == body.snapshot):
        raise CorruptionError(f"{what}: malformed id of the snapshot that is replaced", what=what)
    if isinstance(body, Commit | Supersede):
        _check_packs(body.packs, what)
        before = body.replaced if isinstance(body, Supersede) else body.expected_head
        if len(before) not in (0, DIGEST_SIZE) or not 0 <= body.step <= STEP_MAX:
            raise CorruptionError(f"{what}: malformed expected head or step {body.step}", what=what)
        if not (wire.is_name(body.run) and wire.is_name(body.branch)):
            raise CorruptionError(f"{what}: malformed run or branch name", what=what)


def _check_packs(packs: list[PackRef], what: str) -> None:
    if len(packs) > PACK_COUNT_PER_ENTRY_MAX:
        raise CorruptionError(f"{what}: {len(packs)} packs in one entry", what=what)
    if any(len(p.pack_id) != PACK_ID_SIZE or len(p.footer_check) != 16 or p.size < 0 for p in packs):
        raise CorruptionError(f"{what}: malformed pack reference", what=what)


def _decode_records(data: bytes, start: int, what: str) -> list[InlineRecord]:
    view = memoryview(data)
    end = len(data) - TRAILER_SIZE
    records = []
    while start < end:
        header = decode_header(view[start:end], f"{what} record at {start}", limit=end - start)
        at = start + header.header_size
        records.append(InlineRecord(header, start, bytes(view[at : at + header.stored_size])))
        start = at + header.stored_size
    return records
