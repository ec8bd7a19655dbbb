"""What an optimizer's step may have computed, as the layer that knows optimizers tells the codec.

A `Model` is a kind of formula with the hyper-parameters that may have been used; which kernel did it is found by trial.
The numbers of kinds are stored in records (docs/format.md §5). This file imports nothing, so that relations can be
derived without NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass

SECOND_MOMENT, ADAM_WEIGHT, FIRST_MOMENT, ROUNDING, MOMENTUM_WEIGHT, NESTEROV_WEIGHT = 1, 2, 3, 4, 5, 6
AVERAGE, DRIFTING_AVERAGE = 7, 8
SQUARES, CENTERED_STEP = 9, 10
NEAR = 0  # no formula: what it names is the base of a difference (codec 4), and the number is in no record


@dataclass(frozen=True, slots=True)
class Model:
    """A kind of formula and its constants, in this order:

    * SECOND_MOMENT (operands v, m, m'): 1 - β1, β2, 1 - β2
    * ADAM_WEIGHT (w, m', v'): 1 - lr·weight decay (1 where the decay is in the gradient), -lr / (1 - β1 ** step),
      √(1 - β2 ** step), eps
    * FIRST_MOMENT (m): β1, 1 - β1; of SGD's buffer: momentum, 1 - dampening
    * ROUNDING (the float32 number): none
    * MOMENTUM_WEIGHT (w, buffer'): -lr
    * NESTEROV_WEIGHT (w, buffer, buffer'): -lr, momentum
    * AVERAGE (w, source'): share of w, share of the source; or none: they are solved for on a sample
    * NEAR (another leaf): none
    * DRIFTING_AVERAGE (w, source, source'): the share of each; or none
    * SQUARES (s, x, x', where x is what RMSprop steps: the weight, or the buffer of momentum): α, 1 - α, eps, and of
      the step: the share of x that stays, the factor of the direction
    * CENTERED_STEP (x, a, a', s', where a is the average of gradients): 1 - α, eps, and of the step as above
    """

    kind: int
    constants: tuple[float, ...]
