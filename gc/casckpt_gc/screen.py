"""Plans as text for people: one table of what goes, and what it frees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from casckpt.cli._text import plural, size

if TYPE_CHECKING:
    from casckpt_gc.plan import Fate, Plan

_STEPS_SHOWN = 12


def plan_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """What is done, to how many, how many bytes, and to which."""
    packs = {what: [each for each in plan.packs if each.what == what] for what in ("drop", "rewrite", "unfinished")}
    left = {what: sum(each.size_bytes for each in found) for what, found in packs.items()}
    rows = [
        ("retire", plural(len(plan.retired), "snapshot"), "", steps_text(plan.retired)),
        ("thin", plural(len(plan.thinned), "snapshot"), "", steps_text(plan.thinned)),
        ("keep", plural(len(plan.kept), "snapshot"), "", steps_text(plan.kept)),
        ("drop", plural(len(packs["drop"]), "pack"), size(left["drop"]), plural(plan.freed_object_count, "record")),
        ("rewrite", plural(len(packs["rewrite"]), "pack"), size(left["rewrite"]), "keep what is needed of them"),
        (
            "encode anew",
            plural(plan.recoded_count, "object"),
            size(plan.recoded_bytes),
            "at most; so that no old base is held for them",
        ),
        (
            "drop unfinished",
            plural(len(packs["unfinished"]), "pack"),
            size(left["unfinished"]),
            "if no commit names it",
        ),
        ("seal", plural(plan.sealed_count, "entry"), size(plan.sealed_bytes), "into epochs"),
        (
            "remove",
            plural(len(plan.leftovers), "file"),
            size(sum(each[1] for each in plan.leftovers)),
            "of dead processes",
        ),
    ]
    return [row for row in rows if not row[1].startswith("0 ") or row[0] == "keep"]


def steps_text(fates: Sequence[Fate]) -> str:
    """Steps, the middle left out where they are many."""
    steps = [str(fate.step) for fate in fates]
    if len(steps) > _STEPS_SHOWN:
        half = _STEPS_SHOWN // 2
        steps = [*steps[:half], "…", *steps[-half:]]
    return f"steps {', '.join(steps)}" if steps else ""


def plan_text(plan: Plan) -> str:
    """The rows as lines, and what they free."""
    rows = [(f"collect {plan.run}/{plan.branch}", f"as of entry {plan.seq}", "", ""), *plan_rows(plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join((*(f"{row[at]:{widths[at]}}" for at in range(3)), row[3])).rstrip() for row in rows]
    return "\n".join([*lines, frees_text(plan)])


def frees_text(plan: Plan) -> str:
    """What it frees, what it writes for that, and what is held; and which rules do nothing, for want of a metric, a
    component, or room in the budget."""
    written = plan.rewritten_bytes + plan.recoded_bytes
    anew = f" and writes {'at most ' if plan.recoded_bytes else ''}{size(written)} anew" if written else ""
    held = f"; {size(plan.held_bytes)} held by differences" if plan.held_bytes else ""
    lines = [f"no snapshot has a metric {name!r}: nothing is kept by it" for name in plan.unknown_metrics]
    lines += [f"no snapshot has a component {name!r}: nothing is withdrawn" for name in plan.unknown_components]
    lines += postponed_lines(plan)
    return "\n".join([f"frees {size(plan.freed_bytes)}{anew}{held}", *lines])


def postponed_lines(plan: Plan) -> list[str]:
    """What is left as it is for want of a budget."""
    packs, objects = plural(plan.postponed_count, "pack"), plural(plan.postponed_object_count, "object")
    lines = [f"beyond the budget: {packs}, to rewrite which takes {size(plan.postponed_bytes)}"]
    lines = lines if plan.postponed_count else []
    return lines + ([f"beyond the budget: {objects} to encode anew"] if plan.postponed_object_count else [])
