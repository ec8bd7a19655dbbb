"""Pack files: their names, their tables of records, and what can still be found when a table is gone."""

from __future__ import annotations

from collections.abc import Iterator

from casckpt.errors import CorruptionError
from casckpt.format.entry import PackRef
from casckpt.format.pack import (
    HEADER_SIZE,
    TRAILER_SIZE,
    PackRow,
    decode_footer,
    decode_pack_header,
    decode_trailer,
    row_of,
)
from casckpt.format.record import FIXED_SIZE, HEADER_SIZE_MAX, claimed_size, decode_header, padding
from casckpt.ids import PACK_ID_SIZE, PackId, StoreId
from casckpt.limits import OBJECT_SIZE_MAX, RECORD_ALIGNMENT
from casckpt.storage.fs import File, FileSystem

_HEADER_READ = 4096  # covers a header with a hundred bases; of a longer one the rest is read too


def pack_path(root: str, pack_id: bytes) -> str:
    name = pack_id.hex()
    return f"{root}/packs/{name[:2]}/{name}"


def list_packs(fs: FileSystem, root: str) -> Iterator[PackId]:
    """Ids of all pack files, by name."""
    for shard in fs.list(f"{root}/packs"):
        for name in fs.list(f"{root}/packs/{shard}"):
            if len(name) == 2 * PACK_ID_SIZE and name.startswith(shard):
                try:
                    yield PackId(bytes.fromhex(name))
                except ValueError:
                    continue  # not a pack's name: nothing of ours


def read_rows(fs: FileSystem, root: str, pack_id: bytes, store_id: StoreId) -> tuple[list[PackRow], PackRef]:
    """The rows of a pack from its footer, or, where that is damaged, from the records themselves.

    Returns:
        The rows, and the reference by which an entry would name the pack (its footer check empty when scanned).

    Raises:
        FileNotFoundError: no such pack.
        CorruptionError: its header is damaged, or it belongs to another store.
    """
    path = pack_path(root, pack_id)
    what = f"pack {pack_id.hex()}"
    file = fs.open(path)
    try:
        size = file.size()
        found_id, found_store = decode_pack_header(_read(file, 0, HEADER_SIZE), what)
        if found_id != pack_id or found_store != store_id:
            raise CorruptionError(f"{what}: holds pack {found_id.hex()} of store {found_store.hex()}", pack_id=pack_id)
        try:
            trailer = _read(file, max(0, size - TRAILER_SIZE), TRAILER_SIZE)
            offset, footer_size, check, _ = decode_trailer(trailer, size, what)
            return decode_footer(_read(file, offset, footer_size), check, offset, what), PackRef(pack_id, size, check)
        except CorruptionError:
            return list(scan_rows(file, size)), PackRef(pack_id, size, b"")
    finally:
        file.close()


def scan_rows(file: File, size: int) -> Iterator[PackRow]:
    """Records found by walking a pack; after an unreadable header the next aligned position that holds one goes on."""
    at = HEADER_SIZE
    while at + FIXED_SIZE <= size:
        try:
            start = _read(file, at, min(_HEADER_READ, size - at))
            header_size = claimed_size(start)
            if _HEADER_READ < header_size <= min(size - at, HEADER_SIZE_MAX):
                start = _read(file, at, header_size)
            header = decode_header(start, f"record at {at}", limit=size - at)
        except CorruptionError:
            at += RECORD_ALIGNMENT
            continue
        yield row_of(header, at, header.header_size)
        end = at + header.header_size + header.stored_size
        at = end + padding(end)


def _read(file: File, offset: int, size: int) -> bytes:
    if size > 2 * OBJECT_SIZE_MAX:
        raise CorruptionError(f"{file.path}: a table of {size} bytes is over the limit", path=file.path)
    buffer = bytearray(size)
    return bytes(memoryview(buffer)[: file.read_into(buffer, offset)])
