"""How one component is saved: how often, in which lane, how necessary, at which level.

A strategy is a frozen value, checked when it is made, so that a mistake in a file or a call shows before training
starts. Where a component's state comes from is no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from casckpt.codec.level import find_level
from casckpt.errors import InvalidInputError
from casckpt.format.snapshot import NECESSITIES

LANES = ("critical", "best_effort")


@dataclass(frozen=True)
class Recent:
    """Only the newest part of a buffer: at most `rows` rows, none first saved more than `steps` steps ago.

    None means no bound.
    """

    rows: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        settle_numbers(self, rows=int, steps=int)
        if self.rows is None and self.steps is None:
            raise InvalidInputError("recent_only: give rows or steps; without both nothing is trimmed. Leave it out.")


@dataclass(frozen=True)
class SaveStrategy:
    """When and how a component is saved.

    Attributes:
        every_steps, every_seconds: due when a multiple of these steps, or that much time, has passed since its last
            capture; whichever comes first. Without both it is captured with every save that something else is due for.
        lane: "critical" components make the snapshot; "best_effort" ones are added to it when they are written.
        necessity: "exact" (its step counts), "reloadable" (constant, or to be had elsewhere) or "droppable".
        level: "fast", "balanced" or "small"; None for the store's.
        recent_only: trim a buffer at save; its provider must have `keep_rows` and `keep_steps`, as a ring of
            `casckpt.replay` has. None leaves them as they are.
        expect_change: warn when two captures in a row are equal, bit for bit.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    lane: str = "critical"
    necessity: str = "exact"
    level: str | None = None
    recent_only: Recent | None = None
    expect_change: bool = False

    def __post_init__(self) -> None:
        settle_numbers(self, every_steps=int, every_seconds=float)
        check_choice("lane", self.lane, LANES)
        check_choice("necessity", self.necessity, NECESSITIES)
        if self.level is not None:
            find_level(self.level)
        if self.recent_only is not None and not isinstance(self.recent_only, Recent):
            raise InvalidInputError(f"recent_only={self.recent_only!r:.60}: expected a casckpt.Recent")
        check_choice("expect_change", self.expect_change, (True, False))

    @property
    def is_best_effort(self) -> bool:
        return self.lane == "best_effort"

    @property
    def has_cadence(self) -> bool:
        """Whether it becomes due by itself."""
        return self.every_steps is not None or self.every_seconds is not None

    @property
    def layer(self) -> Layer:
        """What sorts components by how rarely they are captured: those with every save first."""
        if not self.has_cadence:
            return (0.0, 0.0)
        return (self.every_steps or _NEVER, self.every_seconds or _NEVER)


Layer = tuple[float, float]
_NEVER = float("inf")


def settle_numbers(settings: Any, **kinds: type) -> None:
    """Refuse what is no positive number of its kind, and keep Python's own number of what numpy or torch made.

    Args:
        settings: a frozen value that is being made.
        kinds: int or float by key; None, for no bound, stays.

    Raises:
        InvalidInputError: names the key.
    """
    for key, kind in kinds.items():
        value = given = getattr(settings, key)
        if hasattr(given, "item") and getattr(given, "ndim", 0) == 0:
            value = given.item()
            object.__setattr__(settings, key, value)
        if given is None:
            continue
        is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < _NEVER:
            expected = "a positive integer" if kind is int else "a positive number"
            raise InvalidInputError(f"{key}={given!r:.60}: expected {expected}", key=key)


def check_choice(key: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse what is none of these."""
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        raise InvalidInputError(f"{key}={value!r:.60}: expected one of {', '.join(map(str, choices))}", key=key)
