"""Arguments of public entries, looked at where they are given: each error names the one that is wrong.

::

    @checked(store=Store, failure=maybe(FailureInfo), step=WHOLE)
    def recover(store, failure, step): …

A kind is a type, or a test with the words for what was expected. Numbers are whatever Python or NumPy has for them;
bool is none. `within(WHOLE, 1)` is one with a bound.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from casckpt.errors import InvalidInputError

P = ParamSpec("P")
T = TypeVar("T")


class Kind(NamedTuple):
    """What an argument is to be, in words and as a test.

    `of` is the kind that this one bounds: what is of that one has its type right, and not its value.
    """

    words: str
    fits: Callable[[Any], bool]
    of: Kind | None = None


def kind_of(*types: type, words: str = "") -> Kind:
    """One of some types."""
    return Kind(words or " or ".join(f"a {each.__name__}" for each in types), lambda value: isinstance(value, types))


def maybe(given: Kind | type) -> Kind:
    """None will do, too."""
    found = kind_of(given) if isinstance(given, type) else given
    return Kind(f"{found.words}, or None", lambda value: value is None or found.fits(value), found.of)


def within(kind: Kind, least: float, most: float = math.inf) -> Kind:
    """Numbers of a kind from `least` to `most`; NaN is none of them."""
    words = f"{kind.words} from {least} {'on' if most == math.inf else f'to {most}'}"
    return Kind(words, lambda value: kind.fits(value) and least <= value <= most, kind)


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)  # an array has `__index__`, too, and it works for one of a single item
    except TypeError:
        return False
    return not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _list_of(words: str, fits: Callable[[Any], bool]) -> Kind:
    return Kind(words, lambda value: isinstance(value, Collection) and _is_list(value) and all(map(fits, value)))


TEXT = kind_of(str, words="text")
FLAG = kind_of(bool, words="True or False")
PATH = kind_of(str, os.PathLike, words="a path")
MAPPING = kind_of(Mapping, words="a mapping of names")
WHOLE = Kind("an integer", _is_whole)
NUMBER = Kind("a number", lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool))
ORDERED = Kind("a number that is not NaN", lambda value: NUMBER.fits(value) and abs(value) <= math.inf, NUMBER)
FINITE = Kind("a finite number", lambda value: NUMBER.fits(value) and abs(value) < math.inf, NUMBER)
FUNCTION = Kind("a function", callable)
LIST = Kind("a list", _is_list)
TEXTS = _list_of("a list of texts", TEXT.fits)
FUNCTIONS = _list_of("a list of functions", callable)
STEP = within(WHOLE, 0)


def check(kinds: Mapping[str, Kind | type], given: Mapping[str, Any]) -> None:
    """Refuse the first argument that is not of its kind.

    Raises:
        InvalidInputError: names it, with what was expected.
    """
    for name, each in kinds.items():
        found = kind_of(each) if isinstance(each, type) else each
        if name in given and not found.fits(given[name]):
            value = given[name]
            got = "" if found.of is not None and found.of.fits(value) else f", got {type(value).__name__}"
            raise InvalidInputError(f"{name}={value!r:.80}: expected {found.words}{got}", name=name)


def checked(**kinds: Kind | type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function whose arguments of these names must be of these kinds. Costs a microsecond or two a call."""
    known = {name: kind_of(each) if isinstance(each, type) else each for name, each in kinds.items()}

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            check(known, {**dict(zip(names, args, strict=False)), **kwargs})
            return function(*args, **kwargs)  # which refuses what is too many or too few

        return call

    return decorate
