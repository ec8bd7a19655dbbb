"""Epochs for the independent reader (docs/format.md §7): old timeline entries, a hundred to a file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

try:
    from independent_codecs import need
except ImportError:
    from tests.conformance.independent_codecs import need


PER_EPOCH = 100  # entries


class Image(NamedTuple):
    """An entry as it lies in an epoch, and the digest that it had."""

    data: bytes
    digest: bytes


class Epochs(NamedTuple):
    """All images by number; of each epoch its number, size and digest."""

    images: dict[int, Image]
    refs: list[list[Any]]

    def compare(self, told: list[Any]) -> None:
        """With what all seals say, in order: epochs follow one another, and those that are here are as they say."""
        need([ref[0] for ref in told] == list(range(len(told))), "epochs are not sealed in order")
        need(all(ref in told for ref in self.refs), "an epoch is not as a seal names it")


def read_epochs(root: Path, store_id: bytes) -> Epochs:
    images, refs = {}, []
    for path in sorted(root.glob("timeline/epochs/" + 18 * "[0-9]")):
        data, first = path.read_bytes(), PER_EPOCH * int(path.name)
        at = 64 + 56 * PER_EPOCH  # where the table ends
        need(len(data) > at + 48 and data[:8] == b"CASEPOC1", f"{path}: not an epoch")
        need(blake3(data[:-32]).digest() == data[-32:], f"{path}: digest")
        need(data[8:48] == struct.pack("<QQQ", first, PER_EPOCH, len(data)) + store_id, f"{path}: header")
        need(blake3(data[:48]).digest(16) == data[48:64], f"{path}: header check")
        table = data[64:at]
        need(blake3(table).digest(16) == data[at : at + 16], f"{path}: table check")
        at += 16
        for seq, row in enumerate(struct.iter_unpack("<32sQQQ", table), first):
            entry_digest, entry_size, offset, size = row
            need(offset == at and 96 <= size <= entry_size, f"{path}: image of entry {seq}")
            images[seq] = Image(data[at : at + size], entry_digest)
            at += size
        need(at == len(data) - 32, f"{path}: bytes after the images")
        refs.append([int(path.name), len(data), data[-32:]])
    return Epochs(images, refs)
