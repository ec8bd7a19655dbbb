"""docs/format.md says what the code does: every constant, and every example byte for byte in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casckpt import digest as digests
from casckpt import ids, limits
from casckpt.codec import constant, contract, decode_into, difference, frames, lanes, planes
from casckpt.digest import check16, digest
from casckpt.format import document, entry, epoch, layout, pack, record, scalars, snapshot, structure, wire
from casckpt.ids import EntryDigest, ObjectId, PackId, StoreId

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()

LIMITS = """
    RECORD_ALIGNMENT ENTRIES_PER_SHARD ENTRIES_PER_EPOCH ENTRY_SIZE_MAX PACK_COUNT_PER_ENTRY_MAX OBJECT_SIZE_MAX
    CHUNK_SIZE CHUNK_SIZE_MIN CHUNK_SIZE_MAX SMALL_BLOCK_LIMIT NODE_FANOUT LEAF_COUNT_MAX TREE_DEPTH_MAX RANK_MAX
    KEY_SIZE_MAX GROUP_LEVEL_MAX
""".split()  # noqa: SIM905 - names, as one writes them

CODE = {
    "FORMAT_VERSION": document.FORMAT_VERSION,
    "PACK_VERSION": pack.PACK_VERSION,
    "SNAPSHOT_VERSION": snapshot.SNAPSHOT_VERSION,
    "CONTEXT_VERSION": snapshot.CONTEXT_VERSION,
    "MANIFEST_VERSION": snapshot.MANIFEST_VERSION,
    "RING_MANIFEST_VERSION": snapshot.RING_MANIFEST_VERSION,
    "STRUCTURE_VERSION": structure.VERSION,
    "RECORD_MAGIC": record.MAGIC,
    "PACK_MAGIC": pack.HEADER_MAGIC,
    "PACK_END_MAGIC": pack.TRAILER_MAGIC,
    "ENTRY_MAGIC": entry.MAGIC,
    "EPOCH_MAGIC": epoch.MAGIC,
    "RECORD_HEADER_SIZE": record.FIXED_SIZE,
    "PACK_HEADER_SIZE": pack.HEADER_SIZE,
    "PACK_TRAILER_SIZE": pack.TRAILER_SIZE,
    "ENTRY_HEADER_SIZE": entry.HEADER_SIZE,
    "ENTRY_TRAILER_SIZE": entry.TRAILER_SIZE,
    "EPOCH_ROW_SIZE": epoch.ROW_SIZE,
    "DIGEST_SIZE": ids.DIGEST_SIZE,
    "CHECK_SIZE": digests.CHECK_SIZE,
    "PACK_ID_SIZE": ids.PACK_ID_SIZE,
    "PARAMS_SIZE_MAX": record.PARAMS_SIZE_MAX,
    "PLANE_SIZE_MAX": structure.PLANE_SIZE_MAX,
    "SCALAR_DEPTH_MAX": scalars._DEPTH_MAX,
    "CODEC_RAW": contract.RAW,
    "CODEC_CONSTANT": contract.CONSTANT,
    "CODEC_ZSTD": contract.ZSTD,
    "CODEC_PLANES": contract.PLANES,
    "CODEC_DIFFERENCE": contract.DIFFERENCE,
    "CODEC_PREDICTION": contract.PREDICTION,
    "CODEC_FRAMES": contract.FRAMES,
    "FRAME_SIZE_MIN": frames.FRAME_SIZE_MIN,
    "PATTERN_SIZE_MAX": constant.PATTERN_SIZE_MAX,
    "ITEM_SIZE_MIN": lanes.ITEM_SIZE_MIN,
    "ITEM_SIZE_MAX": lanes.ITEM_SIZE_MAX,
    "MODE_CONSTANT": planes.MODE_CONSTANT,
    "MODE_RAW": planes.MODE_RAW,
    "MODE_ZSTD": planes.MODE_ZSTD,
    "METHOD_DENSE": difference.METHOD_DENSE,
    "METHOD_SPARSE": difference.METHOD_SPARSE,
    **{name.upper(): kind for kind, name in record.KIND_NAMES.items()},
    **{name: getattr(limits, name) for name in LIMITS},
}

STORE = StoreId(bytes(range(16)))
PACK = PackId(bytes(range(0xA0, 0xB0)))
WRITE = bytes(range(0xC0, 0xD0))
CHECK = bytes(range(0xE0, 0xF0))


def test_every_constant_of_the_document_is_that_of_the_code() -> None:
    section = DOCUMENT[DOCUMENT.index("## 16.") : DOCUMENT.index("## 17.")]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE))
    shown = {name: f"`{value.decode()}`" if isinstance(value, bytes) else f"{value:,}" for name, value in CODE.items()}
    assert rows == shown


def test_torch_dtypes_of_the_document_are_those_of_the_code() -> None:
    from casckpt.format.dtypes import TORCH_ITEMSIZES

    section = DOCUMENT[DOCUMENT.index("## 9.") : DOCUMENT.index("## 10.")]
    rows = re.findall(r"^\| ((?:`\w+` ?)+) \| (\d+) \|$", section, re.MULTILINE)
    assert {name: int(size) for names, size in rows for name in re.findall(r"`(\w+)`", names)} == TORCH_ITEMSIZES


def test_container_kinds_of_the_document_are_those_of_the_code() -> None:
    row = next(line for line in DOCUMENT.splitlines() if "| mapping; kinds" in line)
    named = re.findall(r"`(\w+):?`", row.split("kinds:")[1].split(". Keys")[0])
    factories = named[named.index("defaultdict") + 1 :]
    kinds = [*named[: named.index("defaultdict")], *(f"defaultdict:{name}" for name in factories)]
    assert sorted(kinds) == sorted(structure.MAPPINGS)
    row = next(line for line in DOCUMENT.splitlines() if "| random generator:" in line)
    assert tuple(re.findall(r"`([\w.]+)`", row.split("generator:")[1])) == structure.RNGS


def test_extension_codes_of_the_document_are_those_of_the_code() -> None:
    section = DOCUMENT[DOCUMENT.index("## 10.") : DOCUMENT.index("## 11.")]
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)]
    known = [value for name, value in vars(scalars.Tag).items() if name.isupper()]
    assert codes == known


def test_entry_kinds_of_the_document_are_those_of_the_code() -> None:
    section = DOCUMENT[DOCUMENT.index("## 7.") : DOCUMENT.index("## 8.")]
    fields = {tag: rest.count(",") for tag, rest in re.findall(r'^\| `\["(\w+)"([^\]]*)\]`', section, re.MULTILINE)}
    bodies = (entry.Create, entry.Commit, entry.Supersede, entry.Annotate, entry.Tag, entry.Retire)
    bodies += (entry.Prune, entry.Thin, entry.Condemn, entry.Generation, entry.Seal)
    assert fields == {body.__struct_config__.tag: len(body.__struct_fields__) for body in bodies}


# --- the values behind the examples ---

WEIGHTS = bytes.fromhex("0000803f 00000040 000040bf 0000a0c0")  # float32 1, 2, -0.75, -5
PLANES_PARAMS = bytes.fromhex("04 03 02 00 0000 01 01 01 01")
PLANES_PAYLOAD = bytes.fromhex("80 00 40 a0 3f 40 bf c0")
STRUCTURE = structure.Structure(
    1,
    structure.Mapping(
        "dict",
        ["weight", "bias", 7],
        [0, structure.Sequence("list", [1, None]), structure.Rng("python", None)],
    ),
    [
        structure.Leaf("torch", 0, 0, "float32", (2, 2), None, 3),
        structure.Leaf("numpy", 1, 4, "<i2", (3,), (-2,), 0),
    ],
    [(16, 4), (6, 2)],
)
SCALARS = [0.5, None, 2**70, (1, "é"), {b"x"}, 1j, scalars.Foreign("torch.dtype", "bfloat16")]
CHUNK = ObjectId(digest(WEIGHTS))
PARTS = (snapshot.Part(CHUNK, 3200, 500, 1), snapshot.Part(CHUNK, 100, 512, 0))
RING = snapshot.RingManifest(2, digest(structure.encode_structure(STRUCTURE)), 1 << 20, 5, 5, 1, CHUNK, 900, PARTS)
MANIFEST = snapshot.Manifest(1, digest(structure.encode_structure(STRUCTURE)), 1 << 20, 5, 27, 3, CHUNK * 3)
CONTEXT = snapshot.Context(1, 2, b'{"lr":0.1}', {"casckpt": "0.1.0", "python": "3.11.7"})
SNAPSHOT = snapshot.Snapshot(
    1,
    "main",
    "main",
    500,
    b"",
    b"",
    {"policy": snapshot.ComponentRef(digest(wire.encode(MANIFEST)), 500, 27)},
)


def header(kind: int, codec: int, plain: bytes, payload: bytes, params: bytes = b"") -> record.RecordHeader:
    return record.RecordHeader(
        kind=kind,
        codec=codec,
        codec_version=1,
        object_id=digest(plain),
        plain_size=len(plain),
        stored_size=len(payload),
        payload_check=check16(payload),
        params=params,
    )


def envelope(body: entry.Body, previous: bytes = bytes(32)) -> entry.Envelope:
    return entry.Envelope(WRITE, previous, 1_700_000_000_000_000_000, "node7", 4711, body)


def example_document() -> bytes:
    return document.encode_document(document.StoreDocument(1, STORE.hex(), "casckpt 0.1.0"))


def example_raw_record() -> bytes:
    return record.encode_header(header(record.CHUNK, 0, b"abc", b"abc"), is_aligned=False) + b"abc"


def example_planes_record() -> bytes:
    made = header(record.CHUNK, 3, WEIGHTS, PLANES_PAYLOAD, PLANES_PARAMS)
    return record.encode_header(made, is_aligned=True) + PLANES_PAYLOAD


def example_pack() -> bytes:
    made = header(record.CHUNK, 3, WEIGHTS, PLANES_PAYLOAD, PLANES_PARAMS)
    start = pack.encode_pack_header(PACK, STORE) + example_planes_record()
    start += bytes(record.padding(len(start)))
    return start + pack.encode_footer([pack.row_of(made, 64, 128)], len(start), PACK)


def example_create() -> bytes:
    return entry.encode_entry(0, STORE, envelope(entry.Create(example_document())), [])


def example_commit() -> bytes:
    plain = snapshot.encode_snapshot(SNAPSHOT)
    packed = example_pack()
    body = entry.Commit(
        "main",
        "main",
        500,
        digest(plain),
        b"",
        [entry.PackRef(PACK, len(packed), packed[-32:-16])],
        {"return": 12.5},
        {"note": "first"},
        {"policy": 27},
    )
    inline = [(header(record.SNAPSHOT, 0, plain, plain), plain)]
    return entry.encode_entry(1, STORE, envelope(body, example_create()[-32:]), inline)


def example_epoch() -> bytes:
    """Of two entries; an object inlined in the second is left out."""
    files = (example_create(), with_inlined(example_commit()))
    return epoch.encode_epoch(
        0, STORE, [epoch.seal_entry(data, entry.decode_entry(data, seq, "")) for seq, data in enumerate(files)]
    )


def with_inlined(encoded: bytes) -> bytes:
    """An entry with one more object in it."""
    found = entry.decode_entry(encoded, 1, "")
    records = [(each.header, each.payload) for each in found.records]
    return entry.encode_entry(1, STORE, found.envelope, [*records, (header(record.CHUNK, 0, b"abc", b"abc"), b"abc")])


EXAMPLES: dict[str, Callable[[], bytes]] = {
    "record, raw": example_raw_record,
    "record, planes, in a pack": example_planes_record,
    "pack": example_pack,
    "entry, create": example_create,
    "entry, commit": example_commit,
    "supersede": lambda: wire.encode(
        entry.Supersede("main", "main", 500, CHUNK, digest(b"abc"), [], {}, {}, {"replay": 16})
    ),
    "annotate": lambda: wire.encode(entry.Annotate(CHUNK, {"return": 13.0}, {})),
    "tag": lambda: wire.encode(entry.Tag("main", "best", CHUNK)),
    "retire": lambda: wire.encode(entry.Retire(CHUNK)),
    "prune": lambda: wire.encode(entry.Prune([CHUNK])),
    "thin": lambda: wire.encode(entry.Thin(CHUNK, ["optimizer"])),
    "condemn": lambda: wire.encode(entry.Condemn([PACK], [])),
    "generation": lambda: wire.encode(entry.Generation("main", 2, CHUNK, ["oom kill"])),
    "seal": lambda: wire.encode(
        entry.Seal([entry.EpochRef(0, len(example_epoch()), example_epoch()[-32:])], [entry.PackRef(PACK, 400, CHECK)])
    ),
    "epoch": example_epoch,
    "snapshot": lambda: snapshot.encode_snapshot(SNAPSHOT),
    "context": lambda: wire.encode(CONTEXT),
    "manifest": lambda: wire.encode(MANIFEST),
    "ring manifest": lambda: wire.encode(RING),
    "node": lambda: CHUNK * 2,
    "structure": lambda: structure.encode_structure(STRUCTURE),
    "scalar block": lambda: scalars.encode_scalars(SCALARS),
}


def examples() -> dict[str, bytes]:
    """The hex blocks of the document; whatever follows two spaces in a line explains it."""
    found = {}
    for title, block in re.findall(r"^### ([^\n]+)\n+```hex\n(.*?)```", DOCUMENT, re.MULTILINE | re.DOTALL):
        found[title] = bytes.fromhex("".join(line.split("  ")[0] for line in block.splitlines()))
    return found


def test_every_example_is_checked_and_every_kind_has_one() -> None:
    assert list(examples()) == list(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_what_the_code_writes(name: str) -> None:
    assert examples()[name].hex(" ", 4) == EXAMPLES[name]().hex(" ", 4)


def test_json_example_is_what_the_code_writes() -> None:
    block = re.search(r"^### casckpt.json\n+```json\n(.*?)```", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert block is not None
    assert block[1].encode() == example_document()
    assert document.decode_document(block[1].encode(), "example").store_id == STORE.hex()


def test_record_examples_are_read_back() -> None:
    for name, plain in (("record, raw", b"abc"), ("record, planes, in a pack", WEIGHTS)):
        data = examples()[name]
        found = record.decode_header(data, name, limit=len(data))
        out = bytearray(found.plain_size)
        payload = data[found.header_size :]
        decode_into(found.codec, found.codec_version, found.params, payload, (), memoryview(out))
        assert (bytes(out), digest(out)) == (plain, found.object_id)


def test_pack_example_is_read_back() -> None:
    data = examples()["pack"]
    assert pack.decode_pack_header(data[:64], "example") == (PACK, STORE)
    offset, size, check, pack_id = pack.decode_trailer(data[-80:], len(data), "example")
    rows = pack.decode_footer(data[offset : offset + size], check, offset, "example")
    assert (pack_id, [row.object_id for row in rows]) == (PACK, [CHUNK])


def test_entry_examples_are_read_back() -> None:
    first = entry.decode_entry(examples()["entry, create"], 0, "example")
    second = entry.decode_entry(examples()["entry, commit"], 1, "example")
    assert second.envelope.previous == first.digest == EntryDigest(examples()["entry, create"][-32:])
    assert isinstance(second.envelope.body, entry.Commit)
    assert second.envelope.body.snapshot == digest(second.records[0].payload) == digest(examples()["snapshot"])


def test_epoch_example_is_read_back() -> None:
    data = examples()["epoch"]
    size = 64 + epoch.table_size(2)
    assert epoch.decode_head(data[:64], 0, 2, len(data), "example") == STORE
    rows = epoch.decode_table(data[64:size], 2, len(data), "example")
    original = with_inlined(examples()["entry, commit"])
    assert [row.digest for row in rows] == [examples()["entry, create"][-32:], original[-32:]]
    assert [row.entry_size for row in rows] == [len(examples()["entry, create"]), len(original)]
    for seq, (name, row) in enumerate(zip(("entry, create", "entry, commit"), rows, strict=True)):
        assert data[row.offset : row.offset + row.size] == examples()[name]  # the image: without what was inlined
        found = epoch.decode_image(examples()[name], row, seq, "example")
        assert (found.digest, found.is_sealed) == (row.digest, True)
    assert digest(data[:-32]) == data[-32:]


def test_object_examples_are_read_back() -> None:
    found: dict[str, Any] = examples()
    assert snapshot.decode_snapshot(found["snapshot"], "example") == SNAPSHOT
    assert snapshot.decode_context(found["context"], "example") == CONTEXT
    assert snapshot.decode_manifest(found["manifest"], "example") == MANIFEST
    assert snapshot.decode_manifest(found["ring manifest"], "example") == RING
    assert snapshot.split_ids(found["node"], "example") == [CHUNK, CHUNK]
    assert structure.decode_structure(found["structure"]) == STRUCTURE
    assert scalars.decode_scalars(found["scalar block"]) == SCALARS
    chunks = layout.plan_layout(STRUCTURE.blocks, MANIFEST.scalars_size, MANIFEST.chunk_size).chunk_sizes
    assert (len(chunks), sum(chunks)) == (MANIFEST.chunk_count, MANIFEST.plain_size)
