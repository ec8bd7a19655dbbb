"""Everything that can delete: retention, collection, compaction; patrol and repair.

`casckpt` itself only adds, and never imports this.
"""

from __future__ import annotations

from casckpt_gc.collect import Collection, Report, collect
from casckpt_gc.compaction import Compaction
from casckpt_gc.maintenance import Maintenance
from casckpt_gc.patrol import Finding, Health, Limits, Patrolled, health, patrol
from casckpt_gc.plan import Fate, PackFate, Plan, plan
from casckpt_gc.repair import EntryHeal, Heal, Repair, repair
from casckpt_gc.retention import AnyOf, Best, Candidate, Pareto, Retention, Thinning

__all__ = [
    "AnyOf",
    "Best",
    "Candidate",
    "Collection",
    "Compaction",
    "EntryHeal",
    "Fate",
    "Finding",
    "Heal",
    "Health",
    "Limits",
    "Maintenance",
    "PackFate",
    "Pareto",
    "Patrolled",
    "Plan",
    "Repair",
    "Report",
    "Retention",
    "Thinning",
    "collect",
    "health",
    "patrol",
    "plan",
    "repair",
]
