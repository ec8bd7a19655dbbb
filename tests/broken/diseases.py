"""One broken store per disease: how it is made from a healthy one, and what must be said and still work.

The healthy store has three snapshots of two components; `weights` lies in packs, `counter` inline in the entries:

    step 1  weights A   pack 1      step 2  weights A (shared)      step 3  weights B   pack 2
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from casckpt.format import entry as entry_format
from casckpt.ids import StoreId
from tests.unit.stores import open_store

STEPS = (1, 2, 3)


def weights(step: int) -> Any:
    return np.random.default_rng(step // 3).integers(0, 1 << 63, 40_000)


def state(step: int) -> dict[str, Any]:
    return {"counter": {"step": step}, "weights": {"w": weights(step)}}


def make_healthy(path: Path) -> None:
    with open_store(path) as store:
        for step in STEPS:
            store.commit(step, state(step), metrics={"step": step})
    shutil.rmtree(path / "index")


def entry(store: Path, seq: int) -> Path:
    return store / "timeline" / f"{0:014d}" / f"{seq:020d}"


def pack(store: Path, step: int) -> Path:
    """The pack with the weights of a step."""
    needle = weights(step)[:10].tobytes()
    return next(path for path in store.glob("packs/*/*") if needle in path.read_bytes())


def write(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at if at >= 0 else path.stat().st_size + at)
        file.write(data)


def store_id(store: Path) -> StoreId:
    return StoreId(bytes.fromhex(json.loads((store / "casckpt.json").read_text())["store_id"]))


def rewrite(path: Path, seq: int, change: Callable[[entry_format.Envelope], Any]) -> None:
    """An entry as its writer would have made it with another body."""
    found = entry_format.decode_entry(path.read_bytes(), seq, "entry")
    records = [(record.header, record.payload) for record in found.records]
    path.write_bytes(entry_format.encode_entry(seq, found.store_id, change(found.envelope), records))


@dataclass(frozen=True)
class Disease:
    """A way to be broken.

    Attributes:
        infect: does it to a healthy store without an index.
        kinds: kinds of problems that a verification must report, and no others.
        says: what its report, or the error of opening, must contain.
        lost: steps that cannot be restored any more.
        unlisted: steps that no list has, because their entry is not readable.
        refused: opening raises; the message contains `says`.
    """

    infect: Callable[[Path], None]
    kinds: frozenset[str] = frozenset()
    says: str = ""
    lost: tuple[int, ...] = ()
    unlisted: tuple[int, ...] = ()
    refused: str = ""


def _flip_chunk(store: Path) -> None:
    path = pack(store, 1)
    at = path.read_bytes().index(weights(1)[100:110].tobytes())
    write(path, at, bytes(10))


def _newer_entry(store: Path) -> None:
    class Merge(msgspec.Struct, frozen=True, array_like=True, tag="merge"):
        upto: int

    envelope = entry_format.decode_entry(entry(store, 3).read_bytes(), 3, "entry").envelope
    newer = msgspec.structs.replace(envelope, body=Merge(2))
    entry(store, 4).write_bytes(entry_format.encode_entry(4, store_id(store), newer, []))


def _forged_step(store: Path) -> None:
    def change(envelope: entry_format.Envelope) -> Any:
        return msgspec.structs.replace(envelope, body=msgspec.structs.replace(envelope.body, step=-5))

    rewrite(entry(store, 3), 3, change)


def _other_history(store: Path) -> None:
    """Entry 2 as a writer with another clock would have written it: intact, but not what entry 3 continues."""
    rewrite(entry(store, 2), 2, lambda envelope: msgspec.structs.replace(envelope, written_at_ns=1))


def _foreign(store: Path, what: str) -> None:
    """A file of another store under a name of this one."""
    with open_store(store.parent / "foreign") as other:
        for step in STEPS:
            other.commit(step, state(step))
    if what == "entry":
        shutil.copy(entry(store.parent / "foreign", 3), entry(store, 3))
    else:
        shutil.copy(pack(store.parent / "foreign", 3), pack(store, 3))


def _document(store: Path, **fields: Any) -> None:
    path = store / "casckpt.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _both_documents(store: Path) -> None:
    (store / "casckpt.json").unlink()
    os.truncate(entry(store, 0), 50)


def _link(store: Path) -> None:
    path = pack(store, 3)
    path.rename(store.parent / "elsewhere")
    path.symlink_to(store.parent / "elsewhere")


def _litter(store: Path) -> None:
    (store / "tmp" / "somebody-died-here").write_bytes(bytes(1000))
    (store / "packs" / "ff").mkdir(exist_ok=True)
    (store / "packs" / "ff" / "notes.txt").write_text("mine")
    (store / "timeline" / "README").write_text("mine")
    shutil.copy(entry(store, 1), entry(store, 1).parent / "copy of 1")


TIMELINE, CORRUPT = frozenset({"timeline"}), frozenset({"corrupt"})
PACK_GONE, PACK_BAD = frozenset({"missing", "incomplete"}), frozenset({"missing", "incomplete", "corrupt"})

DISEASES: dict[str, Disease] = {
    "healthy": Disease(lambda store: None),
    "litter": Disease(_litter),
    "no folder for temporary files": Disease(lambda store: shutil.rmtree(store / "tmp")),
    "no document": Disease(lambda store: (store / "casckpt.json").unlink()),
    "garbled document": Disease(lambda store: write(store / "casckpt.json", 0, bytes(100))),
    "first entry lost": Disease(lambda store: entry(store, 0).unlink(), TIMELINE, "entry 0 is missing"),
    "chunk rotten": Disease(_flip_chunk, CORRUPT, "digest mismatch", lost=(1, 2)),
    "pack lost": Disease(lambda store: pack(store, 3).unlink(), PACK_GONE, "missing", lost=(3,)),
    "pack cut": Disease(lambda store: os.truncate(pack(store, 3), 1000), PACK_BAD, "1000 bytes", lost=(3,)),
    "pack's table garbled": Disease(lambda store: write(pack(store, 1), -80, bytes(80)), CORRUPT, "found without it"),
    "pack's header garbled": Disease(lambda store: write(pack(store, 1), 0, bytes(64)), CORRUPT, "not a pack"),
    "pack of another store": Disease(lambda store: _foreign(store, "pack"), PACK_BAD, "pack", lost=(3,)),
    "link instead of a pack": Disease(_link, PACK_GONE, "pack", lost=(3,)),
    "entry lost": Disease(
        lambda store: entry(store, 2).unlink(), TIMELINE, "entry 2 is missing", lost=(2,), unlisted=(2,)
    ),
    "entry of zero bytes": Disease(
        lambda store: os.truncate(entry(store, 3), 0), TIMELINE, "entry 3", lost=(3,), unlisted=(3,)
    ),
    "entry garbled": Disease(
        lambda store: write(entry(store, 2), 100, b"?"), TIMELINE, "entry 2: digest", lost=(2,), unlisted=(2,)
    ),
    "entry under another number": Disease(
        lambda store: entry(store, 2).write_bytes(entry(store, 1).read_bytes()) and None,
        TIMELINE,
        "holds entry 1, expected 2",
        lost=(2,),
        unlisted=(2,),
    ),
    "entry of another store": Disease(
        lambda store: _foreign(store, "entry"), TIMELINE, "belongs to store", lost=(3,), unlisted=(3,)
    ),
    "entry of another history": Disease(_other_history, TIMELINE, "links to"),
    "entry with a forged step": Disease(_forged_step, TIMELINE, "malformed", lost=(3,), unlisted=(3,)),
    "newer entry": Disease(_newer_entry, refused="UnsupportedFormatError", says="does not know"),
    "newer format": Disease(
        lambda store: _document(store, casckpt_format=2), refused="UnsupportedFormatError", says="format 2"
    ),
    "unknown feature": Disease(
        lambda store: _document(store, features={"read": ["x"]}), refused="UnsupportedFormatError", says="['x']"
    ),
    "both documents lost": Disease(_both_documents, refused="CorruptionError", says="backup"),
}
