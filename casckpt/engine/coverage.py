"""Registered components held against a template of completeness: what an engine in strict mode refuses to leave out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from casckpt.engine.component import Component
from casckpt.engine.roles import Template
from casckpt.engine.templates import CoverageReport, check_complete, paths_of
from casckpt.replay.ring import Ring


def cover(
    components: Iterable[Component], template: str | Template, aliases: Mapping[str, Sequence[str]], *, strict: bool
) -> CoverageReport:
    """Hold components against a template; see `templates.check_complete`. A ring counts as one leaf of its name.

    Raises:
        InvalidInputError: no such template; with `strict`, something is missing.
    """
    targets = {each.name: each.target for each in components}
    rings = {name: [name] for name, target in targets.items() if isinstance(target, Ring)}
    paths = paths_of({name: target for name, target in targets.items() if name not in rings})
    return check_complete(template, {**paths, **rings}, aliases=aliases, strict=strict)
