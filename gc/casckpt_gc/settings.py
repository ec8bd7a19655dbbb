"""Maintenance as settings of a training: what the key `maintenance` of an engine's config says.

::

    maintenance:
      every_commits: 20
      retention: {latest: 3, every_steps: 10000, best: {metric: return, count: 2}}
      thinning: {components: [optimizer, replay], keep_latest: 2}

`casckpt` finds `read_maintenance` through the entry-point group `casckpt.maintenance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from casckpt.engine.config import build
from casckpt.engine.strategy import check_choice, settle_numbers
from casckpt.errors import InvalidInputError
from casckpt_gc.collect import GRACE_S
from casckpt_gc.compaction import COMPACTION
from casckpt_gc.maintenance import EVERY_COMMITS, Maintenance
from casckpt_gc.patrol import Limits
from casckpt_gc.retention import Best, Pareto, Retention, Thinning


@dataclass(frozen=True)
class MaintenanceSettings:
    """Arguments of `Maintenance`, checked.

    Attributes:
        retention: which snapshots stay; None for all, so that only what nothing needs goes.
        thinning: what is withdrawn from those.
        every_commits, grace_s: as for `Maintenance`.
        compact: whether packs of which little is needed are written anew.
        patrol_bytes, limits: as for `Maintenance`.
    """

    retention: Retention | None = None
    thinning: Sequence[Thinning] = ()
    every_commits: int = EVERY_COMMITS
    grace_s: float = GRACE_S
    compact: bool = True
    patrol_bytes: int = 0
    limits: Limits | None = None

    def __post_init__(self) -> None:
        settle_numbers(self, every_commits=int)
        if self.grace_s != 0:  # nobody else reads
            settle_numbers(self, grace_s=float)
        check_choice("compact", self.compact, (True, False))
        if self.patrol_bytes != 0:  # none
            settle_numbers(self, patrol_bytes=int)

    def begin(self) -> Maintenance:
        """Maintenance by these settings; its threads begin with the first collection."""
        return Maintenance(
            self.retention,
            self.thinning,
            every_commits=self.every_commits,
            grace_s=self.grace_s,
            compaction=COMPACTION if self.compact else None,
            patrol_bytes=self.patrol_bytes,
            limits=self.limits,
        )


def read_maintenance(values: Mapping[str, Any], where: str) -> MaintenanceSettings:
    """Settings from keys and values.

    Raises:
        InvalidInputError: names the key that is unknown or wrong.
    """
    found = dict(values)
    if found.get("retention") is not None:
        found["retention"] = _retention(found["retention"], f"{where}.retention")
    found["thinning"] = tuple(
        build(Thinning, each, f"{where}.thinning") for each in _listed(found.get("thinning"), f"{where}.thinning")
    )
    if found.get("limits") is not None:
        found["limits"] = build(Limits, found["limits"], f"{where}.limits")
    return build(MaintenanceSettings, found, where)


def _retention(values: Any, where: str) -> Retention:
    if not isinstance(values, Mapping):
        return build(Retention, values, where)  # which says what was expected
    rules = tuple(_rule(each, f"{where}.best") for each in _listed(values.get("best"), f"{where}.best"))
    return build(Retention, {**values, "best": rules}, where)


def _rule(values: Any, where: str) -> Best | Pareto:
    is_front = isinstance(values, Mapping) and "metrics" in values
    return build(Pareto, values, where) if is_front else build(Best, values, where)


def _listed(values: Any, where: str) -> Sequence[Any]:
    """One or several mappings, or none."""
    if values is None or isinstance(values, Mapping):
        return [] if values is None else [values]
    if not isinstance(values, list | tuple):
        raise InvalidInputError(f"{where}: expected keys and values, or a list of such, found {type(values).__name__}")
    return values
