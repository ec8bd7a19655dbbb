"""Retention beside a training: what an engine tells of its snapshots, and how a config's `maintenance` is read.

What can delete is another package, which nothing here imports: it registers a reader of its settings under the
entry-point group `casckpt.maintenance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from casckpt.errors import InvalidInputError
from casckpt.store.store import Store

GROUP = "casckpt.maintenance"


class Maintenance(Protocol):
    """What retention at work beside a training is to an engine."""

    def after_commit(self, store: Store) -> None:
        """A snapshot of `store` is durable. Must not wait."""

    def may_save(self) -> bool:
        """Whether the disk is well enough for saves that are due. Must not wait."""

    def close(self) -> None:
        """Stop soon. Called by an engine that began it."""


@runtime_checkable
class MaintenanceSettings(Protocol):
    """Checked settings of it: a value, of which nothing runs yet."""

    def begin(self) -> Maintenance:
        """Maintenance by these settings."""


def read_maintenance(values: Mapping[str, Any], where: str) -> MaintenanceSettings:
    """Settings from what a file says.

    Args:
        values: keys and values.
        where: begins the messages about them.

    Raises:
        InvalidInputError: a key is unknown or wrong, or no installed package takes such settings.
    """
    readers = list(entry_points(group=GROUP))
    if len(readers) != 1:
        found = ", ".join(each.value for each in readers) or "none"
        raise InvalidInputError(
            f"{where}: one installed package must take these settings (entry point {GROUP}); found {found}. "
            "Install casckpt again, or pass the engine a maintenance= of your own.",
            key="maintenance",
        )
    settings: MaintenanceSettings = readers[0].load()(values, where)
    return settings
