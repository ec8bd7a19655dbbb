"""Seeds for many streams from one: `stream_seed`, and generators that start from it.

A stream is named by a root seed and a path of numbers and names (`worker 3, restart 1`). Its seed is a digest of both,
so streams are independent of each other, of the order in which they are made, and of library versions.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from casckpt.digest import digest
from casckpt.errors import InvalidInputError
from casckpt.state import rng

SEED_BITS = 63  # what every library takes; numpy's legacy generator gets it in words of 32


def stream_seed(root: int, *path: int | str) -> int:
    """The seed of a stream: an integer from 0 to 2**63 - 1, equal for equal arguments, for ever.

    Raises:
        InvalidInputError: `root` is no integer from 0 to 2**63 - 1.
    """
    if type(root) is not int or not 0 <= root < 1 << SEED_BITS:
        raise InvalidInputError(f"seed={root!r:.40}: expected an integer from 0 to 2**63 - 1")
    named = json.dumps([root, *path], ensure_ascii=True, separators=(",", ":"))
    return int.from_bytes(digest(named.encode())[:8], "little") >> (64 - SEED_BITS)


def seed_generator(generator: Any, seed: int) -> None:
    """Start a live generator (see `casckpt.state.rng`) anew from a seed; it keeps its algorithm and its identity."""
    kind = rng.kind_of(generator)
    if kind == "python":
        generator.seed(seed)
    elif kind == "torch":
        generator.manual_seed(seed)
    elif kind == "numpy.RandomState":
        generator.seed([seed & 0xFFFFFFFF, seed >> 32])
    else:
        bits = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(seed).state


def seed_globals(seed: int) -> list[str]:
    """Start the global generators of this process anew: python's, and numpy's and torch's where they are loaded.

    Returns:
        Their names.
    """
    random.seed(stream_seed(seed, "python"))
    names = ["python"]
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        words = stream_seed(seed, "numpy")
        numpy.random.seed([words & 0xFFFFFFFF, words >> 32])
        names.append("numpy")
    if torch is not None:
        torch.manual_seed(stream_seed(seed, "torch"))  # CUDA devices too
        names.append("torch")
    return names
