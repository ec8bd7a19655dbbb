"""Lists of numbers that grow with a run, such as the return of every episode, as arrays that cost what was added.

A list of plain numbers is one scalar of a snapshot, and stored anew whenever it changes. An array whose room doubles
has the same shape, and nearly the same bytes, in two commits that follow each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_LONG = 256  # numbers; shorter lists are stored whole, which costs less than a structure that changes
_DTYPES: dict[type, Any] = {float: np.float64, int: np.int64}


def column(values: list[Any]) -> Any:
    """A copy of a list; of a long one of numbers of one type, how many they are and an array that begins with them."""
    kinds = set(map(type, values)) if len(values) >= _LONG else set()
    if len(kinds) != 1 or not kinds <= _DTYPES.keys():
        return list(values)
    rows = np.zeros(1 << (len(values) - 1).bit_length(), _DTYPES[kinds.pop()])
    rows[: len(values)] = values
    return len(values), rows


def listed(stored: Any) -> list[Any]:
    """The list of which `column` was made."""
    return stored[1][: stored[0]].tolist() if isinstance(stored, tuple) else list(stored)
