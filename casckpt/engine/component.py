"""A registered component: where its state comes from, how it is saved, and when it was captured last.

A provider is an object with `state_dict()` and `load_state_dict()`, a tree of live objects, or a callable that returns
the state, with another one that puts it back. Callables are wrapped, so that a store sees one kind of thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from casckpt.engine.strategy import Recent, SaveStrategy
from casckpt.errors import InvalidInputError, MismatchError
from casckpt.replay.ring import Ring
from casckpt.state.capture import capture
from casckpt.state.target import Target
from casckpt.state.walk import is_checkpointable


class Component:
    """One registered component.

    Attributes:
        target: what a commit captures and a restore fills.
        is_restorable: false for a callback without `load`.
        step: of its last capture; where counting began before the first.
        from_step, from_s: where its interval began: then, or when a save was skipped.
        is_overdue: a capture failed, or there was none yet.
        manifest: address of the last capture known to be durable, empty before it.
    """

    def __init__(self, name: str, provider: Any, load: Callable[[Any], None] | None, strategy: SaveStrategy) -> None:
        self.name = name
        self.strategy = strategy
        self.target, self.is_restorable = _target(name, provider, load, strategy)
        self.step = self.from_step = 0
        self.from_s = 0.0
        self.is_overdue = False
        self.manifest = ""
        self.is_told_unchanged = False

    def check_restorable(self) -> None:
        """Refuse a tree that no restore could fill: better before the training than after a crash.

        What a restore may leave alone is let through, and so is what loads itself. Cost: the structure, once more.

        Raises:
            InvalidInputError: a part of it cannot change.
            UnsupportedStateError: a part of it cannot be stored.
        """
        if self.strategy.necessity != "exact" or isinstance(self.target, Ring) or is_checkpointable(self.target):
            return
        captured = capture(self.name, self.target)
        try:
            Target(self.name, self.target, captured.structure).check(captured.scalars, allow_pickle=True)
        except MismatchError as error:
            differences = error.facts["differences"]
            found = "; ".join(f"{path}: expected {wanted}, found {got}" for path, wanted, got, *_ in differences)
            raise InvalidInputError(
                f"component {self.name!r}: what is registered cannot be put back: {found}. Register what holds it, "
                "functions (register(name, get, load=put)), or say necessity='reloadable' and name it in "
                "`restore(leave=[…])`.",
                component=self.name,
            ) from error

    def count_from(self, step: int, now_s: float) -> None:
        """Begin a new interval here."""
        self.skip(step, now_s)
        self.step, self.is_overdue = step, False

    def skip(self, step: int, now_s: float) -> None:
        """Begin a new interval without a capture: what a failed save owes is owed on."""
        self.from_step, self.from_s = step, now_s

    def is_due(self, step: int, now_s: float) -> bool:
        """Whether a multiple of `every_steps` was passed in its interval, or its seconds are used up.

        Multiples, so that a run that was resumed saves the steps that it would have saved. A clock that went back
        says nothing of what passed: then it is due at once.
        """
        strategy = self.strategy
        every = strategy.every_steps
        by_steps = every is not None and step // every > self.from_step // every
        by_time = strategy.every_seconds is not None and not 0 <= now_s - self.from_s < strategy.every_seconds
        return by_steps or by_time or (self.is_overdue and strategy.has_cadence)


class _Callbacks:
    """A Checkpointable made of two functions."""

    def __init__(self, provide: Callable[[], Any], load: Callable[[Any], None]) -> None:
        self.state_dict = provide
        self.load_state_dict = load


class _Capture:
    """A state that can be taken and not put back."""

    def __init__(self, provide: Callable[[], Any]) -> None:
        self.state_dict = provide


def _target(name: str, provider: Any, load: Callable[[Any], None] | None, strategy: SaveStrategy) -> tuple[Any, bool]:
    if strategy.recent_only is not None:
        _trim(name, provider, strategy.recent_only)
    if provider is None or isinstance(provider, bool | int | float | complex | str | bytes):
        raise InvalidInputError(
            f"component {name!r}: {provider!r:.60} never changes, and cannot be restored in place. Register what holds "
            "it (a dict, an object with state_dict and load_state_dict), or functions: register(name, get, load=put).",
            component=name,
        )
    if is_checkpointable(provider) or not callable(provider):
        if load is not None:
            raise InvalidInputError(
                f"component {name!r}: load= belongs to a callback; {type(provider).__name__} is restored in place",
                component=name,
            )
        return provider, True
    if load is not None:
        return _Callbacks(provider, load), True
    if strategy.necessity == "exact":
        raise InvalidInputError(
            f"component {name!r}: what a callback returns can only be restored with load=. Give it, or say "
            "necessity='reloadable' or 'droppable' if a restore may leave it alone.",
            component=name,
        )
    return _Capture(provider), False


def _trim(name: str, provider: Any, recent: Recent) -> None:
    if not (hasattr(provider, "keep_rows") and hasattr(provider, "keep_steps")):
        raise InvalidInputError(
            f"component {name!r}: recent_only is set, but {type(provider).__name__} has no keep_rows and keep_steps "
            "that would trim it. Register a buffer that has (casckpt.replay.Ring), or leave recent_only out.",
            component=name,
        )
    provider.keep_rows, provider.keep_steps = recent.rows, recent.steps
