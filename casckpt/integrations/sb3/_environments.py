"""The state of a `VecEnv`: its chain of wrappers from the outside in, and the environments at its end.

Each wrapper contributes its plain attributes, with `VecNormalize` (statistics *and* the returns under way) and
`VecFrameStack` opened up. The environments themselves are captured where they live: in this process directly, in
worker processes through `StatefulEnv`, a wrapper that they were built with. A `VecEnv` that simulates all of them in
arrays of its own is captured as one object, wholly or not at all. What is not captured is a reason by path in
`left_out`, never silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecEnvWrapper, VecNormalize
from stable_baselines3.common.vec_env.stacked_observations import StackedObservations

from casckpt.errors import CasckptError, MismatchError, UnsupportedStateError
from casckpt.integrations.gymnasium import EnvState, register_env_adapter
from casckpt.integrations.gymnasium.histories import column, listed
from casckpt.integrations.gymnasium.nodes import Finding
from casckpt.integrations.gymnasium.parts import Parts, parts_of, tree_of
from casckpt.integrations.sb3._attributes import copied, put_attributes, take_attributes
from casckpt.state.rng import kind_of

# Constructed with the wrapper and never changed, or derived from what is captured, or a time of day.
_NO_STATE = {
    *("venv", "num_envs", "observation_space", "action_space", "class_attributes", "render_mode", "metadata", "spec"),
    *("obs_spaces", "waiting", "t_start", "results_writer", "info_keywords"),
}
_PENDING_RESET = ("_seeds", "_options")  # of the innermost VecEnv: used up by the next reset
_SHOWN_MAX = 8  # reasons in a message
_WRAP = (
    "Build each with `casckpt.integrations.sb3.StatefulEnv` around it (make_vec_env(..., wrapper_class=StatefulEnv))"
)

_MONITORED = ("rewards", "needs_reset", "episode_returns", "episode_lengths", "total_steps", "current_reset_info")
_LISTED = ("rewards", "episode_returns", "episode_lengths")  # which grow with the run
_OF_MONITOR = frozenset(vars(Monitor(gymnasium.Env())))  # what every one has


def _monitor_state(monitor: Monitor[Any, Any]) -> dict[str, Any]:
    """What a `Monitor` counts, and what a subclass of it keeps beside.

    When episodes ended is left to the clock, its file to whoever opened it, generators and spaces to `EnvState`.
    """
    state = {name: copied(getattr(monitor, name)) for name in _MONITORED if name not in _LISTED}
    state |= {name: column(getattr(monitor, name)) for name in _LISTED}
    left_out: dict[str, str] = {}
    drawing = {name for name, value in vars(monitor).items() if isinstance(value, gymnasium.Space) or kind_of(value)}
    own = take_attributes(monitor, _OF_MONITOR | drawing, left_out)
    return {**state, **({"own": own, "left_out": left_out} if own or left_out else {})}


def _put_monitor(monitor: Monitor[Any, Any], state: dict[str, Any]) -> None:
    for name in _MONITORED:
        setattr(monitor, name, listed(state[name]) if name in _LISTED else copied(state[name]))
    put_attributes(monitor, state.get("own", {}))
    monitor.episode_times = [math.nan] * len(monitor.episode_returns)


def _monitor_findings(state: dict[str, Any], path: str) -> list[Finding]:
    return [Finding(f"{path}.{name}", reason) for name, reason in state.get("left_out", {}).items()]


register_env_adapter(Monitor, _monitor_state, _put_monitor, find=_monitor_findings, gives_copies=True)


class VecEnvState:
    """A Checkpointable of a `VecEnv` in the middle of its episodes.

    Args:
        venv: wrapped or not. Restored into one that is built the same way; it need not have been reset.
        without: wrappers of the chain that are captured elsewhere.

    Attributes:
        left_out: path → reason of what could not be captured at the last `state_dict`.
        lacking: what the state that was restored last lacks, as it says.
        needs_reset: whether environments are missing in it altogether: they are where they were, perhaps never reset.
    """

    def __init__(self, venv: VecEnv, without: tuple[VecEnv, ...] = ()) -> None:
        self._venv = venv
        self._without = without
        self.left_out: dict[str, str] = {}
        self.lacking: list[str] = []
        self.needs_reset = False

    def state_dict(self) -> dict[str, Any]:
        """Costs a copy of every attribute; in worker processes, a round trip."""
        self.left_out = {}
        layers = {}
        for name, layer in self._layers():
            missing: dict[str, str] = {}
            layers[name] = _layer_state(layer, missing)
            self.left_out |= {f"{name}/{attribute}": reason for attribute, reason in missing.items()}
        return {
            "layers": layers,
            "pending_reset": {name: copied(getattr(self._venv.unwrapped, name)) for name in _PENDING_RESET},
            "environments": self._environments(),
            "not_captured": [f"{path}: {reason}" for path, reason in self.left_out.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            MismatchError: the chain has other wrappers, or another number of environments; nothing was changed.
        """
        layers = dict(self._layers())
        found = [*layers, f"{self._venv.num_envs} environments"]
        states = state["environments"]
        expected = [*state["layers"], f"{states['count'] if isinstance(states, dict) else len(states)} environments"]
        if found != expected:
            raise MismatchError(
                f"the environments are wrapped otherwise than when they were captured: expected {expected}, found "
                f"{found}. Build them as before, or restore without the component that holds them.",
                differences=[("environments", str(expected), str(found))],
            )
        for name, layer in layers.items():
            _put_layer(layer, state["layers"][name])
        for name, value in state["pending_reset"].items():
            setattr(self._venv.unwrapped, name, copied(value))
        if isinstance(states, dict):
            self._put_vectorised(states)
        else:
            self._put_environments(states)
        self.lacking = list(state["not_captured"])
        self.needs_reset = None in (states.values() if isinstance(states, dict) else states)

    def _layers(self) -> Iterator[tuple[str, VecEnvWrapper]]:
        layer, number = self._venv, 0
        while isinstance(layer, VecEnvWrapper):
            if not any(layer is other for other in self._without):
                yield f"{number}-{type(layer).__name__}", layer
            layer, number = layer.venv, number + 1

    def _environments(self) -> list[Any] | dict[str, Any]:
        envs = getattr(self._venv.unwrapped, "envs", None)
        if envs is not None:
            return [self._noted(i, EnvState(env, strict=False).state_dict()) for i, env in enumerate(envs)]
        if not self._has_stateful_workers():
            if not isinstance(self._venv.unwrapped, SubprocVecEnv):
                return self._vectorised(self._venv.unwrapped)
            self.left_out["environments"] = f"they run in worker processes and cannot be reached. {_WRAP}"
            return [None] * self._venv.num_envs
        answers = self._venv.env_method("casckpt_state")
        failures = [f"environment {number}: {reason}" for number, (_, reason) in enumerate(answers) if reason]
        if failures:
            raise UnsupportedStateError("; ".join(failures), path="env/environments")
        return [self._noted(number, tree_of(parts)) for number, (parts, _) in enumerate(answers)]

    def _has_stateful_workers(self) -> bool:
        try:
            return all(self._venv.env_is_wrapped(StatefulEnv))
        except (NotImplementedError, AttributeError):  # of a class that has no environments to ask
            return False

    def _vectorised(self, venv: VecEnv) -> dict[str, Any]:
        """All environments as one object. A part of a simulation is no state of it: then nothing is stored of it."""
        state = EnvState(venv, strict=False).state_dict()
        gaps = state["not_captured"]
        if gaps:
            self.left_out["environments"] = (
                f"{type(venv).__name__} simulates all of them itself, and holds what cannot be captured: "
                f"{'; '.join(gaps[:_SHOWN_MAX])}. Its wrappers are captured; of itself nothing is. Give the class "
                "state_dict() and load_state_dict(), or an adapter (casckpt.integrations.gymnasium."
                f"register_env_adapter). If it has workers that run Gymnasium environments: {_WRAP}"
            )
        return {"count": venv.num_envs, "vectorised": None if gaps else state}

    def _put_vectorised(self, states: dict[str, Any]) -> None:
        if states["vectorised"] is not None:
            EnvState(self._venv.unwrapped, strict=False).load_state_dict(states["vectorised"])

    def _noted(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        for line in state["not_captured"]:
            path, _, reason = line.partition(": ")
            self.left_out[f"environments/{number}/{path}"] = reason
        return state

    def _put_environments(self, states: list[Any]) -> None:
        envs = getattr(self._venv.unwrapped, "envs", None)
        failures = []
        for number, state in enumerate(states):
            if state is not None and envs is not None:
                EnvState(envs[number], strict=False).load_state_dict(state)
            elif state is not None:
                (reason,) = self._venv.env_method("load_casckpt_state", parts_of(state), indices=number)
                failures += [f"environment {number}: {reason}"] if reason else []
        if failures:
            raise MismatchError(f"in worker processes: {'; '.join(failures)}", differences=failures)


class NormalizerState:
    """A Checkpointable of a `VecNormalize`: statistics of observations and returns, and the returns under way."""

    def __init__(self, normalizer: VecNormalize) -> None:
        self._normalizer = normalizer

    def state_dict(self) -> dict[str, Any]:
        return _layer_state(self._normalizer, {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _put_layer(self._normalizer, state)


class StatefulEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The outermost wrapper of an environment that runs in a worker process: it hands its state over, and takes it."""

    def casckpt_state(self) -> tuple[Parts | None, str]:
        """What `EnvState` captures of the environment inside, or why nothing; an error here would end the worker."""
        try:
            return parts_of(EnvState(self.env, strict=False).state_dict()), ""
        except CasckptError as error:
            return None, error.message

    def load_casckpt_state(self, parts: Parts) -> str:
        """Continue where `casckpt_state` was taken; returns why that cannot be."""
        try:
            EnvState(self.env, strict=False).load_state_dict(tree_of(parts))
        except CasckptError as error:
            return error.message
        return ""


# --- wrappers of vector environments ---


def _layer_state(layer: VecEnvWrapper, left_out: dict[str, str]) -> dict[str, Any]:
    opened = {name: value for name, value in vars(layer).items() if _is_opened(value)}
    taken = take_attributes(layer, {*_NO_STATE, *_settings(layer), *opened}, left_out)
    return {"attributes": taken, "opened": {name: _open(value) for name, value in opened.items()}}


def _put_layer(layer: VecEnvWrapper, state: dict[str, Any]) -> None:
    put_attributes(layer, state["attributes"])
    for name, opened in state["opened"].items():
        _put_opened(getattr(layer, name), opened)


def _settings(layer: VecEnvWrapper) -> tuple[str, ...]:
    """What a user chooses, which a restore must not take back."""
    if not isinstance(layer, VecNormalize):
        return ()
    return ("training", "norm_obs", "norm_reward", "norm_obs_keys", "clip_obs", "clip_reward", "gamma", "epsilon")


def _is_opened(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) and value else [value]
    return all(isinstance(each, (RunningMeanStd, StackedObservations)) for each in values)


def _open(value: Any) -> Any:
    """Statistics and frame stacks as plain trees, at any depth of dictionaries."""
    if isinstance(value, Mapping):
        return {key: _open(each) for key, each in value.items()}
    if isinstance(value, RunningMeanStd):
        return {"mean": copied(value.mean), "var": copied(value.var), "count": value.count}
    inner = getattr(value, "sub_stacked_observations", None)
    return {"stacked": copied(value.stacked_obs)} if inner is None else _open(inner)


def _put_opened(value: Any, state: Any) -> None:
    if isinstance(value, Mapping):
        for key, each in value.items():
            _put_opened(each, state[key])
    elif isinstance(value, RunningMeanStd):
        value.mean, value.var, value.count = copied(state["mean"]), copied(state["var"]), state["count"]
    elif getattr(value, "sub_stacked_observations", None) is not None:
        _put_opened(value.sub_stacked_observations, state)
    else:
        value.stacked_obs = copied(state["stacked"])
