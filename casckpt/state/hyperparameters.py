"""The numbers of an optimizer as a commit finds them, and what they make the codec try.

A number stands in the scalar block, or is a tensor without dimensions, of which as many bytes are read as it has. What
is no number of the expected kind makes no model: a guess less, never an error.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any, NamedTuple, Protocol

from casckpt.codec.models import (
    ADAM_WEIGHT,
    CENTERED_STEP,
    FIRST_MOMENT,
    MOMENTUM_WEIGHT,
    NESTEROV_WEIGHT,
    SECOND_MOMENT,
    SQUARES,
    Model,
)
from casckpt.format.structure import Structure
from casckpt.state.optimizer_trees import Number, Scalar

_EXACT_MAX = 1 << 53  # larger integers are no hyper-parameters, and may not fit a float
_NUMBER_FORMATS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


class _Blocks(Protocol):
    def view(self, index: int, start: int, stop: int) -> memoryview: ...


class Described(Protocol):
    """What is needed of a `Captured`."""

    @property
    def structure(self) -> Structure: ...
    @property
    def scalars(self) -> bytes: ...
    @property
    def blocks(self) -> _Blocks: ...


class Values:
    """Numbers of one component, wherever they stand."""

    def __init__(self, captured: Described, scalars: list[Any]) -> None:
        self._captured = captured
        self._scalars = scalars

    def get(self, place: Number | None) -> Any:
        """The value at a place: a scalar's, or a number that is a tensor without dimensions; else None."""
        if isinstance(place, Scalar):
            return self._scalars[place.position]
        if place is None:
            return None
        leaf = self._captured.structure.leaves[place]
        layout = _NUMBER_FORMATS.get(leaf.dtype)
        if layout is None or prod(leaf.shape) != 1:
            return None
        view = self._captured.blocks.view(leaf.block, leaf.offset, leaf.offset + struct.calcsize(layout))
        return struct.unpack(layout, view)[0]

    def number(self, place: Number | None, default: float | None = None) -> float | None:
        """The value at a place as a float, or `default` where there is none."""
        value = self.get(place)
        is_number = type(value) in (float, bool) or (type(value) is int and abs(value) < _EXACT_MAX)
        return float(value) if is_number else default


class Moving(NamedTuple):
    """The hyper-parameters of a group that schedulers move: rates, and with them often the share of the old moment."""

    lr: float | None
    betas: Any
    momentum: float | None


def moving_of(group: dict[str, Number], values: Values) -> Moving:
    """Those of a group as they are now."""
    betas = values.get(group.get("betas"))
    is_pair = isinstance(betas, (list, tuple)) and len(betas) == 2 and all(type(beta) is float for beta in betas)
    momentum = values.number(group.get("momentum"))
    return Moving(values.number(group.get("lr")), tuple(betas) if is_pair else None, momentum)


def adam_models(
    group: dict[str, Number], values: Values, moving: Moving, step: float | None
) -> dict[int, tuple[Model, ...]]:
    """Models of Adam and its kin by kind; that of the weight where the step is known."""
    if moving.betas is None:
        return {}
    beta1, beta2 = moving.betas
    found: dict[int, tuple[Model, ...]] = {
        FIRST_MOMENT: (Model(FIRST_MOMENT, (beta1, 1 - beta1)),),
        SECOND_MOMENT: (Model(SECOND_MOMENT, (1 - beta1, beta2, 1 - beta2)),),
    }
    eps, rate = values.number(group.get("eps")), moving.lr
    if rate is None or eps is None or step is None or step < 1 or not all(0 <= beta < 1 for beta in moving.betas):
        return found
    decay = values.number(group.get("weight_decay"), 0.0) or 0.0
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    is_decoupled = values.get(group.get("decoupled_weight_decay"))  # older releases of torch do not say
    kept = {True: (decay,), False: (0.0,)}.get(is_decoupled, (decay, 0.0))
    constants = [(1 - rate * each, -rate / bias1, bias2**0.5, eps) for each in dict.fromkeys(kept)]
    found[ADAM_WEIGHT] = tuple(Model(ADAM_WEIGHT, each) for each in constants)
    return found


def sgd_models(group: dict[str, Number], values: Values, moving: Moving) -> dict[int, tuple[Model, ...]]:
    """Models of SGD with momentum by kind."""
    momentum, rate = moving.momentum, moving.lr
    if momentum is None:
        return {}
    dampening = values.number(group.get("dampening"), 0.0) or 0.0
    found: dict[int, tuple[Model, ...]] = {FIRST_MOMENT: (Model(FIRST_MOMENT, (momentum, 1 - dampening)),)}
    if rate is not None and values.get(group.get("nesterov")) is True:
        found[NESTEROV_WEIGHT] = (Model(NESTEROV_WEIGHT, (-rate, momentum)),)
    elif rate is not None:
        found[MOMENTUM_WEIGHT] = (Model(MOMENTUM_WEIGHT, (-rate,)),)
    return found


def rmsprop_models(group: dict[str, Number], values: Values, moving: Moving) -> dict[int, tuple[Model, ...]]:
    """Models of RMSprop by kind; none of a group that has no alpha.

    What it steps is the buffer where it has momentum, else the weight. Decay is in the gradient, whatever it is.
    """
    alpha, eps, rate = values.number(group.get("alpha")), values.number(group.get("eps")), moving.lr
    if alpha is None or eps is None:
        return {}
    momentum = moving.momentum or 0.0
    steps = [(momentum, 1.0)] if momentum else [(1.0, -rate)] if rate is not None else []
    found: dict[int, tuple[Model, ...]] = {}
    if values.get(group.get("centered")) is True:
        found[FIRST_MOMENT] = (Model(FIRST_MOMENT, (alpha, 1 - alpha)),)
        found[SECOND_MOMENT] = (Model(SECOND_MOMENT, (1 - alpha, alpha, 1 - alpha)),)
        found[CENTERED_STEP] = tuple(Model(CENTERED_STEP, (1 - alpha, eps, *step)) for step in steps)
    else:
        found[SQUARES] = tuple(Model(SQUARES, (alpha, 1 - alpha, eps, *step)) for step in steps)
    if momentum and rate is not None:
        found[MOMENTUM_WEIGHT] = (Model(MOMENTUM_WEIGHT, (-rate,)),)
    return found
