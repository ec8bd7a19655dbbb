"""What the other callbacks of a training remember: how often they were called, the best evaluation, its records.

They are found through the list that was given to `learn()`, at its start; a resume happens before that. So this part
is late: what was restored waits until `attach`.

A callback of a user's own takes part by having `state_dict()` and `load_state_dict()`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from stable_baselines3.common import callbacks as sb3
from stable_baselines3.common.callbacks import BaseCallback

from casckpt.errors import StoreWarning
from casckpt.integrations.sb3._attributes import copied
from casckpt.integrations.sb3._environments import VecEnvState

_REMEMBERED: dict[type[BaseCallback], tuple[str, ...]] = {
    sb3.EvalCallback: (
        *("best_mean_reward", "last_mean_reward", "_is_success_buffer"),
        *("evaluations_results", "evaluations_timesteps", "evaluations_length", "evaluations_successes"),
    ),
    sb3.EveryNTimesteps: ("last_time_trigger",),
    sb3.StopTrainingOnMaxEpisodes: ("n_episodes",),
    sb3.StopTrainingOnNoModelImprovement: ("last_best_mean_reward", "no_improvement_evals"),
}


class Siblings:
    """Late: a Checkpointable of all callbacks beside `own`.

    Attributes:
        left_out: path → reason of what could not be captured at the last `state_dict`.
    """

    def __init__(self, own: BaseCallback) -> None:
        self._own = own
        self._root: BaseCallback | None = None
        self._restored: dict[str, Any] | None = None
        self.left_out: dict[str, str] = {}

    def attach(self, root: BaseCallback) -> None:
        """The callback that `learn()` was given."""
        self._root = root

    def evaluation(self) -> sb3.EvalCallback | None:
        """The first `EvalCallback`."""
        return next((each for _, each in self._callbacks() if isinstance(each, sb3.EvalCallback)), None)

    def state_dict(self) -> dict[str, Any]:
        if self._restored is not None:
            return self._restored
        self.left_out = {}
        return {name: self._take(name, callback) for name, callback in self._callbacks()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state

    def settle(self) -> None:
        if self._restored is None:
            return
        there = dict(self._callbacks())
        gone = sorted(set(self._restored) - set(there))
        if gone:
            warnings.warn(
                f"the snapshot has the state of callbacks {gone}, learn() has {sorted(there)}: it is not restored.",
                StoreWarning,
                stacklevel=2,
            )
        for name, state in self._restored.items():
            if name in there:
                _put(there[name], state)
        self._restored = None

    def _callbacks(self) -> Iterator[tuple[str, BaseCallback]]:
        counts: dict[str, int] = {}
        for callback in _tree(self._root):
            kind = type(callback).__name__
            counts[kind] = counts.get(kind, 0) + 1
            if callback is not self._own:
                yield f"{kind}-{counts[kind]}", callback

    def _take(self, name: str, callback: BaseCallback) -> dict[str, Any]:
        state: dict[str, Any] = {"n_calls": callback.n_calls}
        if callable(getattr(callback, "state_dict", None)):
            return {**state, "own": copied(callback.state_dict())}  # type: ignore[attr-defined]
        state["remembered"] = {each: copied(getattr(callback, each)) for each in _names(callback)}
        if isinstance(callback, sb3.EvalCallback):
            evaluation = VecEnvState(callback.eval_env)
            state["eval_env"] = evaluation.state_dict()
            self.left_out |= {f"{name}/eval_env/{path}": why for path, why in evaluation.left_out.items()}
        return state


def _tree(callback: Any) -> Iterator[BaseCallback]:
    """A callback and those that it calls, depth first; lists and conversions of functions are not counted."""
    if callback is None or isinstance(callback, sb3.ConvertCallback):
        return
    if isinstance(callback, sb3.CallbackList):
        for each in callback.callbacks:
            yield from _tree(each)
        return
    yield callback
    yield from _tree(getattr(callback, "callback", None))
    yield from _tree(getattr(callback, "callback_on_new_best", None))


def _names(callback: BaseCallback) -> list[str]:
    return [name for kind, names in _REMEMBERED.items() if isinstance(callback, kind) for name in names]


def _put(callback: BaseCallback, state: dict[str, Any]) -> None:
    callback.n_calls = state["n_calls"]
    if "own" in state:
        callback.load_state_dict(state["own"])  # type: ignore[attr-defined]
        return
    for name, value in state["remembered"].items():
        setattr(callback, name, copied(value))
    if "eval_env" in state:
        VecEnvState(callback.eval_env).load_state_dict(state["eval_env"])  # type: ignore[attr-defined]
