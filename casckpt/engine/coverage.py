"""Registered components held against a template of completeness: what an engine in strict mode refuses to leave out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from casckpt.engine.component import Component
from casckpt.engine.roles import Template
from casckpt.engine.templates import CoverageReport, check_complete, contents_of


def cover(
    components: Iterable[Component], template: str | Template, aliases: Mapping[str, Sequence[str]], *, strict: bool
) -> CoverageReport:
    """Hold components against a template; see `templates.check_complete`.

    Raises:
        InvalidInputError: no such template; with `strict`, something is missing.
    """
    paths, gaps = contents_of({each.name: each.target for each in components})
    return check_complete(template, paths, not_capturable=gaps, aliases=aliases, strict=strict)
