"""Rows ever written, from a counter that is believed while it keeps in step with the buffer's place.

What only appends moves the counter and the place by the same number of slots. Where they part, rows were written in
another way, and no row of before is taken for known: the count jumps by a whole ring, so that all rows are new.
"""

from __future__ import annotations

from typing import Any


class Counted:
    """A count of rows for one buffer."""

    def __init__(self) -> None:
        self._ahead = 0  # the count that is told minus the buffer's own
        self._phase: int | None = None

    def total(self, count: int, head: int, capacity: int) -> int:
        """The count to tell, for the buffer's own `count` and place."""
        phase = (count - head) % capacity
        if self._phase not in (None, phase):
            self._ahead += capacity
        self._phase = phase
        return count + self._ahead

    def stand_at(self, total: int, count: int, head: int, capacity: int) -> None:
        """From now on `count` means `total`."""
        self._ahead, self._phase = total - count, (count - head) % capacity


class CountingCall:
    """A method of one object that counts its calls; pickled with the object that has it.

    Raises whatever the method raises, and then does not count.
    """

    def __init__(self, owner: Any, name: str, count: int) -> None:
        self._owner, self._name = owner, name
        self.count = count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = getattr(type(self._owner), self._name)(self._owner, *args, **kwargs)
        self.count += 1
        return result

    @classmethod
    def of(cls, owner: Any, name: str, count: int) -> CountingCall:
        """The counting form of a method, put in its place; the one that is there already."""
        found = vars(owner).get(name)
        if not isinstance(found, cls):
            found = cls(owner, name, count)
            setattr(owner, name, found)
        return found
