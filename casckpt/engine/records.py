"""Records of a training that must not outlive a time travel: evaluations, the logger's position, the config.

An evaluation belongs to the step whose policy it measured, whenever it ended. As a component, the log of a snapshot
holds what was known at that snapshot, so a restore drops what came later by itself; a log that lives elsewhere (a file,
a dashboard, another process) is cut with `rewind`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from casckpt.digest import digest
from casckpt.errors import InvalidInputError, NotFoundError
from casckpt.store.settle import plain_config


class Evaluation(NamedTuple):
    """One evaluation: of the policy at `step`, known since `known_at`."""

    step: int
    known_at: int
    metrics: dict[str, float]


class EvaluationLog:
    """A Checkpointable list of evaluations, each bound to a step."""

    def __init__(self) -> None:
        self._records: list[Evaluation] = []

    @property
    def records(self) -> list[Evaluation]:
        """All of them, in the order in which they became known."""
        return list(self._records)

    def add(self, step: int, metrics: Mapping[str, float], *, known_at: int | None = None) -> None:
        """Note an evaluation.

        Args:
            step: the step whose policy was evaluated.
            metrics: name → number.
            known_at: the training's step now, when the evaluation ran beside the training; by default `step`.

        Raises:
            InvalidInputError: a step that is no integer from 0 on, or an evaluation that was known before its step.
        """
        known = step if known_at is None else known_at
        if type(step) is not int or type(known) is not int or not 0 <= step <= known:
            raise InvalidInputError(f"evaluation of step {step!r}, known at {known!r}: expected 0 <= step <= known_at")
        self._records.append(Evaluation(step, known, {name: float(value) for name, value in metrics.items()}))

    def rewind(self, step: int) -> list[Evaluation]:
        """Drop what a training that stands at `step` cannot know: evaluations of later steps, or known later.

        Returns:
            What was dropped.
        """
        dropped = [record for record in self._records if record.known_at > step]
        self._records = [record for record in self._records if record.known_at <= step]
        return dropped

    def best(self, metric: str, *, largest: bool = True) -> Evaluation:
        """The evaluation with the best value of a metric, the earliest of equal ones; NaN is never best.

        Raises:
            NotFoundError: no evaluation has the metric.
        """
        found = [record for record in self._records if not math.isnan(record.metrics.get(metric, math.nan))]
        if not found:
            names = sorted({name for record in self._records for name in record.metrics})
            raise NotFoundError(f"no evaluation has a value of {metric!r}; metrics are {', '.join(names) or 'none'}")
        sign = 1.0 if largest else -1.0
        return max(found, key=lambda record: sign * record.metrics[metric])

    def state_dict(self) -> dict[str, Any]:
        """Columns, so that a growing log does not change the structure of its component."""
        names = sorted({name for record in self._records for name in record.metrics})
        return {
            "step": [record.step for record in self._records],
            "known_at": [record.known_at for record in self._records],
            "metrics": {name: [record.metrics.get(name) for record in self._records] for name in names},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The evaluations of the snapshot, and no others."""
        self._records = [
            Evaluation(step, known, {name: row[at] for name, row in state["metrics"].items() if row[at] is not None})
            for at, (step, known) in enumerate(zip(state["step"], state["known_at"], strict=True))
        ]


class LoggerIdentity:
    """Which run of a logger (a dashboard, event files) this training writes to, and how far it has written.

        identity = LoggerIdentity(uuid.uuid4().hex)
        store.resume_into({..., "logger": identity})       # takes the id of the run that goes on
        wandb.init(id=identity.run_id, resume="allow")     # or SummaryWriter(folder, purge_step=identity.next_step)

    Args:
        run_id: for a training that begins; a restore replaces it.
    """

    def __init__(self, run_id: str) -> None:
        if not run_id or not isinstance(run_id, str):
            raise InvalidInputError(f"run_id={run_id!r:.40}: expected a name, not empty")
        self.run_id = run_id
        self.last_step: int | None = None

    @property
    def next_step(self) -> int:
        """The first step that is not in the log; what the log has from here on belongs to a line that was left."""
        return 0 if self.last_step is None else self.last_step + 1

    def note(self, step: int) -> bool:
        """Say that `step` is about to be logged; whether it should be: false for what is in the log already."""
        is_new = step >= self.next_step
        if is_new:
            self.last_step = step
        return is_new

    def state_dict(self) -> dict[str, Any]:
        """The id, and the last step that was logged."""
        return {"run_id": self.run_id, "last_step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write on where that training had written to."""
        self.run_id, self.last_step = state["run_id"], state["last_step"]


def config_digest(config: Any) -> str:
    """The digest of a config, 64 hex digits: equal for equal values, whatever the order of keys.

    Raises:
        InvalidInputError: it is not JSON-like.
    """
    return digest(plain_config(config)).hex()
