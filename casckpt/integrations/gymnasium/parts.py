"""A captured tree as bytes and back: a private copy, and what goes through a pipe to another process.

The forms are those of a snapshot (structure, scalars, blocks), so a tree that comes out of here is the tree that comes
out of a store: sharing between arrays is kept, and what cannot be stored is refused here already.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from casckpt.format.structure import decode_structure
from casckpt.state import Assembly, capture


class Parts(NamedTuple):
    """A tree as a snapshot holds it; `blocks` by number."""

    structure: bytes
    scalars: bytes
    blocks: dict[int, bytes]


def parts_of(tree: Any) -> Parts:
    """The bytes of a tree.

    Raises:
        UnsupportedStateError: something in it cannot be stored; `path` names it.
    """
    captured = capture("env", tree)
    blocks = {
        number: bytes(captured.blocks.view(number, 0, size))
        for number, (size, _) in enumerate(captured.structure.blocks)
    }
    return Parts(captured.structure_bytes, captured.scalars, blocks)


def tree_of(parts: Parts) -> Any:
    """The tree again, in memory of its own."""
    assembly = Assembly(decode_structure(parts.structure), "env")
    for number, memory in assembly.blocks.items():
        memory[:] = parts.blocks[number]
    return assembly.tree(parts.scalars)
