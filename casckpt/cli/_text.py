"""Text for people: quantities, times, and stored text made harmless. Imports neither click nor rich."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def shown(text: str) -> str:
    """Text that came out of a store, safe for a terminal: what is not printable is escaped, lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def size(count: int) -> str:
    """Bytes in decimal units with three digits: 812 B, 1.05 kB, 23.4 MB."""
    if count < 1000:
        return f"{count} B"
    power = 0
    while count / 1000**power >= 999.5 and power < len(_UNITS) - 1:
        power += 1
    return f"{_three_digits(count / 1000**power)} {_UNITS[power]}"


def ratio(value: float | None) -> str:
    """A ratio with two or three digits and ×; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value >= 9999.5:
        return f"{value / 1000:.0f}k×"
    return f"{_three_digits(value)}×"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def number(value: Any) -> str:
    """A metric: floats with five digits, everything else as it is."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def pairs(values: Mapping[str, Any]) -> str:
    """Metrics or labels in one line."""
    return " ".join(f"{name}={number(value)}" for name, value in values.items())


def moment(when: datetime.datetime) -> str:
    """Date and time in the zone of this machine."""
    return when.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def plural(count: int, noun: str) -> str:
    """1 snapshot, 2 snapshots, 2 branches."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    if count != 1 and noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}{ending}"
