"""Migrations: from the state that an older release of somebody's code committed to the one that today's code loads.

::

    @casckpt.migration(from_version=3)
    def split_heads(state):
        state["policy"]["actor.weight"] = state["policy"].pop("head.weight")
        return state

A migration gets the whole state as trees (component name → what `Store.restore` gives) and returns it one schema
version later. From version 3 to 5 those of 3 and 4 run, in this order. A version without a migration is refused before
anything is read, one that fails before anything is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from casckpt.arguments import WHOLE, checked, within
from casckpt.errors import AlreadyExistsError, MismatchError

State = dict[str, Any]
Migrate = Callable[[State], State]


class Migrations:
    """Functions by the schema version that they start from."""

    def __init__(self) -> None:
        self._functions: dict[int, Migrate] = {}

    @checked(from_version=within(WHOLE, 0))
    def migration(self, *, from_version: int) -> Callable[[Migrate], Migrate]:
        """Register the decorated function as the step from `from_version` to the next version.

        Raises:
            AlreadyExistsError: there is another one from this version.
            InvalidInputError: it is no version.
        """

        def register(function: Migrate) -> Migrate:
            known = self._functions.get(from_version)
            if known is not None and _name(known) != _name(function):  # a module that is imported again is no conflict
                raise AlreadyExistsError(
                    f"from version {from_version} there is a migration already, {_name(known)}. Take it away, or give "
                    "this one another version.",
                    version=from_version,
                )
            self._functions[from_version] = function
            return function

        return register

    @checked(found=WHOLE, expected=WHOLE)
    def chain(self, found: int, expected: int) -> list[Migrate]:
        """The functions that lead from one version to another; none when they are equal.

        Raises:
            MismatchError: the stored state is newer than the code, or a step is missing.
        """
        if found > expected:
            raise MismatchError(
                f"the snapshot has schema version {found}, this code expects {expected}: it is older than the code "
                "that committed. Use that one, or restore an older snapshot.",
                expected=expected,
                found=found,
            )
        missing = [version for version in range(found, expected) if version not in self._functions]
        if missing:
            raise MismatchError(
                f"the snapshot has schema version {found}, this code expects {expected}, and no migration leads on "
                f"from {missing}. Nothing was touched. Register one with "
                f"`@casckpt.migration(from_version={missing[0]})`.",
                expected=expected,
                found=found,
                missing=missing,
            )
        return [self._functions[version] for version in range(found, expected)]


registered = Migrations()  # those of `@casckpt.migration`
migration = registered.migration


def migrate(state: State, chain: list[Migrate]) -> State:
    """Run migrations one after the other.

    Raises:
        MismatchError: one failed, or returned no state; `__cause__` is what it raised.
    """
    for function in chain:
        try:
            state = function(state)
        except Exception as error:  # a function of the user's, which may raise anything: nothing is touched yet
            raise MismatchError(
                f"migration {_name(function)} failed: {type(error).__name__}: {error}. Nothing was touched."
            ) from error
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise MismatchError(
                f"migration {_name(function)} returned a {type(state).__name__}; expected a dict of component name to "
                "tree. Nothing was touched."
            )
    return state


def _name(function: Migrate) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
