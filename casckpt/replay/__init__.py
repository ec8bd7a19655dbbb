"""Replay buffers: rings of rows of which a commit stores what is new, and a restore reads what is used.

* `Ring` is what takes part in a commit: a buffer, how far its old rows are trusted, what of it is kept
* `Arrays` and `Sliced` adapt dicts of arrays, tensors and memory maps, and buffers that only have a length and slices;
  `Buffer` is what an adapter of your own has
* `RingView` is a stored ring: rows by number, read when they are asked for
"""

from casckpt.replay.arrays import Arrays
from casckpt.replay.contract import Buffer, Position
from casckpt.replay.ring import Ring
from casckpt.replay.sliced import Sliced
from casckpt.replay.view import RingView

__all__ = ["Arrays", "Buffer", "Position", "Ring", "RingView", "Sliced"]
