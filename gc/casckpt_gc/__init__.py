"""Everything that can delete: retention, collection, compaction. `casckpt` itself only adds, and never imports this."""

from __future__ import annotations

from casckpt_gc.collect import Collection, Report, collect
from casckpt_gc.maintenance import Maintenance
from casckpt_gc.plan import Compaction, Fate, PackFate, Plan, plan
from casckpt_gc.retention import AnyOf, Best, Candidate, Pareto, Retention, Thinning

__all__ = [
    "AnyOf",
    "Best",
    "Candidate",
    "Collection",
    "Compaction",
    "Fate",
    "Maintenance",
    "PackFate",
    "Pareto",
    "Plan",
    "Report",
    "Retention",
    "Thinning",
    "collect",
    "plan",
]
