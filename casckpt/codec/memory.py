"""What paid for a leaf, and what a chunk of it may cost: what a commit keeps between its chunks and its steps.

This file imports neither NumPy nor zstandard.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from casckpt.codec.contract import TRIAL_INTERVAL, Encoded, Hint
from casckpt.codec.level import COST_MAX, PREDICTED_PRICE, Level, burden, decode_cost

FAILURES_MAX = 3  # one chunk of a leaf may change in all places while the others do not
CERTAIN = 0.5  # share of the next best form under which a prediction is the one: others are not tried any more
_MISSES_MAX = FAILURES_MAX + TRIAL_INTERVAL
MARGIN = 0.005  # of the chunk: what a base has to save, however cheap it is


@dataclass(slots=True)
class Memory:
    """What paid for one leaf. May be shared by threads like a `Hint`: a race costs a trial, never correctness.

    Attributes:
        cost: decoding cost of the last record, its bases included.
        prediction: the candidate that held last, if it held so well that it is the right one.
        wants_bases: whether a form with bases was the choice, or would have been if it cost less.
        has_moved: whether it was encoded since whoever shares out the costs of a commit last looked.
        difference_cost: decoding cost that a difference likely adds; 0 when that is not known.
    """

    standalone: Hint = field(default_factory=Hint)
    difference: Hint = field(default_factory=Hint)
    far_difference: Hint = field(default_factory=Hint)  # to what lies many commits back: it takes more
    frames: Hint = field(default_factory=Hint)
    cost: int = 0
    wants_bases: bool = False
    has_moved: bool = False
    _alone_share: float = 1.0  # size without a base, as a share of the chunk
    _difference_share: float | None = None  # None: not known, 1.0: does not pay
    _failures: int = 0  # differences in a row that did not pay
    _far_failures: int = 0
    difference_cost: int = 0
    _uses: int = 0
    _frames_failures: int = 0  # chunks in a row in which no frame repeated
    _frames_uses: int = 0
    _predictions: dict[Hashable, Hint] = field(default_factory=dict)
    prediction: Hashable = None
    _prediction_costs: dict[Hashable, int] = field(default_factory=dict)  # of decoding the last that held, by candidate
    _misses: dict[Hashable, int] = field(default_factory=dict)  # by candidate: failures in a row, then uses left out

    def is_trial_due(self) -> bool:
        """Whether this use, which is counted, has to measure everything."""
        self._uses += 1
        is_due = self._uses % TRIAL_INTERVAL == 1
        if is_due:
            self._difference_share = None
            self._failures = self._far_failures = 0
            self._prediction_costs.clear()
        return is_due

    def is_frames_due(self) -> bool:
        """Whether a chunk is tried as frames: always while some repeat, else at every TRIAL_INTERVAL-th use."""
        self._frames_uses += 1
        return self._frames_failures < FAILURES_MAX or self._frames_uses % TRIAL_INTERVAL == 0

    def learn_frames(self, *, has_paid: bool) -> None:
        """Remember whether frames of a chunk repeated."""
        self._frames_failures = 0 if has_paid else self._frames_failures + 1

    def learn_alone(self, alone: Encoded, plain_size: int) -> None:
        """Remember what a chunk takes without a base."""
        self._alone_share = share_of(alone, plain_size)

    def is_worth(self, form: Encoded, plain_size: int, price: float) -> bool:
        """Whether a form with a base saves enough for what it costs to decode."""
        price = max(price, PREDICTED_PRICE) if self.prediction is not None else price
        return burden(share_of(form, plain_size), decode_cost(form, plain_size), price) <= self._alone_share

    def learn_difference(self, form: Encoded | None, plain_size: int, *, is_far: bool = False) -> None:
        """Remember what a difference takes; None: too much. One to a far base that fails says nothing of near ones."""
        if is_far:
            self._far_failures = self._far_failures + 1 if form is None else 0
            if form is None:
                return
        else:
            self._failures = self._failures + 1 if form is None else 0
        self._difference_share = 1.0 if form is None else share_of(form, plain_size)
        self.difference_cost = 0 if form is None else decode_cost(form, plain_size)

    def predictions_to_try(self, candidates: Sequence[Hashable]) -> Sequence[int]:
        """Positions of the candidates to try: the one that is right, or all but those that failed again and again."""
        if self.prediction is not None and self.prediction in candidates:
            return (candidates.index(self.prediction),)
        return [at for at, each in enumerate(candidates) if self._misses.get(each, 0) < FAILURES_MAX]

    def prediction_hint(self, candidate: Hashable) -> Hint:
        """What paid for a candidate."""
        return self._predictions.setdefault(candidate, Hint())

    def prediction_cost(self, candidate: Hashable, least: int) -> int:
        """What decoding a prediction by this candidate likely costs: as the last since the last trial, or `least`."""
        return self._prediction_costs.get(candidate, least)

    def learn_prediction_cost(self, candidate: Hashable, cost: int) -> None:
        """Remember what decoding a prediction by this candidate costs, its operands left out."""
        self._prediction_costs[candidate] = cost

    def learn_predictions(self, held: Hashable, share: float, failed: Iterable[Hashable]) -> None:
        """Remember one use: which candidate was the best, at what share of the chunk, and which did not hold.

        One that failed FAILURES_MAX times in a row is left out for TRIAL_INTERVAL uses; the others are not.
        """
        is_certain = held is not None and share < CERTAIN * min(self._alone_share, self.difference_share)
        self.prediction = held if is_certain else None
        misses = {each: count + 1 for each, count in self._misses.items() if FAILURES_MAX <= count < _MISSES_MAX - 1}
        misses |= {each: self._misses.get(each, 0) + 1 for each in failed}
        self._misses = misses

    def learn_cost(self, cost: int, *, has_bases: bool) -> None:
        """Remember what the last record costs, for the budget of the next commit."""
        self.cost = cost
        self.wants_bases = has_bases or self.difference_share < 1.0
        self.has_moved = True

    def ceiling(self, plain_size: int, limit: float = 1.0) -> int:
        """Bytes that a form with bases must stay under; `limit` is a share of the chunk."""
        return int(min(self._alone_share - MARGIN, limit) * plain_size)

    def worth_of_difference(self, cost: int, price: float) -> float:
        """Share of the chunk that a form of this decoding cost must stay under to be better than a difference."""
        return min(self.difference_share, burden(self.difference_share, self.difference_cost - cost, price))

    def is_hopeless(self, *, is_far: bool) -> bool:
        """Whether the last few differences did not pay: until the next trial no base is read for one."""
        return (self._far_failures if is_far else self._failures) >= FAILURES_MAX

    @property
    def difference_share(self) -> float:
        """What a difference takes, as a share of the chunk; 1 when that is not known."""
        return 1.0 if self._difference_share is None else self._difference_share

    @property
    def is_difference_known(self) -> bool:
        """Whether a difference was measured since the last trial."""
        return self._difference_share is not None


class Limits(NamedTuple):
    """What one chunk may cost.

    Attributes:
        level: of its component.
        cost_max: decoding cost in eighths.
        is_operand: whether others are predicted from it.
        price: share of the chunk that a base has to save for each unit of cost.
        alone_max: decoding cost in eighths of a form without a base: what all chunks of the state could have.
    """

    level: Level
    cost_max: int
    is_operand: bool = False
    price: float = 0.0
    alone_max: int = COST_MAX

    @property
    def gain_min(self) -> float:
        """Share of the chunk that any form but raw has to save."""
        return self.level.operand_gain if self.is_operand else self.level.standalone_gain


def share_of(form: Encoded, plain_size: int) -> float:
    """What a form takes, as a share of the chunk; bases' ids come on top."""
    return (form.stored_size + len(form.params)) / plain_size
