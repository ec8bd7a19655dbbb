"""Which snapshots stay and which components of them: rules as values, decided by pure functions.

A rule looks at *candidates*, the facts that the store holds of the snapshots of one branch, and says which it keeps and
why. Nothing is remembered between calls: a new process with the same store decides the same. A snapshot stays when any
rule wants it; what every rule set keeps, whatever it says, is every tagged snapshot and the newest whole consistent
one, with all that is newer.

Metrics are those of the commit and of later annotations. One that is missing, NaN, infinite, text or a truth value
makes a snapshot never the best, and never protects it. Of equal ones the newest is better.

Times are those that writers noted. A clock that jumped can only make a rule keep more or other snapshots of those that
it chooses from; nothing else depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from casckpt.arguments import FINITE, FLAG, NUMBER, ORDERED, WHOLE, Kind, check, maybe, within
from casckpt.errors import InvalidInputError

MODES = ("max", "min")
NEWEST = "newest"  # why the newest whole consistent snapshot stays, and all that is newer
Reasons = dict[str, list[str]]
_COUNT = within(WHOLE, 1)
_BOUNDS = Kind(
    "a number for each metric", lambda value: isinstance(value, Mapping) and all(map(_is_bound, value.items()))
)
_HOURS = Kind("a finite number above 0", lambda value: FINITE.fits(value) and value > 0, NUMBER)


@dataclass(frozen=True)
class Candidate:
    """What a rule may look at of one snapshot.

    Attributes:
        id: snapshot id in hex.
        step: its step; ascends along the branch.
        created_at_s: when it was published by the writer's clock, in seconds since 1970.
        is_consistent: all exact components are of one step.
        is_whole: every object is here and nothing was withdrawn.
        metrics: name to value.
        tags: names that mean it.
        components: names of those that are not withdrawn.
    """

    id: str
    step: int
    created_at_s: float = 0.0
    is_consistent: bool = True
    is_whole: bool = True
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    components: tuple[str, ...] = ()

    def metric(self, name: str) -> float | None:
        """A metric that can be compared, or None."""
        value = self.metrics.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return float(value)


@dataclass(frozen=True)
class Best:
    """The best `count` snapshots by one metric, among those that keep to the bounds.

    Attributes:
        metric: its name.
        count: how many.
        mode: "max" or "min".
        at_most, at_least: bounds on other metrics; a snapshot without such a metric does not keep to its bound.
    """

    metric: str
    count: int = 1
    mode: str = "max"
    at_most: Mapping[str, float] = field(default_factory=dict)
    at_least: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check({"count": _COUNT, "at_most": _BOUNDS, "at_least": _BOUNDS}, vars(self))
        _check_mode(self.metric, self.mode)

    @property
    def names(self) -> set[str]:
        """Of the metrics that it looks at."""
        return {self.metric, *self.at_most, *self.at_least}

    def chosen(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The best first."""
        sign = 1 if self.mode == "max" else -1
        rated = [(each.metric(self.metric), each) for each in candidates if self._is_allowed(each)]
        good = [(sign * value, each.step, each) for value, each in rated if value is not None]
        return [each for _, _, each in sorted(good, key=lambda row: row[:2], reverse=True)[: self.count]]

    def _is_allowed(self, candidate: Candidate) -> bool:
        return all(
            (value := candidate.metric(name)) is not None and sign * value <= sign * bound
            for sign, bounds in ((1, self.at_most), (-1, self.at_least))
            for name, bound in bounds.items()
        )

    def __str__(self) -> str:
        return f"best {self.count} by {self.metric}"


@dataclass(frozen=True)
class Pareto:
    """Every snapshot that no other one beats in all of several metrics, given as name to "max" or "min".

    Of snapshots that are equal in all of them, the newest stays.
    """

    metrics: Mapping[str, str]

    def __post_init__(self) -> None:
        if not isinstance(self.metrics, Mapping) or not self.metrics:
            raise InvalidInputError(f"metrics={self.metrics!r:.80}: name at least one metric with 'max' or 'min'.")
        for name, mode in self.metrics.items():
            _check_mode(name, mode)

    @property
    def names(self) -> set[str]:
        """Of the metrics that it looks at."""
        return set(self.metrics)

    def chosen(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The front, newest first."""
        front: dict[tuple[float, ...], Candidate] = {}
        for each in sorted(candidates, key=lambda one: -one.step):
            values = self._values(each)
            if values is None or any(_dominates(other, values) for other in front):
                continue
            front = {other: kept for other, kept in front.items() if not _dominates(values, other)}
            front[values] = each
        return list(front.values())

    def _values(self, candidate: Candidate) -> tuple[float, ...] | None:
        found = [(candidate.metric(name), mode) for name, mode in self.metrics.items()]
        values = tuple(value if mode == "max" else -value for value, mode in found if value is not None)
        return values if len(values) == len(found) else None

    def __str__(self) -> str:
        return f"front of {', '.join(self.metrics)}"


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """At least as good everywhere (an equal one is newer: it was met first)."""
    return all(a >= b for a, b in zip(one, other, strict=True))


@dataclass(frozen=True)
class Retention:
    """Which snapshots of a branch stay: those that any of these rules wants. `a | b` keeps what either keeps.

    Attributes:
        latest: the newest so many; whole consistent ones count, and what is newer than the newest of them stays too.
        every_steps: the first snapshot of each span of so many steps (of steps 0, m, 2m … those themselves).
        every_hours: a snapshot whenever so many hours have passed since the last that this rule kept.
        best: one rule or several, `Best` or `Pareto`.
    """

    latest: int = 1
    every_steps: int | None = None
    every_hours: float | None = None
    best: Best | Pareto | Sequence[Best | Pareto] = ()

    def __post_init__(self) -> None:
        check({"latest": _COUNT, "every_steps": maybe(_COUNT), "every_hours": maybe(_HOURS)}, vars(self))
        if not isinstance(self.best, Best | Pareto):
            _settle_list(self, "best", Best | Pareto, "Best(…), Pareto(…) or a list of them")

    @property
    def _best(self) -> tuple[Best | Pareto, ...]:
        return (self.best,) if isinstance(self.best, Best | Pareto) else tuple(self.best)

    @property
    def names(self) -> set[str]:
        """Of the metrics that any rule looks at."""
        return {name for rule in self._best for name in rule.names}

    def kept(self, candidates: Iterable[Candidate]) -> Reasons:
        """Ids of the snapshots that stay, each with the reasons; all others may go."""
        line = sorted(candidates, key=lambda each: each.step)
        reasons: Reasons = {}
        for why, chosen in self._choices(line):
            for each in chosen:
                known = reasons.setdefault(each.id, [])
                known += [] if why in known else [why]
        return reasons

    def _choices(self, line: Sequence[Candidate]) -> Iterable[tuple[str, Iterable[Candidate]]]:
        whole = [each for each in line if each.is_consistent and each.is_whole]
        yield NEWEST, newest(line)
        yield "latest", [each for each in line if each.is_consistent][-self.latest :]
        yield "latest", whole[-self.latest :]
        yield "tag", [each for each in line if each.tags]
        if self.every_steps is not None:
            span = self.every_steps
            yield f"every {span} steps", _firsts(line, lambda each: each.step // span)
        if self.every_hours is not None:
            yield f"every {self.every_hours:g} hours", _spaced(line, self.every_hours * 3600)
        for rule in self._best:
            yield str(rule), rule.chosen(line)

    def __or__(self, other: Retention | AnyOf) -> AnyOf:
        return AnyOf((self,)) | other


@dataclass(frozen=True)
class AnyOf:
    """Keeps what any of several retentions keeps."""

    retentions: tuple[Retention, ...]

    def __post_init__(self) -> None:
        _settle_list(self, "retentions", Retention, "one Retention(…) or several", count_min=1)

    @property
    def names(self) -> set[str]:
        """As `Retention.names`."""
        return {name for retention in self.retentions for name in retention.names}

    def kept(self, candidates: Iterable[Candidate]) -> Reasons:
        """As `Retention.kept`."""
        line = list(candidates)
        reasons: Reasons = {}
        for retention in self.retentions:
            for snapshot_id, why in retention.kept(line).items():
                known = reasons.setdefault(snapshot_id, [])
                known += [each for each in why if each not in known]
        return reasons

    def __or__(self, other: Retention | AnyOf) -> AnyOf:
        more = other.retentions if isinstance(other, AnyOf) else (other,)
        return AnyOf((*self.retentions, *more))


@dataclass(frozen=True)
class Thinning:
    """Which components are withdrawn from snapshots that stay.

    Attributes:
        components: names; a snapshot that has no other keeps them all.
        keep_latest: the newest so many consistent snapshots keep everything.
        spare_tags: tagged snapshots keep everything too.
    """

    components: Sequence[str]
    keep_latest: int = 1
    spare_tags: bool = True

    def __post_init__(self) -> None:
        _settle_list(self, "components", str, "a list of component names", count_min=1)
        check({"keep_latest": _COUNT, "spare_tags": FLAG}, vars(self))

    def withdrawn(self, candidates: Iterable[Candidate]) -> dict[str, tuple[str, ...]]:
        """Snapshot id to what is withdrawn from it, of snapshots that stay."""
        line = sorted(candidates, key=lambda each: each.step)
        whole = [each for each in line if each.is_consistent and each.is_whole]
        spared = {each.id for each in whole[-self.keep_latest :]}
        newest = whole[-1].step if whole else -1
        found = {}
        for each in line:
            names = tuple(name for name in each.components if name in self.components)
            is_spared = each.id in spared or each.step >= newest or (self.spare_tags and bool(each.tags))
            if names and len(names) < len(each.components) and not is_spared:
                found[each.id] = names
        return found


def newest(line: Sequence[Candidate]) -> Sequence[Candidate]:
    """The newest whole consistent snapshot of a line and all that is newer; the whole line where there is none."""
    start = max((at for at, each in enumerate(line) if each.is_consistent and each.is_whole), default=0)
    return line[start:]


def _firsts(line: Sequence[Candidate], span_of: Callable[[Candidate], int]) -> list[Candidate]:
    firsts: dict[int, Candidate] = {}
    for each in line:
        firsts.setdefault(span_of(each), each)
    return list(firsts.values())


def _spaced(line: Sequence[Candidate], span_s: float) -> list[Candidate]:
    """Where a clock went back, the span begins anew."""
    found: list[Candidate] = []
    for each in line:
        last_s = found[-1].created_at_s if found else math.inf
        if each.created_at_s >= last_s + span_s or each.created_at_s < last_s:
            found.append(each)
    return found


def _is_bound(bound: tuple[Any, Any]) -> bool:
    return isinstance(bound[0], str) and ORDERED.fits(bound[1])


def _settle_list(rule: Any, name: str, kind: Any, expected: str, *, count_min: int = 0) -> None:
    """Keep what a rule lists as a tuple: an iterator gives it only once, and a list may change."""
    given = getattr(rule, name)
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    found = tuple(given) if is_list else ()
    if not is_list or len(found) < count_min or not all(isinstance(each, kind) and each != "" for each in found):
        raise InvalidInputError(f"{name}={given!r:.80}: expected {expected}.")
    object.__setattr__(rule, name, found)


def _check_mode(metric: str, mode: str) -> None:
    if not isinstance(metric, str) or not metric:
        raise InvalidInputError(f"metric={metric!r:.80}: expected its name.")
    if mode not in MODES:
        raise InvalidInputError(f"metric {metric!r}: {mode!r} is no mode. Use 'max' or 'min'.")
