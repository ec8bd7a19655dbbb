"""How much decoding a restore may cost for the bytes that it saves on disk.

Costs are in eighths of the time that reading and hashing the plain bytes takes, which every restore pays anyway. They
are estimates by kind of form, made on two processors, and serve to choose: nothing is believed because of them.
Compiled kernels (`kernels`) decode formulas in a third of the time, so that chains may be longer for the same. A
record's cost is that of its own form, of its first base, which is what it was before, and of those other bases that a
restore of the whole snapshot does not decode anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from casckpt.codec.contract import CONSTANT, DIFFERENCE, FRAMES, PLANES, RAW, ZSTD, Encoded
from casckpt.codec.models import (
    CENTERED_STEP,
    DRIFTING_AVERAGE,
    FIRST_MOMENT,
    NESTEROV_WEIGHT,
    ROUNDING,
    SECOND_MOMENT,
    SQUARES,
)
from casckpt.errors import InvalidInputError

COST_UNIT = 8  # the cost of reading and hashing a chunk
COST_MAX = 255  # what a record can say
OPENING_SIZE = 16 << 20  # bytes that are read and hashed in the time that opening a store takes
PREDICTED_PRICE = 0.1  # least price of a difference in a leaf that is predicted: its cost shortens the next chain
DEPTH_MAX = 48  # bases below bases; what readers accept lies above
DENSE_SHARE = 0.75  # of a chunk that a dense difference of trained float32 takes
FRAMES_COSTS = (12, 22, 34, 34)  # by method; those of the first hold for known frames alone too


class _Costs(NamedTuple):
    """Of forms that depend on who decodes them; predictions by kind, those of numbers of 16 bits apart."""

    planes: int
    dense: int
    predictions: Mapping[int, int]
    prediction: int  # of a kind that is not among them
    narrow_predictions: Mapping[int, int]
    narrow_prediction: int


_INTERPRETED = _Costs(
    planes=11,
    dense=15,
    predictions={
        SECOND_MOMENT: 19,
        FIRST_MOMENT: 16,
        ROUNDING: 5,
        NESTEROV_WEIGHT: 20,
        DRIFTING_AVERAGE: 20,
        SQUARES: 20,
        CENTERED_STEP: 17,
    },
    prediction=11,
    narrow_predictions={SECOND_MOMENT: 92},  # twice as many numbers to a byte, widened and rounded
    narrow_prediction=53,
)
_COMPILED = _Costs(
    planes=10,
    dense=14,
    predictions={
        SECOND_MOMENT: 7,
        FIRST_MOMENT: 11,
        ROUNDING: 3,
        NESTEROV_WEIGHT: 5,
        DRIFTING_AVERAGE: 9,
        SQUARES: 8,
        CENTERED_STEP: 7,
    },
    prediction=4,
    narrow_predictions={SECOND_MOMENT: 22},
    narrow_prediction=10,
)


@dataclass(frozen=True, slots=True)
class Level:
    """One trade of space for speed.

    Attributes:
        price: share of a chunk that a base has to save for each unit of decoding cost that it adds. Half of it where
            the state is as small as what opening a store takes, and less of smaller ones.
        cost_max: mean decoding cost per chunk of a commit, in units of COST_UNIT. A restore then takes one more than
            this times that of plain bytes.
        standalone_gain: share of a chunk that an encoding without a base has to save.
        operand_gain: the same for a chunk that others are predicted from, which every restore of those decodes too.
        difference_max: share of a chunk that a difference may take; a small one admits sparse differences only.
        root_gain: a chunk whose difference takes no more than this is stored raw where its base has become too costly:
            the next differences start from it. 0: never.
        has_predictions: whether optimizer steps are predicted.
    """

    name: str
    price: float
    cost_max: float
    standalone_gain: float
    operand_gain: float
    difference_max: float
    root_gain: float
    has_predictions: bool


LEVELS: Final[Mapping[str, Level]] = {
    level.name: level
    for level in (
        Level("fast", 0.1, 0.25, 0.5, 0.5, 0.02, 0.02, has_predictions=False),
        Level("balanced", 0.1, 3.0, 0.03, 0.5, 1.0, 0.5, has_predictions=True),
        Level("small", 0.03, 11.0, 0.03, 0.03, 1.0, 0.0, has_predictions=True),
    )
}
DEFAULT_LEVEL = "balanced"
PLAIN: Final = Level("plain", 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, has_predictions=False)  # as it is, to be mapped


def find_level(name: object) -> Level:
    """The level of a name.

    Raises:
        InvalidInputError: there is none.
    """
    level = LEVELS.get(name) if isinstance(name, str) else None
    if level is None:
        raise InvalidInputError(f"level={name!r}: expected one of {', '.join(LEVELS)}", level=name)
    return level


def decode_cost(encoded: Encoded, plain_size: int) -> int:
    """Cost of decoding one form, which is no prediction, without its bases."""
    if encoded.codec in (RAW, CONSTANT):
        return 0
    share = encoded.stored_size / max(plain_size, 1)
    if encoded.codec == DIFFERENCE:
        is_sparse = encoded.params[1] == 1
        return min(2 + round(450 * share), _costs().dense) if is_sparse else _costs().dense
    if encoded.codec == FRAMES:
        return FRAMES_COSTS[encoded.params[1]]
    return {ZSTD: 2 + round(4 * share), PLANES: _costs().planes}[encoded.codec]


def burden(share: float, cost: float, price: float) -> float:
    """Share of a chunk that a form takes, and what decoding it costs as a share of the chunk."""
    return share + price * cost / COST_UNIT


def prediction_cost(kind: int, itemsize: int) -> int:
    """Cost of evaluating one kind of formula, whose first operand has such items, and applying what it misses."""
    costs = _costs()
    if itemsize == 4:
        return costs.predictions.get(kind, costs.prediction)
    return costs.narrow_predictions.get(kind, costs.narrow_prediction)


def missed_cost(share: float) -> int:
    """Cost of applying what a prediction missed, where that takes this share of the chunk.

    What `prediction_cost` says holds for formulas that are right. One that is not leaves a dense difference behind.
    """
    return round(_costs().dense * min(1.0, share / DENSE_SHARE))


def _costs() -> _Costs:
    """What this machine pays. One without kernels that gets the store restores more slowly than its level says."""
    from casckpt.codec import kernels  # loads NumPy

    return _COMPILED if kernels.IS_THERE else _INTERPRETED
