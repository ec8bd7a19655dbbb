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


def trash_path(root: str, pack_id: bytes) -> str:
    """Where a collector moves a condemned pack before it is gone for good."""
    return f"{root}/trash/{pack_id.hex()}"


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

    A damaged header costs nothing: the footer names the pack too, and every record is proven by its own address.

    Raises:
        FileNotFoundError: no such pack.
        CorruptionError: it is another pack, or belongs to another store.
    """
    file = fs.open(pack_path(root, pack_id))
    try:
        try:
            owner = _read_owner(file)
        except CorruptionError:
            owner = PackId(pack_id), store_id
        _check_owner(pack_id, store_id, *owner)
        try:
            return _read_footer(file, pack_id)
        except CorruptionError:
            return list(scan_rows(file, file.size())), PackRef(pack_id, file.size(), b"")
    finally:
        file.close()


def check_frame(fs: FileSystem, root: str, pack_id: bytes, store_id: StoreId) -> None:
    """Prove that a pack's header and footer are as written; says nothing of its records.

    Raises:
        FileNotFoundError: no such pack.
        CorruptionError: they are not, or it is another pack.
    """
    file = fs.open(pack_path(root, pack_id))
    try:
        _check_owner(pack_id, store_id, *_read_owner(file))
        _read_footer(file, pack_id)
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


def _read_owner(file: File) -> tuple[PackId, StoreId]:
    return decode_pack_header(_read(file, 0, HEADER_SIZE), f"pack {file.path.rpartition('/')[2]}")


def _check_owner(pack_id: bytes, store_id: StoreId, found_id: PackId, found_store: StoreId) -> None:
    if found_id != pack_id or found_store != store_id:
        raise CorruptionError(
            f"pack {pack_id.hex()}: holds pack {found_id.hex()} of store {found_store.hex()}", pack_id=pack_id
        )


def _read_footer(file: File, pack_id: bytes) -> tuple[list[PackRow], PackRef]:
    what = f"pack {pack_id.hex()}"
    size = file.size()
    trailer = _read(file, max(0, size - TRAILER_SIZE), TRAILER_SIZE)
    offset, footer_size, check, found_id = decode_trailer(trailer, size, what)
    if found_id != pack_id:
        raise CorruptionError(f"{what}: ends as pack {found_id.hex()}", pack_id=pack_id)
    return decode_footer(_read(file, offset, footer_size), check, offset, what), PackRef(PackId(pack_id), size, check)


def _read(file: File, offset: int, size: int) -> bytes:
    if size > 2 * OBJECT_SIZE_MAX:
        raise CorruptionError(f"{file.path}: a table of {size} bytes is over the limit", path=file.path)
    buffer = bytearray(size)
    return bytes(memoryview(buffer)[: file.read_into(buffer, offset)])
