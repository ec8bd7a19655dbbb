"""Arguments of what is public here, looked at where they are given: each error names the one that is wrong."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

from casckpt.arguments import NUMBER, WHOLE, Kind, check, maybe, within
from casckpt.errors import InvalidInputError


class Trim(NamedTuple):
    """What of a stored ring is wanted, as the arguments of `RingView.trimmed`."""

    rows: int | None = None
    since_step: int | None = None
    max_age_s: float | None = None


def checked_trim(rows: Any, since_step: Any, max_age_s: Any) -> Trim:
    """Those arguments as plain numbers.

    Raises:
        InvalidInputError: one is neither None nor what it should be.
    """
    check({"max_age_s": maybe(within(NUMBER, 0))}, {"max_age_s": max_age_s})
    return Trim(
        None if rows is None else whole(rows, "rows", least=0),
        None if since_step is None else whole(since_step, "since_step"),
        None if max_age_s is None else float(max_age_s),
    )


def whole(value: Any, name: str, *, least: int | None = None) -> int:
    """A number of rows or steps, of whatever integer type but bool.

    Raises:
        InvalidInputError: it is no integer, or below `least`.
    """
    check({name: WHOLE if least is None else within(WHOLE, least)}, {name: value})
    return operator.index(value)


def listed(value: Any, name: str) -> list[Any]:
    """The members of a list, array or the like; a text is none.

    Raises:
        InvalidInputError: it is something else.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidInputError(f"{name}={value!r:.80}: expected a list. Write `[{value!r:.80}]` for one.", name=name)
    return list(value)


def expect(value: Any, kinds: Any, name: str, what: str) -> None:
    """Refuse a value that is of none of the kinds.

    Raises:
        InvalidInputError: it is not; `what` says what it should have been.
    """
    check({name: Kind(what, lambda given: isinstance(given, kinds))}, {name: value})


def expect_buffer(value: Any, attributes: Iterable[str], what: str) -> None:
    """Refuse what is no buffer of a framework, by the attributes that one has.

    Raises:
        InvalidInputError: one is missing.
    """
    missing = [name for name in attributes if not hasattr(value, name)]
    if missing:
        raise InvalidInputError(
            f"a {type(value).__module__}.{type(value).__qualname__} is no buffer of {what}: it has no {missing[0]!r}. "
            "Wrap it in casckpt.replay.Arrays or Sliced.",
            name="buffer",
        )
