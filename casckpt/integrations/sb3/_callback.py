"""The callback that commits between two rollouts, and `resume`, which puts a model back to where one of them was taken.

`learn()` alternates `collect_rollouts()` and `train()`. Between `on_step` and the end of a step the counters are ahead
of the buffer by one transition, and between `on_rollout_end` and the end of `train()` the buffer is ahead of the
weights. The one point where everything belongs together is after `train()`, and the first hook after it is the next
`on_rollout_start`; after the last `train()` it is `on_training_end`. These two are the boundaries.

By `on_rollout_start` a little of the new rollout has happened: exploration matrices are drawn, the generators moved. So
a snapshot taken there is put back there: `resume` restores everything, and the *late* parts and the random streams
once more at the first `on_rollout_start`. A snapshot of `on_training_end` is put back at `on_training_start`.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import safe_mean

from casckpt.engine.engine import CheckpointEngine
from casckpt.errors import InvalidInputError, StoreWarning, UnsupportedStateError
from casckpt.integrations.sb3._components import NECESSITY, components, replaceable
from casckpt.integrations.sb3._siblings import Siblings
from casckpt.integrations.sb3._sinks import EngineSink, StoreSink
from casckpt.store.store import Store
from casckpt.store.values import RestoreReport

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm

_ROLLOUT_START, _TRAINING_END = "rollout_start", "training_end"
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Resumption:
    """Where a training goes on, as `learn()` wants to be told.

    Attributes:
        report: what was restored; prints as one screen.
        remaining: environment steps up to the target, counted over all environments: `learn()`'s `total_timesteps`.
        is_fresh: the run is new and nothing was restored: `learn()`'s `reset_num_timesteps`.
    """

    report: RestoreReport
    remaining: int

    @property
    def is_fresh(self) -> bool:
        return self.report.is_fresh


class CheckpointCallback(BaseCallback):
    """Commits a training between its rollouts.

    Args:
        store: a store, open for writing, or a `CheckpointEngine` on one; the caller closes it after `learn()`. An
            engine saves each component as its config says under the component's name, in the mode that it has.
        every_steps: environment steps, counted over all environments: at every multiple of it a commit is due, and is
            made at the next boundary. With rollouts longer than this, every update is committed. The end of the
            training always is. With an engine: for components that its config does not name.
        async_mode: of commits to a store: go on training after a copy in memory (the default). A failed commit is
            raised at the next one, or at the end.
        replay_trust, extra: see `components`.
        labels: go into every snapshot.
        strict: refuse to train with state that cannot be captured, and to go on from a snapshot that lacks some.
            Without it, a warning, and each snapshot says what it lacks.
        verbose: as for every callback.

    A snapshot carries the mean episode reward and length, and the last evaluation of an `EvalCallback`, as metrics, and
    the algorithm's plain arguments as config.
    """

    def __init__(
        self,
        store: Store | CheckpointEngine,
        *,
        every_steps: int | None = None,
        async_mode: bool | None = None,
        replay_trust: str = "counter",
        extra: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        strict: bool = True,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        kind: Any = EngineSink if isinstance(store, CheckpointEngine) else StoreSink
        self._sink: StoreSink | EngineSink = kind(
            store, every_steps=every_steps, async_mode=async_mode, necessity=NECESSITY
        )
        self._options: dict[str, Any] = {"replay_trust": replay_trust, "extra": extra}
        self._labels = dict(labels or {})
        self._strict = strict
        self._state: dict[str, Any] = {}
        self._bound: dict[str, Any] = {}  # what the components were made of
        self._siblings = Siblings(self)
        self._saved_step: int | None = None
        self._expected: tuple[int, int] | None = None  # step and total at which learn() must begin after a resume
        self._settle_at = ""  # the boundary at which the late parts go back
        self._rng_restored: dict[str, Any] = {}
        self._has_rollout = False  # collected and not yet followed by another one

    # --- what a training calls ---

    def _init_callback(self) -> None:
        replaced = self._replaced(self.model)
        if self._expected is not None and replaced:
            raise InvalidInputError(
                f"the model was given another {', '.join(replaced)} after resume(): what was restored is not there any "
                "more. Give it before `resume`.",
                replaced=replaced,
            )
        self._bind(self.model)

    def _bind(self, model: BaseAlgorithm) -> None:
        """Make components of a model, or of what it was given since: a commit stores what is trained, and no other."""
        replaced = self._replaced(model)
        if not replaced:
            return
        is_same = bool(self._state) and self._state["progress"].model is model
        kept = {name: part for name, part in self._state.items() if is_same and name not in replaced}
        self._state = {**components(model, **self._options), "callbacks": self._siblings, **kept}
        self._bound = replaceable(model)
        self._sink.bind(self._state)

    def _replaced(self, model: BaseAlgorithm) -> list[str]:
        """Which components refer to other objects than this model's; all of them for another model."""
        if not self._state or self._state["progress"].model is not model:
            return ["model"]
        now = replaceable(model)
        return sorted(name for name in {*now, *self._bound} if now.get(name) is not self._bound.get(name))

    def _on_training_start(self) -> None:
        self._check_start()
        self._siblings.attach(self.locals["callback"])
        self._state["progress"].watch()
        if self._settle_at == _TRAINING_END:
            self._settle()
        self._look_for_gaps()

    def _on_rollout_start(self) -> None:
        self._has_rollout = False
        if self._settle_at == _ROLLOUT_START:
            self._settle()
        elif self.model.num_timesteps > (self._saved_step or 0):
            self._offer()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self._has_rollout = True

    def _on_training_end(self) -> None:
        """A training that a callback ended within a rollout is between no two updates: its last commit stands."""
        step = self.model.num_timesteps
        if not self._has_rollout or step == self._saved_step:
            self._sink.finish(None, **self._about())
            return
        self._bind(self.model)
        self._state["progress"].boundary = _TRAINING_END
        self._sink.finish(step, **self._about())
        self._saved_step = step

    # --- saving ---

    def _offer(self) -> None:
        self._bind(self.model)
        step = self.model.num_timesteps
        self._state["progress"].boundary = _ROLLOUT_START
        if self._sink.offer(step, self._saved_step or 0, **self._about()):
            self._saved_step = step

    def _about(self) -> dict[str, Any]:
        return {"metrics": self._metrics(), "labels": self._labels, "config": describe_arguments(self.model)}

    def _metrics(self) -> dict[str, float]:
        infos = [info for info in self.model.ep_info_buffer or () if "r" in info]
        found = {}
        if infos:
            found["ep_rew_mean"] = float(safe_mean([info["r"] for info in infos]))
            found["ep_len_mean"] = float(safe_mean([info["l"] for info in infos]))
        evaluation = self._siblings.evaluation()
        if evaluation is not None and math.isfinite(evaluation.last_mean_reward):
            found["eval_mean_reward"] = float(evaluation.last_mean_reward)
        return found

    def _look_for_gaps(self) -> None:
        """What the environments hold that cannot be captured is known before the first step is trained."""
        gaps: dict[str, str] = {}
        for name in ("env", "callbacks"):
            part = self._state[name]
            part.state_dict()
            gaps |= {f"{name}/{path}": reason for path, reason in part.left_out.items()}
        if not gaps:
            return
        listed = "; ".join(f"{path}: {reason}" for path, reason in gaps.items())
        if self._strict:
            path = next(iter(gaps))
            raise UnsupportedStateError(
                f"{len(gaps)} parts of the training cannot be captured: {listed}. Change them, or accept with "
                "strict=False that a resumed training differs.",
                path=path,
                type_name=type(self._state[path.partition("/")[0]]).__name__,
            )
        warnings.warn(f"snapshots of this training lack {listed}", StoreWarning, stacklevel=2)

    # --- resuming ---

    def _resume(
        self, model: BaseAlgorithm, target_total: int, ref: Any, branch: str | None, reseed: int | None
    ) -> Resumption:
        self._bind(model)
        report = self._sink.resume(ref, branch)
        if report.is_fresh:
            return Resumption(report, target_total)
        self._accept_gaps(model)
        if reseed is not None:
            self._labels |= self._state["rng"].reseed(reseed)
        self._rng_restored = self._state["rng"].state_dict()
        self._settle_at = self._state["progress"].boundary
        self._saved_step = model.num_timesteps
        remaining = max(0, target_total - model.num_timesteps)
        self._expected = (model.num_timesteps, model.num_timesteps + remaining)
        return Resumption(report, remaining)

    def _accept_gaps(self, model: BaseAlgorithm) -> None:
        """What a snapshot lacks of its environments is accepted with `strict=False`; those in workers begin anew."""
        env = self._state["env"]
        if not env.lacking:
            return
        listed = "; ".join(env.lacking)
        if self._strict:
            raise InvalidInputError(
                f"the environments of the snapshot were captured without {listed}. A training that goes on from it "
                "differs: accept that with CheckpointCallback(..., strict=False), or begin another run.",
                paths=list(env.lacking),
            )
        if env.needs_reset:
            model._last_obs = None  # so that learn() resets them
        begin = ", and begin new episodes" if env.needs_reset else ""
        warnings.warn(f"the environments go on without {listed}{begin}", StoreWarning, stacklevel=4)

    def _settle(self) -> None:
        """Put back what `learn()` touched since `resume`."""
        for part in self._state.values():
            if hasattr(part, "settle"):
                part.settle()
        self._state["rng"].load_state_dict(self._rng_restored)
        self._rng_restored, self._settle_at = {}, ""

    def _check_start(self) -> None:
        """learn() must go on from where the store stands, and nowhere else."""
        model = self.model
        if self._expected is not None:
            found, expected, self._expected = (model.num_timesteps, model._total_timesteps), self._expected, None
            if found != expected:
                raise InvalidInputError(
                    f"resume() put the model at step {expected[0]} of {expected[1]}, and learn() started at step "
                    f"{found[0]} of {found[1]}. Resume again, and call `model.learn(start.remaining, "
                    "reset_num_timesteps=start.is_fresh, callback=callback)`."
                )
        store = self._sink.store
        if store.step is not None and store.step != self._saved_step:
            raise InvalidInputError(
                f"run {store.run!r} of {store.path} stands at step {store.step}, and this training does not continue "
                "it. Call `resume(model, callback, target_total)` before learn(), or open the store with another run=."
            )


def resume(
    model: BaseAlgorithm,
    callback: CheckpointCallback,
    target_total: int,
    *,
    ref: Any = "latest",
    branch: str | None = None,
    reseed: int | None = None,
) -> Resumption:
    """Put a model back to a snapshot in place, or find that the run is new. Call it directly before `learn()`.

    Args:
        model: constructed as when the snapshot was taken, with its environment; nothing needs to be reset.
        callback: the one that `learn()` will be given.
        target_total: environment steps of the whole training, from its first one. Schedules run over these: with
            another number than before they continue on another curve.
        ref: see `Store.snapshot`. An earlier one than the newest opens a branch with the next commit.
        branch: its name.
        reseed: leave the recorded streams of python, numpy, torch and the action space for this seed; recorded as a
            label of later snapshots. Generators inside running environments go on.

    Returns:
        What to give to `learn()`:
        `model.learn(start.remaining, reset_num_timesteps=start.is_fresh, callback=callback)`.

    Raises:
        MismatchError: the model differs from the stored one in names, shapes or wrappers; nothing was touched as far
            as arrays and networks go.
        InvalidInputError: the snapshot lacks something of its environments, and the callback is strict.
        Otherwise as `Store.resume_into`.
    """
    return callback._resume(model, target_total, ref, branch, reseed)


def describe_arguments(model: BaseAlgorithm) -> dict[str, Any]:
    """The plain arguments that an algorithm was made with, as the config of a snapshot.

    Callables (schedules) are named by their type, since their values are no plain data.
    """
    config: dict[str, Any] = {"algorithm": type(model).__name__, "policy": type(model.policy).__name__}
    config |= {"n_envs": model.n_envs, "total_timesteps": model._total_timesteps}
    for name in inspect.signature(type(model).__init__).parameters:
        value = getattr(model, name, None)
        if name in ("self", "policy", "env", "verbose", "device", "tensorboard_log") or value is None:
            continue
        if isinstance(value, _PLAIN):
            config[name] = value
        elif callable(value):
            config[name] = type(value).__name__
    return config
