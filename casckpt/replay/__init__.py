"""Replay buffers: rings of rows of which a commit stores what is new, and a restore reads what is used.

* `Ring` is what takes part in a commit: a buffer, how far its old rows are trusted, what of it is kept
* `Arrays` and `Sliced` adapt dicts of arrays, tensors and memory maps, and buffers that only have a length and slices;
  `Buffer` is what an adapter of your own has
* `RingView` is a stored ring: rows by number, read when they are asked for; `MappedRows` are rows of it where they lie

Names are loaded when they are first used: what only lists a store needs no NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from casckpt.replay.arrays import Arrays
    from casckpt.replay.contract import Buffer, Position
    from casckpt.replay.mapped import MappedRows
    from casckpt.replay.ring import Ring
    from casckpt.replay.sliced import Sliced
    from casckpt.replay.view import RingView

__all__ = ["Arrays", "Buffer", "MappedRows", "Position", "Ring", "RingView", "Sliced"]

_LAZY = {
    "Arrays": "casckpt.replay.arrays",
    "Buffer": "casckpt.replay.contract",
    "MappedRows": "casckpt.replay.mapped",
    "Position": "casckpt.replay.contract",
    "Ring": "casckpt.replay.ring",
    "RingView": "casckpt.replay.view",
    "Sliced": "casckpt.replay.sliced",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'casckpt.replay' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
