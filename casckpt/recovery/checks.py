"""Checks of a state that was just loaded: a digest proves the bytes, not that they make sense together.

A check is a function from the live targets (component name → object) to problems in words, a text or several; none, or
None, means that it passed.
None of these moves a random generator or changes a target.

* `find_nonfinite`: NaN or infinity in weights and moments;
* `find_schedule_gaps`: a schedule that stands at another learning rate than its optimizer;
* `Reference`: outputs of a probe recorded with the snapshot, against what the loaded model gives;
* `TrialSteps`: a few updates of a copy, whose loss must be finite.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from casckpt.arguments import FUNCTION, LIST, MAPPING, NUMBER, TEXT, WHOLE, checked, maybe, within
from casckpt.errors import InvalidInputError, MismatchError
from casckpt.state.numbers import largest_difference, nonfinite_paths
from casckpt.state.rng import RngState
from casckpt.state.rng_guard import RngGuard
from casckpt.state.transfer import copy_tree

Targets = Mapping[str, Any]
Check = Callable[[Targets], Iterable[str] | str | None]
_SHOWN = 5
_BROKEN = (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError)  # what senseless numbers end in


@checked(targets=MAPPING)
def find_nonfinite(targets: Targets) -> list[str]:
    """NaN and infinity in any floating torch tensor of the targets; see `nonfinite_paths`."""
    paths = [path for name, live in targets.items() for path in nonfinite_paths(name, live)]
    if not paths:
        return []
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return [f"not finite: {', '.join(paths[:_SHOWN])}{more}"]


@checked(targets=MAPPING)
def find_schedule_gaps(targets: Targets) -> list[str]:
    """Schedules that last set another learning rate than the groups of their optimizer have.

    Looks at targets with `get_last_lr()` and an `optimizer`; a training that changes rates by hand besides leaves this
    check out.
    """
    found = []
    for name, live in targets.items():
        groups = getattr(getattr(live, "optimizer", None), "param_groups", None)
        if groups is None or not callable(getattr(live, "get_last_lr", None)):
            continue
        wanted, rates = [float(rate) for rate in live.get_last_lr()], [float(group["lr"]) for group in groups]
        if wanted != rates:
            found.append(f"schedule {name!r} stands at {wanted}, its optimizer has {rates}")
    return found


class Reference:
    """Outputs of a probe, committed beside the weights: does the loaded model give what the committed one gave?

        reference = Reference(lambda: policy(batch))
        store.commit(step, {"policy": policy, "reference": reference})

    A Checkpointable: saving runs the probe, loading keeps the recorded outputs, `problems` runs it again and compares.
    Commit it as "droppable": it is no state of the training.

    Args:
        probe: returns a tensor, an array or a tree of them, on fixed inputs. Runs at every commit, with the generators
            put back after; it must not change what it looks at: a module that counts batches is put to `eval()` in it,
            and back.
        tolerance: largest absolute difference; 0 where the same machine and library must give the same bits.
    """

    @checked(probe=FUNCTION, tolerance=NUMBER)
    def __init__(self, probe: Callable[[], Any], *, tolerance: float = 1e-5) -> None:
        self._probe = probe
        self._tolerance = tolerance
        self._recorded: Any = None

    def _run(self) -> Any:
        guard = RngGuard(RngState())
        try:
            return copy_tree("reference", self._probe())
        finally:
            guard.put_back()

    def state_dict(self) -> dict[str, Any]:
        """What the probe gives now."""
        return {"outputs": self._run()}

    @checked(state=MAPPING)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what it gave when it was committed."""
        self._recorded = state["outputs"]

    def problems(self) -> list[str]:
        """How the outputs differ from the recorded ones.

        Raises:
            InvalidInputError: nothing was loaded.
        """
        if self._recorded is None:
            raise InvalidInputError("no reference output was loaded. Restore it with the weights first.")
        try:
            outputs = self._run()
        except _BROKEN as error:
            return [f"reference output: {type(error).__name__}: {error}"]
        try:
            largest = largest_difference("reference", self._recorded, outputs)
        except MismatchError as error:
            return [f"reference output: {error.message}"]
        if largest <= self._tolerance:
            return []
        return [f"reference output differs by {largest:.3g}, at most {self._tolerance:g} is allowed"]


class TrialSteps:
    """A check that trains a copy for a few steps; neither live objects nor random streams move.

    Args:
        step: one update of the targets that it is given, deep copies of the live ones; returns the loss.
        count: how many.
        change_min, change_max: the band of how far the weight of `component` that moves most may move in these steps
            together, in absolute terms; None for no upper end.
        component: whose change is measured.
        only: the components that `step` needs; None copies all of them, a replay buffer too.

    A step that ends with an error of its arithmetic, its shapes or its indices is a problem like any other.
    """

    @checked(
        step=FUNCTION,
        count=within(WHOLE, 1),
        change_min=NUMBER,
        change_max=maybe(NUMBER),
        component=TEXT,
        only=maybe(LIST),
    )
    def __init__(
        self,
        step: Callable[[Targets], float],
        *,
        count: int = 2,
        change_min: float = 0.0,
        change_max: float | None = None,
        component: str = "policy",
        only: Iterable[str] | None = None,
    ) -> None:
        self._step, self._count, self._component = step, count, component
        self._band = change_min, math.inf if change_max is None else change_max
        self._only = None if only is None else tuple(only)

    def __call__(self, targets: Targets) -> list[str]:
        guard = RngGuard(RngState())
        losses: list[float] = []
        try:
            trial = copy.deepcopy({name: targets[name] for name in self._only or targets})
            for _ in range(self._count):
                losses.append(float(self._step(trial)))
                if not math.isfinite(losses[-1]):
                    return [f"trial step {len(losses)} of {self._count}: the loss is {losses[-1]}"]
        except _BROKEN as error:
            return [f"trial step {len(losses) + 1} of {self._count}: {type(error).__name__}: {error}"]
        finally:
            guard.put_back()
        if self._band == (0.0, math.inf):
            return []
        before, after = (copy_tree(self._component, each[self._component]) for each in (targets, trial))
        change, (low, high) = largest_difference(self._component, before, after), self._band
        if low <= change <= high:
            return []
        return [f"{self._count} trial steps move {self._component} by {change:.3g}, expected {low:g} to {high:g}"]


def run_checks(targets: Targets, checks: Iterable[Check]) -> list[str]:
    """All problems: those of the checks, and of every `Reference` among the targets.

    Raises:
        InvalidInputError: a check answers with neither texts nor None.
    """
    references = [problem for live in targets.values() if isinstance(live, Reference) for problem in live.problems()]
    return [*(problem for check in checks for problem in _problems(check, check(targets))), *references]


def _problems(check: Check, answer: Any) -> list[str]:
    if answer is None or isinstance(answer, str):
        return [answer] if answer else []
    if isinstance(answer, Iterable):
        return [str(each) for each in answer]
    name = getattr(check, "__name__", type(check).__name__)
    raise InvalidInputError(f"check {name!r} returned {answer!r}: expected problems in words, or nothing.", check=name)
