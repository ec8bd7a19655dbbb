"""What a training of a known kind needs to go on, and whether a state has all of it.

A template is a list of *roles*: the target network, the temperature's optimizer, the random stream of numpy. A role is
recognised by the paths of leaves (`policy/critic_target.qf0.weight`), in the names that people and frameworks use; a
state with names of its own says where a role is (`aliases`). A role is *present*, *missing*, *not capturable* (it is
there, and something of it could not be captured), or *not needed* (another leaf says so: a fixed temperature has no
optimizer). What a template calls optional is reported and never refused.

Nothing here looks at values: a leaf under the right name is taken for what it says it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

from casckpt.engine.roles import TEMPLATES, Role, Template
from casckpt.errors import InvalidInputError
from casckpt.format.structure import leaf_places
from casckpt.replay import Ring, RingView
from casckpt.state.build import read_scalars
from casckpt.state.capture import capture
from casckpt.store.values import Value

PRESENT, MISSING, NOT_CAPTURABLE, NOT_NEEDED = "present", "missing", "not capturable", "not needed"
_RING_PARTS = ("capacity", "head", "count", "total", "columns", "mutable")  # as in a structure that is stored
_GAPS = "not_captured"
_EXAMPLES_MAX = 3  # paths that a report shows for a role
_MEMBER = re.compile(r"(?:^|/)(?:members?|agents?|workers?|population)[-_./ ]?(\w*\d\w*)")


@dataclass(frozen=True)
class RoleCoverage(Value):
    """What was found of one role.

    Attributes:
        role: its name; of a population's member "member 3: optimizer".
        state: "present", "missing", "not capturable" or "not needed".
        examples: up to three of its leaf paths.
        reason: what goes wrong without it, or why it cannot be captured.
    """

    role: str
    state: str
    is_required: bool
    examples: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class CoverageReport(Value):
    """A state held against a template.

    Attributes:
        roles: in the template's order.
        not_capturable: path → reason of everything that could not be captured, whatever role it has.
    """

    template: str
    roles: tuple[RoleCoverage, ...]
    not_capturable: Mapping[str, str]

    @property
    def missing(self) -> tuple[str, ...]:
        """Required roles that are not there, or not wholly."""
        return tuple(each.role for each in self.roles if each.is_required and each.state in (MISSING, NOT_CAPTURABLE))

    @property
    def is_complete(self) -> bool:
        """Whether every required role is there and nothing was left out of the capture."""
        return not self.missing and not self.not_capturable

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "missing": list(self.missing), "is_complete": self.is_complete}

    def __str__(self) -> str:
        lines = [f"template {self.template}: {'complete' if self.is_complete else 'not complete'}"]
        for each in self.roles:
            optional = "" if each.is_required else " (optional)"
            detail = ", ".join(each.examples) if each.state == PRESENT else each.reason
            lines.append(f"  {each.state:<15} {each.role}{optional}: {detail}")
        lines += [f"  not captured    {path}: {reason}" for path, reason in self.not_capturable.items()]
        return "\n".join(lines)


def check_complete(
    template: str | Template,
    components: Mapping[str, Iterable[str]],
    *,
    not_capturable: Mapping[str, str] | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    strict: bool = False,
) -> CoverageReport:
    """Hold a state against a template.

    Args:
        template: "ppo", "sac", "dqn", "grpo", "pbt", or one of your own.
        components: component name → its leaf paths, as `paths_of` gives them.
        not_capturable: path → reason of what a capture lacks.
        aliases: role → paths at or below which it is, where names alone do not tell.
        strict: refuse a state that lacks something.

    Cost: about 1 µs per role and leaf.

    Raises:
        InvalidInputError: no such template or role; with `strict`, roles are missing (`missing` names them).
    """
    found = find_template(template)
    by_role = check_aliases({} if aliases is None else aliases, found)
    gaps = dict(not_capturable or {})
    paths = [path for listed in components.values() for path in listed]
    roles = [_cover(role, role.name, paths, gaps, by_role) for role in found.roles]
    if found.member_roles:
        roles += _members(found, paths, gaps, by_role)
    report = CoverageReport(found.name, tuple(roles), gaps)
    if strict and not report.is_complete:
        raise InvalidInputError(
            f"the state is not complete: {report}\nRegister what is missing under a name that says what it is, or say "
            "where it is with aliases={role: [path]}.",
            missing=report.missing,
            not_capturable=gaps,
        )
    return report


def paths_of(state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Leaf paths of live components: component name → paths; see `contents_of`."""
    return contents_of(state)[0]


def contents_of(state: Mapping[str, Any]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Of live components the leaf paths by name, and path → reason of what they say that their capture lacks.

    A ring has the paths of its place and of its columns together, whether it is live or restored. Costs 5 µs a leaf,
    and what `state_dict()` takes.

    Raises:
        UnsupportedStateError: a leaf cannot be stored.
    """
    paths: dict[str, list[str]] = {}
    gaps: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, (Ring, RingView)):
            paths[name] = [f"{name}/{part}" for part in _RING_PARTS]
            continue
        captured = capture(name, value)
        places = list(leaf_places(captured.structure, name))
        paths[name] = [place.path for place in places]
        gaps |= stated_gaps(name, places, partial(read_scalars, captured.structure, captured.scalars))
    return paths, gaps


class ScalarPlace(Protocol):
    """A leaf's path, and which scalar it is, if it is one."""

    @property
    def path(self) -> str: ...

    @property
    def scalar(self) -> int | None: ...


def stated_gaps(name: str, places: Iterable[ScalarPlace], scalars: Callable[[], Sequence[Any]]) -> dict[str, str]:
    """What a component itself says that its capture lacks, in leaves `not_captured`: lists of "path: reason".

    Args:
        name: of the component.
        places: its leaves.
        scalars: reads the values of its scalars; only called where there is such a leaf.

    Returns:
        Path → reason.
    """
    told = [place.scalar for place in places if place.scalar is not None and place.path.endswith(f"/{_GAPS}")]
    values = scalars() if told else []
    found = {}
    for lines in (values[scalar] for scalar in told):
        for line in lines if isinstance(lines, list) else ():
            at, _, reason = str(line).partition(": ")
            found[f"{name}/{at}"] = reason
    return found


def find_template(template: str | Template) -> Template:
    """A template by name.

    Raises:
        InvalidInputError: there is none of this name.
    """
    if isinstance(template, Template):
        return template
    if not isinstance(template, str) or template not in TEMPLATES:
        raise InvalidInputError(f"template {template!r}: expected one of {', '.join(TEMPLATES)}, or a Template")
    return TEMPLATES[template]


def check_aliases(aliases: Mapping[str, Sequence[str]], template: Template | None) -> dict[str, list[str]]:
    """Paths by role, without a slash at their ends.

    Raises:
        InvalidInputError: this is no mapping of roles to lists of paths, or the template has no such role.
    """
    if not isinstance(aliases, Mapping):
        raise InvalidInputError(
            f"aliases: expected roles and lists of paths, found {type(aliases).__name__}", key="aliases"
        )
    for role, paths in aliases.items():
        is_list = isinstance(paths, Sequence) and not isinstance(paths, str | bytes)
        if not isinstance(role, str) or not is_list or not all(isinstance(path, str) and path for path in paths):
            raise InvalidInputError(
                f"aliases.{role}={paths!r:.60}: expected a list of leaf paths. Write `{role}: [component/path]`.",
                key=f"aliases.{role}",
            )
    known = set(aliases) if template is None else {role.name for role in (*template.roles, *template.member_roles)}
    unknown = sorted(set(aliases) - known)
    if unknown and template is not None:
        raise InvalidInputError(
            f"aliases={unknown}: template {template.name} has the roles {sorted(known)}", key=f"aliases.{unknown[0]}"
        )
    return {role: [path.rstrip("/") for path in paths] for role, paths in aliases.items()}


def _cover(
    role: Role, name: str, paths: list[str], gaps: Mapping[str, str], aliases: Mapping[str, list[str]]
) -> RoleCoverage:
    own = aliases.get(role.name, [])
    matches = [path for path in paths if _is_of(role, path, own)]
    reasons = [reason for path, reason in gaps.items() if _is_of(role, path, own)]
    if reasons:
        return RoleCoverage(name, NOT_CAPTURABLE, role.is_required, tuple(matches[:_EXAMPLES_MAX]), "; ".join(reasons))
    if matches:
        return RoleCoverage(name, PRESENT, role.is_required, tuple(matches[:_EXAMPLES_MAX]), "")
    excused = [path for path in paths if role.unless and _compiled(role.unless).search(path.lower())]
    if excused:
        return RoleCoverage(name, NOT_NEEDED, role.is_required, tuple(excused[:_EXAMPLES_MAX]), f"{excused[0]} says so")
    nowhere = f"nothing is at {', '.join(own)}; " if own else ""
    return RoleCoverage(name, MISSING, role.is_required, (), f"{nowhere}without it, {role.why}")


def _is_of(role: Role, path: str, aliases: list[str]) -> bool:
    if any(path == alias or path.startswith(f"{alias}/") for alias in aliases):
        return True
    low = path.lower()
    if role.besides and _compiled(role.besides).search(low):
        return False
    return _compiled(role.path).search(low) is not None


def _members(
    template: Template, paths: list[str], gaps: Mapping[str, str], aliases: Mapping[str, list[str]]
) -> list[RoleCoverage]:
    """Every member's roles; a population without members lacks them all."""
    members: dict[str, list[str]] = {}
    for path in paths:
        match = _MEMBER.search(path.lower())
        if match:
            members.setdefault(match[1], []).append(path)
    if not members:
        return [RoleCoverage("members", MISSING, True, (), "no path names a member (member-0/…): nobody would go on")]
    return [
        _cover(role, f"member {member}: {role.name}", listed, {}, aliases)
        for member, listed in members.items()
        for role in template.member_roles
    ]


@cache
def _compiled(expression: str) -> re.Pattern[str]:
    return re.compile(expression)
