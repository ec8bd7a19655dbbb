"""What to do after a failure: a table of rules over what the store holds, and the first that fits decides.

A store answers in one of four ways, which are never confused:

* *empty*: nothing was ever committed here, and nothing is damaged or missing;
* *ambiguous*: this run has nothing, but the store holds other runs; most often its name was mistyped;
* *damaged*: there are snapshots, or there may have been, and none can be restored;
* *usable*: there is a whole consistent snapshot, with newer ones that were passed over named.

(That a snapshot does not fit the code of today, *incompatible*, shows when it is held against live objects.) Only
an empty store starts from the beginning by itself; everything else needs to be told. Everything here reads and decides;
nothing is changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from casckpt.arguments import FLAG, MAPPING, NUMBER, STEP, TEXT, TEXTS, WHOLE, Kind, check, checked, maybe, within
from casckpt.errors import InvalidInputError
from casckpt.format.snapshot import DROPPABLE
from casckpt.ids import SnapshotId, short
from casckpt.store.store import Store
from casckpt.store.values import Snapshot, Value
from casckpt.store.wholeness import FLAWS, WholenessCheck

EMPTY, AMBIGUOUS, DAMAGED, USABLE = ANSWERS = "empty", "ambiguous", "damaged", "usable"
FAILURES = ("exception", "nan", "oom-kill", "eviction", "lost-head", "hang", "unknown")
FRESH, NEWEST, BEST, STOP = CHOICES = "fresh", "newest", "best", "stop"
CANDIDATES_MAX = 16  # how many snapshots a recovery tries at most before a person should look
_TOLD = 5  # reasons in one message; who asks has all of them


@dataclass(frozen=True)
class FailureInfo(Value):
    """How a training ended: one of FAILURES, the last step it told of, and what it said."""

    kind: str = "unknown"
    step: int | None = None
    message: str = ""

    def __post_init__(self) -> None:
        check({"kind": TEXT, "step": maybe(STEP), "message": TEXT}, vars(self))
        if self.kind not in FAILURES:
            raise InvalidInputError(f"failure {self.kind!r}: expected one of {', '.join(FAILURES)}", kind=self.kind)


@dataclass(frozen=True)
class Rule(Value):
    """A row of the table: if all conditions hold, `choose`.

    Attributes:
        choose: FRESH, NEWEST (whole consistent), BEST (by the policy's metric), or STOP.
        why: for people.
        answers: what the store may have answered.
        failures: how the training may have ended.
        is_diverged: whether the newest snapshot must count as diverged, or must not; None for either.
        lost_steps_min: at least so many steps lie between the failure and the newest snapshot; None for any.

    Raises:
        InvalidInputError: a word that means nothing; the rule would never fit, or choose something else.
    """

    choose: str
    why: str
    answers: tuple[str, ...] = (USABLE,)
    failures: tuple[str, ...] = FAILURES
    is_diverged: bool | None = None
    lost_steps_min: int | None = None

    def __post_init__(self) -> None:
        check({"choose": TEXT, "why": TEXT, "is_diverged": maybe(FLAG), "lost_steps_min": maybe(WHOLE)}, vars(self))
        table: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
            ("choose", (self.choose,), CHOICES),
            ("answers", self.answers, ANSWERS),
            ("failures", self.failures, FAILURES),
        )
        for what, words, known in table:
            if isinstance(words, str):
                raise InvalidInputError(f"rule {what}={words!r}: expected several words. Write ({words!r},).")
            check({what: TEXTS}, {what: words})
            unknown = [word for word in words if word not in known]
            if unknown:
                raise InvalidInputError(
                    f"rule {what}={unknown[0]!r}: expected one of {', '.join(known)}", word=unknown[0]
                )


RULES = Kind(
    "a list of Rule", lambda value: isinstance(value, Sequence) and all(isinstance(each, Rule) for each in value)
)
DEFAULT_RULES = (
    Rule(FRESH, "the store is empty", (EMPTY,)),
    Rule(STOP, "the store holds other runs and none of this name", (AMBIGUOUS,)),
    Rule(STOP, "no snapshot can be restored", (DAMAGED,)),
    Rule(BEST, "the newest snapshot has diverged", is_diverged=True),
    Rule(BEST, "the training ran into NaN", failures=("nan",)),
    Rule(NEWEST, "the newest whole consistent snapshot"),
)


@dataclass(frozen=True)
class Policy(Value):
    """The table, and what its words mean in this training.

    Attributes:
        rules: the first that fits decides; when none does, the answer is STOP.
        metric: what "best" is measured by; None makes it the newest that has not diverged.
        largest: whether larger is better.
        drop_max: the newest has diverged when its metric is worse than the best by more than this share of the best's
            size; None to not judge by it. Snapshots that are labelled as diverged are no best.
        diverged_labels: a snapshot with one of these labels has diverged.
        floor_step: nothing older is ever chosen.
        fill_droppable: a snapshot of which only droppable components are damaged counts as whole; they are taken from
            the next older snapshot that has them.

    Raises:
        InvalidInputError: `drop_max` without a `metric`, or below 0.
    """

    rules: tuple[Rule, ...] = DEFAULT_RULES
    metric: str | None = None
    largest: bool = True
    drop_max: float | None = None
    diverged_labels: Mapping[str, str] = field(default_factory=lambda: {"diverged": "true"})
    floor_step: int = 0
    fill_droppable: bool = False

    def __post_init__(self) -> None:
        numbers = {"drop_max": maybe(within(NUMBER, 0)), "floor_step": WHOLE}
        kinds = {"rules": RULES, "metric": maybe(TEXT), "largest": FLAG, "diverged_labels": MAPPING, **numbers}
        check({**kinds, "fill_droppable": FLAG}, vars(self))
        if self.drop_max is not None and self.metric is None:
            raise InvalidInputError(f"drop_max={self.drop_max}: expected a metric that it is a share of. Give metric=.")


@dataclass(frozen=True)
class Situation(Value):
    """What a store holds of a run.

    Attributes:
        answer: EMPTY, AMBIGUOUS, DAMAGED or USABLE, with `reason`.
        candidates: whole consistent snapshots of the current branch, newest first.
        passed_over: why newer or other ones are not among them; first of all, what of the timeline is lost.
        diverged: snapshot id → why it counts as diverged.
        advice: what a person should do first where there is no candidate, and what last.
    """

    answer: str
    reason: str
    candidates: tuple[Snapshot, ...] = ()
    passed_over: tuple[str, ...] = ()
    diverged: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "answer": self.answer,
            "reason": self.reason,
            "candidates": [snapshot.to_dict() for snapshot in self.candidates],
            "passed_over": list(self.passed_over),
            "diverged": dict(self.diverged),
            "advice": self.advice,
        }


@dataclass(frozen=True)
class Action(Value):
    """What to do: FRESH, STOP, or "resume" from the first of `snapshots` that stands its checks.

    `reasons` explain it; with STOP, `advice` is for the person who must decide.
    """

    kind: str
    snapshots: tuple[Snapshot, ...]
    reasons: tuple[str, ...]
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "snapshots": [snapshot.to_dict() for snapshot in self.snapshots],
            "reasons": list(self.reasons),
            "advice": self.advice,
        }


@checked(store=Store, policy=Policy)
def survey(store: Store, policy: Policy) -> Situation:
    """Look at a handle's run. Costs one entry read per candidate, and a look at the files that each needs.

    Raises:
        StorageError: something could not be looked at now, which says nothing of what is there.
    """
    store._keeper.catch_up()
    if not store._catalog.branch_rows(store.run):
        return _survey_nothing(store)
    check = WholenessCheck(store._timeline, store._keeper, store._catalog)
    found: list[Snapshot] = []
    passed: list[str] = []
    labelled_count = 0
    for snapshot_id in store._chooser.view(store._committer.position).ids(reverse=True):
        row = store._catalog.row(snapshot_id)
        if row.step < policy.floor_step or (len(found) - labelled_count >= CANDIDATES_MAX and policy.metric is None):
            break
        flaw = _flaw(store, check, snapshot_id, policy)
        if flaw:
            passed.append(f"step {row.step} ({short(snapshot_id)}) {flaw}")
        else:
            found.append(store._catalog.info(snapshot_id))
            labelled_count += bool(_diverged_label(found[-1], policy))  # else they would hide what is before them
    passed = store._chooser.lost_after(found[0].seq if found else 0) + passed
    if not found:
        floor = f" from step {policy.floor_step} on" if policy.floor_step else ""
        reason = f"run {store.run!r} has no whole consistent snapshot{floor}"
        advice = advice_on(store, DAMAGED) if passed else "Lower floor_step: `casckpt log` lists the steps."
        return Situation(DAMAGED, reason, (), tuple(passed), advice=advice)
    return Situation(USABLE, f"newest is {found[0]}", tuple(found), tuple(passed), _diverged(found, policy))


def _survey_nothing(store: Store) -> Situation:
    others = [run for run in store.runs() if run != store.run]
    doubts = store._chooser.doubts()
    if doubts:
        nothing = f"run {store.run!r} has no snapshot" if others else "no run has a snapshot"
        reason = f"{nothing} that can be read, and this store is damaged or incomplete"
        return Situation(DAMAGED, reason, (), tuple(doubts), advice=advice_on(store, DAMAGED))
    if others:
        names = ", ".join(map(repr, others[:5])) + (" …" if len(others) > 5 else "")
        reason = f"run {store.run!r} has no snapshot, but this store holds {names}"
        return Situation(AMBIGUOUS, reason, advice=advice_on(store, AMBIGUOUS))
    return Situation(EMPTY, "nothing was ever committed to this store")


def advice_on(store: Store, answer: str) -> str:
    """What to do where there is nothing to go on from: what gives the steps back first, what gives them up last."""
    last = "Only to give up what is there, let the training call `recover(…, allow_fresh=True)`: it begins anew"
    if answer == AMBIGUOUS:
        return f"Look with `casckpt runs {store.path}`, and correct the name of the run. {last}."
    return (
        f"Nothing was changed. First, `casckpt verify {store.path} --read-data` names what "
        "is damaged or missing. Then copy those files back from another copy of this store, or run `casckpt repair "
        f"{store.path} --from COPY --execute`, and start the training again. {last}."
    )


def few(reasons: Sequence[str]) -> str:
    """Reasons in one line; of many, the first ones and how many more there are."""
    more = [f"and {len(reasons) - _TOLD} more reasons"] if len(reasons) > _TOLD else []
    return "; ".join([*reasons[:_TOLD], *more])


def _flaw(store: Store, check: WholenessCheck, snapshot_id: SnapshotId, policy: Policy) -> str:
    row = store._catalog.row(snapshot_id)
    if row.is_mixed or row.is_thinned:
        return "is mixed" if row.is_mixed else "is thinned"
    flaw = check.snapshot_flaw(snapshot_id)
    if flaw is not None and policy.fill_droppable:
        try:
            content = store._catalog.load(snapshot_id)
        except FLAWS:
            pass  # the snapshot itself is what is damaged
        else:
            needed = {name: ref.manifest for name, ref in content.components.items() if ref.necessity != DROPPABLE}
            flaw = check.first_flaw(needed)
    return "" if flaw is None else f"is not whole: {flaw.reason}"


def _diverged(found: Sequence[Snapshot], policy: Policy) -> dict[str, str]:
    reasons: dict[str, str] = {}
    labelled = {each.id: _diverged_label(each, policy) for each in found}
    best = max((_score(each, policy) for each in found if not labelled[each.id]), default=-math.inf)
    for snapshot in found:
        value = snapshot.metrics.get(policy.metric) if policy.metric is not None else None
        if labelled[snapshot.id]:
            reasons[snapshot.id] = f"labelled {labelled[snapshot.id]}"
        elif isinstance(value, float) and not math.isfinite(value):
            reasons[snapshot.id] = f"{policy.metric} is {value}"
        elif policy.drop_max is not None and -math.inf < _score(snapshot, policy) < best - policy.drop_max * abs(best):
            reasons[snapshot.id] = f"{policy.metric} is {value}, the best was {best if policy.largest else -best:g}"
    return reasons


def _diverged_label(snapshot: Snapshot, policy: Policy) -> str:
    labels = policy.diverged_labels.items()
    return next((f"{name}={text}" for name, text in labels if snapshot.labels.get(name) == text), "")


def _score(snapshot: Snapshot, policy: Policy) -> float:
    """The metric, larger is better; -inf where there is none."""
    value = snapshot.metrics.get(policy.metric) if policy.metric is not None else None
    if isinstance(value, bool | str) or value is None or not math.isfinite(value):
        return -math.inf
    return float(value) if policy.largest else -float(value)


@checked(situation=Situation, failure=FailureInfo, policy=maybe(Policy), allow_fresh=FLAG)
def decide(
    situation: Situation, failure: FailureInfo, policy: Policy | None = None, *, allow_fresh: bool = False
) -> Action:
    """Which action the table gives. Pure.

    Args:
        situation: what the store holds, as `survey` found it.
        failure: how the training ended.
        policy: the table; None for the default one.
        allow_fresh: start from the beginning where the table says STOP for want of a snapshot.
    """
    chosen = policy or Policy()
    newest = situation.candidates[0] if situation.candidates else None
    rule = next((each for each in chosen.rules if _fits(each, situation, failure, newest)), None)
    why = "no rule of the table fits" if rule is None else rule.why
    reasons = [f"{situation.reason}; {why}", *situation.passed_over]
    choose = STOP if rule is None else rule.choose
    advice = situation.advice or "The rules of the policy decided so: look with `casckpt log`, then change them."
    if choose == STOP and allow_fresh and newest is None:
        return Action(FRESH, (), (*reasons, "a fresh start was allowed"))
    if choose in (NEWEST, BEST) and newest is None:
        return Action(STOP, (), (*reasons, "there is no snapshot to choose"), advice)
    if choose == FRESH and situation.answer != EMPTY and not allow_fresh:
        return Action(STOP, (), (*reasons, "a fresh start on a store that is not empty must be allowed"), advice)
    if choose in (STOP, FRESH):
        return Action(choose, (), tuple(reasons), advice if choose == STOP else "")
    ordered = list(situation.candidates)
    if failure.step is not None and newest is not None and failure.step > newest.step:
        reasons.append(f"the training had come to step {failure.step}, {failure.step - newest.step} beyond the newest")
    reasons += [f"step {each.step}: {situation.diverged[each.id]}" for each in ordered if each.id in situation.diverged]
    if choose == BEST:
        ordered = [each for each in ordered if each.id not in situation.diverged] or ordered
        ordered.sort(key=lambda each: -_score(each, chosen))  # stable: of equals, and without a metric, the newest
    elif newest is not None and newest.id not in situation.diverged:  # and no labelled one is fallen back to
        ordered = [each for each in ordered if not _diverged_label(each, chosen)]
    return Action("resume", tuple(ordered[:CANDIDATES_MAX]), tuple(reasons))


def _fits(rule: Rule, situation: Situation, failure: FailureInfo, newest: Snapshot | None) -> bool:
    if situation.answer not in rule.answers or failure.kind not in rule.failures:
        return False
    if rule.is_diverged is not None and rule.is_diverged != (newest is not None and newest.id in situation.diverged):
        return False
    if rule.lost_steps_min is None:
        return True
    return newest is not None and failure.step is not None and failure.step - newest.step >= rule.lost_steps_min
