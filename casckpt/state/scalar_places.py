"""Places of a live object that take a stored scalar: what fits, known once the scalar block is, and how it is put.

A scalar is put by its parent container, except into a live list, set or deque, which keeps its identity. A stored
`None` replaces anything.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from typing import Any, NamedTuple

from casckpt.errors import MismatchError
from casckpt.state.differences import Difference
from casckpt.state.values import StoredEnum, to_foreign
from casckpt.state.walk import is_plain_sequence, type_name


class ScalarPlace(NamedTuple):
    """A live place that scalar number `position` goes to; `is_container` for a list or deque that it may empty."""

    position: int
    live: Any
    path: str
    is_container: bool

    def compare(self, value: Any, strict: bool) -> Difference | None:
        """What keeps a stored value from this place."""
        live = self.live
        if live is None or value is None:
            return None
        if isinstance(live, enum.Enum) and type(value) is StoredEnum:
            return _compare_enum(live, value, self.path)
        if not is_scalar(live) and not (self.is_container and type(value) is type(live)):
            return Difference(self.path, f"a {_family(value) or type(value).__name__}", f"a {type_name(live)}")
        stored_family, live_family = _family(value), _family(live)
        if strict and stored_family and live_family and stored_family != live_family:
            return Difference(self.path, f"a {stored_family}", f"a {live_family}", "strict=False")
        return None


def _compare_enum(live: enum.Enum, value: StoredEnum, path: str) -> Difference | None:
    try:
        value.resolve(type(live))
    except MismatchError:
        return Difference(path, f"{value.type_name}.{value.name}", f"no such member of {type(live).__name__}")
    return None


def _family(value: Any) -> str:
    """Values of one family may replace each other in a strict restore; "" where no family is known."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, enum.Enum):
        return ""
    if isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_)):
        return "bool"
    if isinstance(value, (int, float, complex)) or (numpy is not None and isinstance(value, numpy.number)):
        return "number"
    return "text" if isinstance(value, str) else "bytes" if isinstance(value, bytes) else ""


def is_scalar(live: Any) -> bool:
    """Whether a live value would be stored as one scalar."""
    if type(live) in (list, tuple, deque):
        return is_plain_sequence(live)
    if live is None or type(live) in (int, float, bool, str, bytes, complex, set, frozenset):
        return True
    try:
        return to_foreign(live) is not None
    except ValueError:
        return False


def put_scalar(live: Any, value: Any) -> Any:
    """What stands at a scalar's place afterwards: a live list, set or deque keeps its identity."""
    if isinstance(live, enum.Enum) and type(value) is StoredEnum:
        return value.resolve(type(live))
    if type(live) is type(value) is list:
        live[:] = value
    elif type(live) is type(value) is set:
        live.clear()
        live.update(value)
    elif type(live) is type(value) is deque and live.maxlen == value.maxlen:
        live.clear()
        live.extend(value)
    else:
        return value
    return live
