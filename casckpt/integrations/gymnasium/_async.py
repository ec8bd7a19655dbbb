"""Gymnasium's AsyncVectorEnv: environments in other processes, reached through its own `call` and `set_attr`.

The workers run Gymnasium's loop, which cannot be asked for an environment's state. So each environment is made
`Capturable` inside its worker: an outermost wrapper that answers `capture_state` and takes a state.

The loop itself remembers whether the next step must reset, and what it observed last. Both are put right from outside:
while the wrappers *drain*, a step and a reset of the whole vector environment run through the loops and touch nothing,
which leaves every loop with the restored observation and no reset due; a reset that was due at the capture is then
done by the wrapper. Afterwards every state is read back and compared.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.utils import create_empty_array

from casckpt.errors import CasckptError, InvalidInputError, MismatchError, UnsupportedStateError
from casckpt.integrations.gymnasium.adapters import register_env_adapter
from casckpt.integrations.gymnasium.nodes import Finding
from casckpt.integrations.gymnasium.parts import Parts, parts_of, tree_of
from casckpt.integrations.gymnasium.put import Put, same
from casckpt.integrations.gymnasium.walk import EnvWalk


def register() -> None:
    """Make the adapter known."""
    register_env_adapter(AsyncVectorEnv, _capture, _restore, check=_check, find=_find, gives_copies=True)


class Capturable(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The outermost wrapper of an environment that lives in a worker process.

    Give its class to the workers: `AsyncVectorEnv([capturable(make) for make in makers])`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.pending_state: Parts | None = None
        self._observation: Any = None
        self._has_ended = False  # the last step ended the episode
        self._is_reset_due = False  # by this wrapper, since the worker's loop does not know
        self._is_draining = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; while draining, only repeat the observation."""
        if self._is_draining:
            return self._observation, {}
        self._has_ended = self._is_reset_due = False
        self._observation, info = self.env.reset(seed=seed, options=options)
        return self._observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, or reset it where that was due at the capture; while draining, repeat what was seen."""
        if self._is_draining:
            return self._observation, 0.0, False, False, {}
        if self._is_reset_due:
            observation, info = self.reset()
            return observation, 0.0, False, False, info
        self._observation, reward, terminated, truncated, info = self.env.step(action)
        self._has_ended = bool(terminated or truncated)
        return self._observation, reward, terminated, truncated, info

    def capture_state(self) -> tuple[Parts | None, str]:
        """The state of the environment inside, or why there is none; nothing raised here could reach the caller."""
        try:
            walk = EnvWalk()
            tree = {"env": walk.node(self.env, "env"), "not_captured": list(map(str, walk.missing))}
            return parts_of({**tree, "observation": self._observation, "has_ended": self._has_ended}), ""
        except CasckptError as error:
            return None, str(error)

    def begin_restore(self) -> str:
        """Compare `pending_state` with the environment and start to drain; what does not fit."""
        assert self.pending_state is not None
        self._stored = tree_of(self.pending_state)
        putting = Put()
        putting.compare(self._stored["env"], self.env, "env")
        if not putting.differences:
            self._observation, self._is_draining = self._stored["observation"], True
        return "; ".join(map(str, putting.differences))

    def finish_restore(self, resets_at_next_step: bool) -> None:
        """Put the state in place and stop draining."""
        Put().put(self._stored["env"], self.env, "env")
        self._has_ended = self._stored["has_ended"]
        self._is_reset_due = self._has_ended and resets_at_next_step
        self._is_draining, self.pending_state, self._stored = False, None, None

    def abandon_restore(self) -> None:
        """Forget `pending_state`; the environment was not touched."""
        self._is_draining, self.pending_state, self._stored = False, None, None


def _workers(venv: Any) -> list[Any]:
    """The state of every worker.

    Raises:
        UnsupportedStateError: an environment is not Capturable, or cannot be captured.
        InvalidInputError: a step or reset is under way.
    """
    if venv._state.value != "default":
        raise InvalidInputError(
            f"AsyncVectorEnv: a {venv._state.value} is under way. Wait for it (`{venv._state.value}_wait()`) first."
        )
    names = venv.call("__str__")
    if not all(name.startswith("<Capturable<") for name in names):
        raise UnsupportedStateError(
            f"AsyncVectorEnv: the environments in its workers ({names[0]}) cannot be asked for their state. Make them "
            "with AsyncVectorEnv([capturable(make) for make in makers])",
            path="env",
        )
    results = venv.call("capture_state")
    failures = [f"worker {number}: {reason}" for number, (_, reason) in enumerate(results) if reason]
    if failures:
        raise UnsupportedStateError(f"AsyncVectorEnv: {'; '.join(failures)}", path="env")
    return [tree_of(parts) for parts, _ in results]


def _capture(venv: Any) -> dict[str, Any]:
    return {"workers": _workers(venv)}


def _find(state: Any, path: str) -> list[Finding]:
    return [
        Finding(f"{path}.envs[{number}]", text)
        for number, worker in enumerate(state["workers"])
        for text in worker["not_captured"]
    ]


def _check(venv: Any, state: Any) -> None:
    found = len(_workers(venv))
    if len(state["workers"]) != found:
        raise MismatchError(f"AsyncVectorEnv: expected {len(state['workers'])} environments, found {found}")


def _restore(venv: Any, state: Any) -> None:
    venv.set_attr("pending_state", [parts_of(worker) for worker in state["workers"]])
    differences = [f"worker {number}: {text}" for number, text in enumerate(venv.call("begin_restore")) if text]
    if differences:
        venv.call("abandon_restore")
        raise MismatchError(f"AsyncVectorEnv: {'; '.join(differences)}. Nothing was touched.", differences=differences)
    venv.step(create_empty_array(venv.single_action_space, venv.num_envs, np.zeros))
    venv.reset()
    venv.call("finish_restore", venv.autoreset_mode == AutoresetMode.NEXT_STEP)
    for number, (stored, found) in enumerate(zip(state["workers"], _workers(venv), strict=True)):
        if not same(stored, found):
            raise MismatchError(f"AsyncVectorEnv: worker {number} holds another state than the one it was given")
