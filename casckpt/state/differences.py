"""What a snapshot and a live object do not agree on, and the one error for all of it.

A difference knows which option of a restore accepts it, so that the advice of the error is true of these differences.
"""

from __future__ import annotations

from typing import NamedTuple

from casckpt.errors import MismatchError

_SHOWN_MAX = 8  # a message is read by people; all differences are attributes of the error


class Difference(NamedTuple):
    """Something that the snapshot and the live object do not agree on; `accepted_by` is an option, "" for none."""

    path: str
    expected: str
    found: str
    accepted_by: str = ""

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, found {self.found}"


def mismatch(differences: list[Difference]) -> MismatchError:
    """One error for all differences, of one component or of several, before anything was touched."""
    count = len(differences)
    shown = "; ".join(map(str, differences[:_SHOWN_MAX]))
    more = f"; and {count - _SHOWN_MAX} more" if count > _SHOWN_MAX else ""
    advice = "".join(
        f"{option} accepts {accepted} of the {count} differences. "
        for option in ("strict=False", "cast=True")
        if (accepted := sum(each.accepted_by == option for each in differences))
    )
    return MismatchError(
        f"{count} differences between snapshot and live state: {shown}{more}. Nothing was touched. {advice}"
        "restore() returns the stored values without a live object.",
        differences=[(each.path, each.expected, each.found) for each in differences],
        path=differences[0].path,
    )
