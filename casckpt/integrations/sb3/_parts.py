"""The small parts of a model's state, each a Checkpointable: values go out as copies and come back as copies.

Large state (weights, optimizers, replay rows) is restored in place by the store and is not here.

Two kinds of part:

* a plain one is complete once `load_state_dict` returned;
* a *late* one (`settle`) lives in objects that `learn()` makes anew or touches on its way to the first rollout: the
  action noise is reset, the logger replaced, the exploration matrices drawn. It keeps what was restored and puts it in
  place at the very point of the loop where the snapshot was taken.

Wall-clock times are a part of their own (`Clock`), so that everything else is equal, bit for bit, in two runs that did
the same.
"""

from __future__ import annotations

import abc
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from casckpt.integrations.sb3._attributes import copied, put_attributes, take_attributes

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.noise import ActionNoise

COUNTERS = (  # of all algorithms together; a model has those of its own
    *("num_timesteps", "_total_timesteps", "_current_progress_remaining", "_episode_num", "_n_updates"),
    *("_n_calls", "exploration_rate"),  # DQN, QR-DQN
)
_OF_THE_CLOCK = {"start_time", "_num_timesteps_at_start"}
_SIMPLE = (bool, int, float, str, type(None))


class Progress:
    """Counters, episode statistics, and at which point of the loop the snapshot was taken.

    Besides the counters that are known, every plain attribute of the model that changed since `watch` is one: those of
    a subclass are captured without being named.

    Attributes:
        model: whose progress it is.
        boundary: "rollout_start" or "training_end".
    """

    def __init__(self, model: BaseAlgorithm) -> None:
        self.model = model
        self._names = dict.fromkeys(name for name in COUNTERS if hasattr(model, name))
        self._seen: dict[str, Any] = {}
        self.boundary = ""

    def watch(self) -> None:
        """From now on, plain attributes that change are counters."""
        self._seen = {name: value for name, value in vars(self.model).items() if isinstance(value, _SIMPLE)}

    def state_dict(self) -> dict[str, Any]:
        model = self.model
        for name, value in self._seen.items():
            now = vars(model).get(name, value)
            if isinstance(now, _SIMPLE) and now != value and name not in _OF_THE_CLOCK:
                self._names.setdefault(name)
        infos, successes = model.ep_info_buffer, model.ep_success_buffer
        return {
            "boundary": self.boundary,
            "counters": {name: getattr(model, name) for name in sorted(self._names)},
            "episodes": None if infos is None else [{k: v for k, v in info.items() if k != "t"} for info in infos],
            "successes": None if successes is None else list(successes),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model = self.model
        self.boundary = state["boundary"]
        for name, value in state["counters"].items():
            setattr(model, name, value)
            self._names.setdefault(name)
        window = model._stats_window_size
        for name, values in (("ep_info_buffer", state["episodes"]), ("ep_success_buffer", state["successes"])):
            setattr(model, name, None if values is None else deque(values, maxlen=window))


class Observation:
    """What the next rollout starts from: the last observation, episode starts and recurrent states."""

    _NAMES = ("_last_obs", "_last_original_obs", "_last_episode_starts")

    def __init__(self, model: BaseAlgorithm) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        state = {name.removeprefix("_last_"): copied(getattr(self._model, name)) for name in self._NAMES}
        lstm = getattr(self._model, "_last_lstm_states", None)
        if lstm is not None:
            state["lstm"] = {name: [each.detach().clone() for each in getattr(lstm, name)] for name in ("pi", "vf")}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model: Any = self._model
        for name in self._NAMES:
            setattr(model, name, state[name.removeprefix("_last_")])
        if "lstm" in state:
            pi, vf = (tuple(each.to(model.device) for each in state["lstm"][name]) for name in ("pi", "vf"))
            model._last_lstm_states = type(model._last_lstm_states)(pi, vf)


class Late(abc.ABC):
    """A late part: what was restored is its state until `settle` puts it in place."""

    def __init__(self, model: BaseAlgorithm) -> None:
        self._model = model
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return self._now() if self._restored is None else self._restored

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state

    def settle(self) -> None:
        if self._restored is not None:
            self._put(self._restored)
        self._restored = None

    @abc.abstractmethod
    def _now(self) -> dict[str, Any]:
        """The state of the live objects."""

    @abc.abstractmethod
    def _put(self, state: dict[str, Any]) -> None:
        """Put a state into the live objects."""


class Noise(Late):
    """Late: what an action noise remembers between two calls. `learn()` resets it, and makes one per environment."""

    def _now(self) -> dict[str, Any]:
        return {"noises": [take_attributes(noise) for noise in _noises(self._model.action_noise)]}

    def _put(self, state: dict[str, Any]) -> None:
        for noise, attributes in zip(_noises(self._model.action_noise), state["noises"], strict=True):
            put_attributes(noise, attributes)


def _noises(noise: ActionNoise | None) -> list[Any]:
    return list(getattr(noise, "noises", [noise]))


class Exploration(Late):
    """Late: the matrices of state-dependent exploration (gSDE), which a new rollout draws before it calls back."""

    _NAMES = ("exploration_mat", "exploration_matrices")

    def _now(self) -> dict[str, Any]:
        distribution = self._distribution()
        return {name: getattr(distribution, name).detach().clone() for name in self._NAMES}

    def _put(self, state: dict[str, Any]) -> None:
        distribution = self._distribution()
        for name, matrix in state.items():
            setattr(distribution, name, matrix.to(self._model.device))

    def _distribution(self) -> Any:
        policy: Any = self._model.policy
        return getattr(policy, "actor", policy).action_dist


class Pending(Late):
    """Late: numbers and text that were recorded for the log and not written yet, such as the last losses."""

    _NAMES = ("name_to_value", "name_to_count", "name_to_excluded")

    def _now(self) -> dict[str, Any]:
        logger: Any = getattr(self._model, "_logger", None)
        if logger is None:
            return {name: {} for name in self._NAMES}
        kept = [key for key, value in logger.name_to_value.items() if isinstance(value, _SIMPLE) or _is_number(value)]
        return {name: {key: record[key] for key in kept if key in record} for name, record in self._records(logger)}

    def _put(self, state: dict[str, Any]) -> None:
        for name, record in self._records(self._model.logger):
            record.update(state[name])

    def _records(self, logger: Any) -> list[tuple[str, dict[str, Any]]]:
        return [(name, getattr(logger, name)) for name in self._NAMES]


def _is_number(value: Any) -> bool:
    return getattr(value, "shape", None) == () and hasattr(value, "dtype") and not hasattr(value, "grad")


class Clock(Late):
    """Late: seconds trained so far, and when recent episodes ended; `time_elapsed` and `fps` in the log go on."""

    def _now(self) -> dict[str, Any]:
        model = self._model
        elapsed_ns = time.time_ns() - int(model.start_time) if model.start_time else 0
        times = [info.get("t") for info in model.ep_info_buffer or ()]
        return {"elapsed_ns": elapsed_ns, "from_timesteps": model._num_timesteps_at_start, "episodes": times}

    def _put(self, state: dict[str, Any]) -> None:
        model = self._model
        model.start_time = time.time_ns() - state["elapsed_ns"]
        model._num_timesteps_at_start = state["from_timesteps"]
        for info, at in zip(model.ep_info_buffer or (), state["episodes"], strict=True):
            info.update({} if at is None else {"t": at})
