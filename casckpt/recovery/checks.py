"""Checks of a state that was just loaded: a digest proves the bytes, not that they make sense together.

A check is a function from the live targets (component name → object) to problems in words; none means that it passed.
None of them moves a random generator or changes a target.

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

from casckpt.errors import InvalidInputError, MismatchError
from casckpt.state.numbers import largest_difference, nonfinite_paths
from casckpt.state.rng import RngState
from casckpt.state.rng_guard import RngGuard
from casckpt.state.transfer import copy_tree

Targets = Mapping[str, Any]
Check = Callable[[Targets], Iterable[str]]
_SHOWN = 5


def find_nonfinite(targets: Targets) -> list[str]:
    """NaN and infinity in any floating torch tensor of the targets; see `nonfinite_paths`."""
    paths = [path for name, live in targets.items() for path in nonfinite_paths(name, live)]
    if not paths:
        return []
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return [f"not finite: {', '.join(paths[:_SHOWN])}{more}"]


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
        probe: returns a tensor, an array or a tree of them, on fixed inputs. Runs with the generators put back after.
        tolerance: largest absolute difference; 0 where the same machine and library must give the same bits.
    """

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
            largest = largest_difference("reference", self._recorded, self._run())
        except MismatchError as error:
            return [f"reference output: {error.message}"]
        if largest <= self._tolerance:
            return []
        return [f"reference output differs by {largest:.3g}, at most {self._tolerance:g} is allowed"]


class TrialSteps:
    """A check that trains a copy for a few steps.

    Args:
        step: one update of the targets that it is given, a deep copy of the live ones; returns the loss.
        count: how many.
        change_max: how far a weight of `component` may move in these steps together, in absolute terms; None for any.
        component: whose change is measured.
    """

    def __init__(
        self,
        step: Callable[[Targets], float],
        *,
        count: int = 2,
        change_max: float | None = None,
        component: str = "policy",
    ) -> None:
        self._step, self._count, self._change_max, self._component = step, count, change_max, component

    def __call__(self, targets: Targets) -> list[str]:
        guard = RngGuard(RngState())
        try:
            trial = copy.deepcopy(dict(targets))
            losses = [float(self._step(trial)) for _ in range(self._count)]
        finally:
            guard.put_back()
        bad = [number for number, loss in enumerate(losses, 1) if not math.isfinite(loss)]
        if bad:
            return [f"trial step {bad[0]} of {self._count}: the loss is {losses[bad[0] - 1]}"]
        if self._change_max is None:
            return []
        before, after = (copy_tree(self._component, each[self._component]) for each in (targets, trial))
        change = largest_difference(self._component, before, after)
        if change > self._change_max:
            return [f"{self._count} trial steps move {self._component} by {change:.3g}, at most {self._change_max:g}"]
        return []


def run_checks(targets: Targets, checks: Iterable[Check]) -> list[str]:
    """All problems: those of the checks, and of every `Reference` among the targets."""
    references = [problem for live in targets.values() if isinstance(live, Reference) for problem in live.problems()]
    return [*(problem for check in checks for problem in check(targets)), *references]
