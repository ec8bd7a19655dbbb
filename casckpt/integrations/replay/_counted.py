"""Rows ever written, from a counter that is believed while it keeps in step with the buffer's place.

What only appends moves the counter and the place by the same number of slots. Where they part, rows were written in
another way, and no row of before is taken for known: the count jumps by a whole ring, so that all rows are new.

An object that counts calls of its methods gets a class of its own for it, which pickles and copies as the one that it
had: nothing of it is left in what its framework saves, and a copy never calls the methods of another object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_COUNT = "_casckpt_count"
_Weight = Callable[[Any], int]


class Counted:
    """A count of rows for one buffer."""

    def __init__(self) -> None:
        self._ahead = 0  # the count that is told minus the buffer's own
        self._phase: int | None = None
        self._told = 0

    def total(self, count: int, head: int, capacity: int, held: int) -> int:
        """The count to tell, for the buffer's own `count` and place; never fewer than are held."""
        phase = (count - head) % capacity
        if self._phase not in (None, phase):
            self._ahead += capacity
        self._phase = phase
        if count + self._ahead < held:
            self._ahead += capacity  # another ring of this buffer restored rows that no call wrote
        self._told = count + self._ahead
        return self._told

    def start_anew(self) -> None:
        """All rows that are there were written since the count was told last, whatever the buffer's own count is."""
        self._ahead, self._phase = self._told, None

    def stand_at(self, total: int, count: int, head: int, capacity: int) -> None:
        """From now on `count` means `total`."""
        self._ahead, self._phase, self._told = total - count, (count - head) % capacity, total


def once(result: Any) -> int:
    """What a call counts for, whatever it returns."""
    return 1


def count_calls(owner: Any, first: int, **weights: _Weight) -> None:
    """Let methods of one object count from now on, `first` before any call; what counts already goes on.

    Args:
        owner: any object whose attributes can be set; its class becomes a subclass that is of the same name.
        first: the count before any call.
        weights: method → what a call adds to the count, given its result. A call that raises adds nothing.
    """
    cls: Any = type(owner)
    if not hasattr(cls, _COUNT):
        owner.__class__ = _counting_class(cls, tuple(weights.items()))
        setattr(owner, _COUNT, first)


def calls_counted(owner: Any) -> int:
    """The count of an object that was given to `count_calls`."""
    return int(getattr(owner, _COUNT))


@functools.cache
def _counting_class(cls: Any, weights: tuple[tuple[str, _Weight], ...]) -> type:
    """A subclass of `cls` whose methods count, and that is pickled and copied as `cls`."""

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *rest = cls.__reduce_ex__(self, 2)
        return object.__new__, (cls,), *rest  # `copyreg.__newobj__` insists on the object's own class

    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "__slots__": ()}
    methods = {name: _counting_method(getattr(cls, name), weight) for name, weight in weights}
    counting: type = type(cls)(cls.__name__, (cls,), {**same, **methods, "__reduce_ex__": reduce, _COUNT: 0})
    return counting


def _counting_method(method: Callable[..., Any], weight: _Weight) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        setattr(self, _COUNT, getattr(self, _COUNT) + weight(result))
        return result

    return call
