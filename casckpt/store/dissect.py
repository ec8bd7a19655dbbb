"""Any record of a store as facts: what its bytes say, and which of its checks hold.

For people who look at a store that is damaged, so nothing here gives up early: fields are read as far as there are
bytes, each check is reported by itself, and what cannot be decoded stays as bytes. Entries, packs and the document are
read from their files alone; objects and the index need an index that can be opened.

The result of every function is a `Dissection`; its values are plain, with bytes for ids and opaque parts.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from casckpt.digest import check16, digest
from casckpt.errors import CasckptError, CorruptionError, InvalidInputError, NotFoundError
from casckpt.format import wire
from casckpt.format.document import Features, decode_document, encode_document
from casckpt.format.entry import HEADER_SIZE, TRAILER_SIZE, Create, Envelope, decode_entry
from casckpt.format.pack import HEADER_SIZE as PACK_HEADER_SIZE
from casckpt.format.pack import TRAILER_SIZE as PACK_TRAILER_SIZE
from casckpt.format.pack import decode_footer, decode_pack_header, decode_trailer
from casckpt.format.record import CHUNK, FIXED_SIZE, KIND_NAMES, SNAPSHOT, RecordHeader, decode_header
from casckpt.format.snapshot import decode_context, decode_manifest, decode_snapshot, split_ids
from casckpt.format.structure import decode_structure
from casckpt.ids import ObjectId, StoreId, short
from casckpt.index.kv import KvReader
from casckpt.index.lifecycle import POINTER_NAME, IndexHome
from casckpt.index.tables import BAD, PENDING, TABLES, BadEntry, Pending, Place, decode_object, read_applied, read_meta
from casckpt.limits import ENTRY_SIZE_MAX, OBJECT_SIZE_MAX
from casckpt.objects.epochs import epoch_of
from casckpt.objects.packs import list_packs, pack_path, scan_rows
from casckpt.objects.timeline import Timeline
from casckpt.storage.fs import File, LocalFileSystem, read_file
from casckpt.storage.process import System
from casckpt.store.opening import DOCUMENT, find_document
from casckpt.store.store import Store

_ENTRY_HEADER = struct.Struct("<8sQQQ16s")  # docs/format.md; read here without believing any of it


@dataclass(frozen=True)
class Check:
    """One thing that must hold of a record, and what was found instead when it does not."""

    what: str
    is_ok: bool
    found: str = ""


@dataclass
class Dissection:
    """What a record says. `fields` are its own, `parts` the records or rows in it."""

    thing: str
    where: str
    size_bytes: int
    checks: list[Check] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return all(check.is_ok for check in self.checks)

    def check(self, what: str, act: Callable[[], Any]) -> Any:
        """Do something that raises when a check fails; note how it went and give its result, or None."""
        try:
            result = act()
        except (CasckptError, OSError, ValueError) as error:
            self.checks.append(Check(what, False, str(error)))
            return None
        self.checks.append(Check(what, True))
        return result

    def expect(self, what: str, expected: Any, found: Any) -> None:
        is_ok = expected == found
        self.checks.append(Check(what, is_ok, "" if is_ok else f"expected {_text(expected)}, found {_text(found)}"))


# --- entries ---


def dissect_entry(root: str, seq: int) -> Dissection:
    """Timeline entry `seq`, from its file, or what its epoch holds of it.

    Raises:
        NotFoundError: there is neither.
    """
    path = Timeline(root, StoreId(bytes(16)), System()).path(seq)
    sealed = None if os.path.lexists(path) else _image(root, seq)
    path, data = sealed or (path, _read(path, ENTRY_SIZE_MAX, f"timeline entry {seq}"))
    found = Dissection(f"timeline entry {seq}", path, len(data))
    body, inline_at = _entry_header(found, data, seq)
    if len(data) >= TRAILER_SIZE:
        found.fields["digest"] = data[-TRAILER_SIZE:]
        found.expect("digest of all bytes", digest(memoryview(data)[:-TRAILER_SIZE]), data[-TRAILER_SIZE:])
    envelope = found.check("body", lambda: wire.decode(Envelope, body, "body", canonical=False))
    found.fields["body"] = body if envelope is None else plain_fields(envelope)
    found.check("everything", lambda: decode_entry(data, seq, f"timeline entry {seq}"))
    found.parts += _inline_records(data, inline_at)
    return found


def _image(root: str, seq: int) -> tuple[str, bytes] | None:
    """The path of the epoch that entry `seq` is in, and what it holds of it."""
    document = find_document(LocalFileSystem(), root)
    if document is None:
        return None
    epochs = Timeline(root, StoreId(bytes.fromhex(document.store_id)), System()).epochs
    image = epochs.image(seq)
    return None if image is None else (epochs.path(epoch_of(seq)), image)


def _entry_header(found: Dissection, data: bytes, seq: int) -> tuple[bytes, int]:
    """Note the fixed fields; returns the bytes that should be the body, and where records should start."""
    if len(data) < HEADER_SIZE:
        found.checks.append(Check("header", False, f"{len(data)} bytes, a header has {HEADER_SIZE}"))
        return b"", len(data)
    magic, number, body_size, inline_size, store_id = _ENTRY_HEADER.unpack_from(data)
    found.fields |= {"magic": magic, "number": number, "body_size": body_size, "inline_size": inline_size}
    found.fields["store_id"] = store_id
    found.expect("header check", check16(data[: _ENTRY_HEADER.size]), data[_ENTRY_HEADER.size : HEADER_SIZE])
    found.expect("number", seq, number)
    found.expect("size of the file", HEADER_SIZE + body_size + inline_size + TRAILER_SIZE, len(data))
    stop = min(HEADER_SIZE + body_size, len(data))
    return data[HEADER_SIZE:stop], stop


def _inline_records(data: bytes, start: int) -> Iterator[dict[str, Any]]:
    view, at = memoryview(data), start
    while at + FIXED_SIZE <= len(data) - TRAILER_SIZE:
        try:
            header = decode_header(view[at:-TRAILER_SIZE], f"record at {at}", limit=len(data) - at)
        except CorruptionError as error:
            yield {"offset": at, "error": error.message}
            return
        payload = view[at + header.header_size : at + header.header_size + header.stored_size]
        yield _record_fields(header, at, payload)
        at += header.header_size + header.stored_size


def _record_fields(header: RecordHeader, offset: int, payload: memoryview) -> dict[str, Any]:
    fields = {name: getattr(header, name) for name in header.__struct_fields__ if name != "kind"}
    is_good = check16(payload) == header.payload_check
    kind = KIND_NAMES.get(header.kind, str(header.kind))
    return {"offset": offset, "kind": kind, **fields, "bases": list(header.bases), "is_payload_good": is_good}


# --- packs ---


def find_pack(root: str, prefix: str) -> bytes:
    """The pack whose id starts with these hex digits.

    Raises:
        NotFoundError, InvalidInputError: none or several do.
    """
    ids = [pack_id for pack_id in list_packs(System().file_system, root) if pack_id.hex().startswith(prefix)]
    return _only(ids, prefix, "pack")


def dissect_pack(root: str, pack_id: bytes) -> Dissection:
    """A pack: header, trailer, table, and each record with its payload checked. Reads the whole file.

    Raises:
        NotFoundError: there is no such pack.
    """
    path = pack_path(root, pack_id)
    try:
        file = System().file_system.open(path)
    except FileNotFoundError:
        raise NotFoundError(f"pack {pack_id.hex()}: no such file {path}", pack_id=pack_id) from None
    try:
        found = Dissection(f"pack {pack_id.hex()}", path, file.size())
        head = _bytes_at(file, 0, PACK_HEADER_SIZE)
        header = found.check("header", lambda: decode_pack_header(head, "pack header"))
        if header is not None:
            found.fields |= {"pack_id": header[0], "store_id": header[1]}
            found.expect("pack id", pack_id, header[0])
        else:
            found.fields["header"] = head
        rows = _pack_table(found, file)
        found.fields["table"] = "footer" if rows is not None else "scanned, since the footer cannot be read"
        for row in rows if rows is not None else scan_rows(file, found.size_bytes):
            found.parts.append(_pack_record(file, row.offset, row.header_size, row.stored_size))
        bad = sum(1 for part in found.parts if not part.get("is_payload_good"))
        found.expect("payloads of all records", 0, bad)
        return found
    finally:
        file.close()


def _pack_table(found: Dissection, file: File) -> Any:
    """The rows of the footer, or None."""
    size = found.size_bytes
    end = _bytes_at(file, max(0, size - PACK_TRAILER_SIZE), PACK_TRAILER_SIZE)
    trailer = found.check("trailer", lambda: decode_trailer(end, size, "trailer"))
    if trailer is None:
        found.fields["trailer"] = end
        return None
    offset, footer_size, check, _ = trailer
    found.fields |= {"footer_offset": offset, "footer_size": footer_size, "footer_check": check}
    footer = _bytes_at(file, offset, min(footer_size, 2 * OBJECT_SIZE_MAX))
    return found.check("footer", lambda: decode_footer(footer, check, offset, "footer"))


def _pack_record(file: File, offset: int, header_size: int, stored_size: int) -> dict[str, Any]:
    data = _bytes_at(file, offset, min(header_size + stored_size, 2 * OBJECT_SIZE_MAX))
    try:
        header = decode_header(data, f"record at {offset}", limit=len(data))
    except CorruptionError as error:
        return {"offset": offset, "error": error.message}
    return _record_fields(header, offset, memoryview(data)[header.header_size :])


# --- objects ---


def dissect_object(store: Store, prefix: str) -> Dissection:
    """An object by the first hex digits of its address: its records, and its content decoded.

    Raises:
        NotFoundError, InvalidInputError: none or several have this prefix.
    """
    store._keeper.catch_up()
    start = bytes.fromhex(prefix[: len(prefix) // 2 * 2])
    with store._keeper.kv.read() as txn:
        ids = []
        for table in ("objects", "snaps"):
            for key, _ in txn.scan(table, start, None):
                if not key.startswith(start):
                    break
                if key.hex().startswith(prefix):
                    ids.append(key)
        object_id = ObjectId(_only(ids, prefix, "object"))
        row = txn.get("objects", object_id)
        found = Dissection(f"object {object_id.hex()}", store.path, 0)
        found.fields["reference_count"], places = decode_object(row) if row else (0, [])
        found.parts += [_place_fields(store, place, txn) for place in places]
    kind = SNAPSHOT if row is None else 0
    for part in found.parts:
        kind = next((number for number, name in KIND_NAMES.items() if name == part.get("kind")), kind)
    plain = found.check("content has this address", lambda: store._keeper.reader.read(object_id))
    found.fields["kind"] = KIND_NAMES.get(kind, "unknown")
    if plain is not None:
        found.size_bytes = len(plain)
        found.fields["content"] = _content(found, kind, plain)
    return found


def _place_fields(store: Store, place: Place, txn: KvReader) -> dict[str, Any]:
    """Where a record is, and what its header says there."""
    if place.is_inline:
        where, path, offset = f"timeline entry {place.entry_seq}", store._timeline.path(place.entry_seq), 0
        offset = place.entry_offset
    else:
        pack_id = store._keeper.reader.pack_id(place.pack_no, txn)
        where, path, offset = f"pack {pack_id.hex()}", pack_path(store.path, pack_id), place.offset
    try:
        file = store._timeline.fs.open(path)
    except OSError as error:
        return {"where": where, "offset": offset, "error": f"{path}: {error}"}
    try:
        return {"where": where, **_pack_record(file, offset, place.header_size, place.stored_size)}
    finally:
        file.close()


def _content(found: Dissection, kind: int, plain: bytes) -> Any:
    """The plain bytes decoded where they are no state."""
    name = KIND_NAMES.get(kind, "")
    decoders: dict[str, Callable[[bytes], Any]] = {
        "snapshot": lambda data: decode_snapshot(data, "snapshot"),
        "context": lambda data: decode_context(data, "context"),
        "manifest": lambda data: decode_manifest(data, "manifest"),
        "structure": decode_structure,
        "node": lambda data: split_ids(data, "node"),
    }
    if kind == CHUNK or name not in decoders:
        return plain
    decoded = found.check(f"content is a {name}", lambda: decoders[name](plain))
    return plain if decoded is None else plain_fields(decoded)


# --- document and index ---


def dissect_document(root: str) -> Dissection:
    """casckpt.json and its copy in timeline entry 0."""
    path = f"{root}/{DOCUMENT}"
    found = Dissection("document", path, 0)
    raw = found.check(DOCUMENT, lambda: _read(path, ENTRY_SIZE_MAX, DOCUMENT))
    copy = found.check("copy in timeline entry 0", lambda: _document_copy(root))
    for name, data in ((DOCUMENT, raw), ("entry 0", copy)):
        if data is None:
            continue
        found.size_bytes = found.size_bytes or len(data)
        document = found.check(f"{name} decodes", partial(decode_document, data, name))
        found.fields[name] = data if document is None else plain_fields(document)
    if raw is not None and copy is not None:
        found.expect("both are equal", _essence(copy), _essence(raw))
    if raw is None and copy is None:
        raise NotFoundError(f"{root}: no store here. Check the path.", path=root)
    return found


def _essence(data: bytes) -> bytes:
    """A document without its features, which may be added to the file; the bytes themselves where they are none."""
    try:
        return encode_document(msgspec.structs.replace(decode_document(data, "document"), features=Features()))
    except CasckptError:
        return data


def _document_copy(root: str) -> bytes:
    path = Timeline(root, StoreId(bytes(16)), System()).path(0)
    body = decode_entry(_read(path, ENTRY_SIZE_MAX, "timeline entry 0"), 0, "timeline entry 0").envelope.body
    if not isinstance(body, Create):
        raise CorruptionError("timeline entry 0 is no Create entry")
    return body.document


def dissect_index(root: str, store_id: StoreId) -> Dissection:
    """The index as it lies on disk: whether a reader would trust it, and what is in it. Nothing is changed.

    No handle of this store may be open in this process.
    """
    home = IndexHome(root, store_id, TABLES, read_only=True)
    found = Dissection("index", home.root or "nowhere", 0)
    if home.root is not None:
        pointer = os.path.join(home.root, POINTER_NAME)
        if os.path.isfile(pointer):
            with open(pointer, "rb") as file:
                found.fields["pointer"] = file.read(ENTRY_SIZE_MAX).decode(errors="replace")
    kv = home.open()
    found.expect("trusted", None, home.reason)
    if kv is None:
        return found
    try:
        with kv.read() as txn:
            found.fields["generation"] = home.generation
            found.fields["rows"] = {table: txn.count(table) for table in TABLES}
            applied = read_applied(txn)
            found.fields["applied"] = None if applied is None else plain_fields(applied)
            found.fields["pending"] = [plain_fields(row) for row in read_meta(txn, PENDING, Pending)]
            found.fields["bad"] = [plain_fields(row) for row in read_meta(txn, BAD, BadEntry)]
            found.fields["damage"] = {key.hex(): reason.decode() for key, reason in txn.scan("damage")}
    finally:
        kv.close()
    return found


# --- helpers ---


def plain_fields(value: Any) -> Any:
    """Structs as dicts that name their fields; everything else as it is."""
    if isinstance(value, msgspec.Struct):
        fields = {name: plain_fields(getattr(value, name)) for name in value.__struct_fields__}
        tag = value.__struct_config__.tag
        return {"kind_of_entry": tag, **fields} if isinstance(tag, str) else fields
    if isinstance(value, list | tuple):
        return [plain_fields(item) for item in value]
    if isinstance(value, dict):
        return {key: plain_fields(item) for key, item in value.items()}
    return value


def _only(ids: list[Any], prefix: str, what: str) -> bytes:
    if len(ids) == 1:
        return bytes(ids[0])
    if ids:
        raise InvalidInputError(f"{prefix!r} fits {len(ids)} {what}s ({', '.join(map(short, ids[:3]))} …): more digits")
    raise NotFoundError(f"no {what} id starts with {prefix!r}", prefix=prefix)


def _read(path: str, size_max: int, what: str) -> bytes:
    try:
        return read_file(System().file_system, path, size_max)
    except FileNotFoundError:
        raise NotFoundError(f"{what}: no such file {path}", path=path) from None


def _bytes_at(file: File, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    return bytes(memoryview(buffer)[: file.read_into(buffer, offset)])


def _text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) and len(value) <= 32 else f"{value!r:.80}"
