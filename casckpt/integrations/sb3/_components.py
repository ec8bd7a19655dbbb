"""A model as components: a mapping of name to live object, which a store commits from and restores into.

| component | what | restored |
|---|---|---|
| `policy` | all networks, targets included | in place |
| `policy.optimizer`, `actor.optimizer`, … | under the names of `model.get_parameters()` | in place |
| `log_ent_coef` | the entropy coefficient, where it is learned | in place |
| `replay_buffer` | a ring: rows, where the next one goes, and what a subclass keeps beside them | in place |
| `progress`, `observation` | counters and episode statistics; what the next rollout starts from | |
| `normalizer`, `env` | `VecNormalize` with its returns; the other wrappers and the environments | |
| `action_noise`, `exploration`, `log`, `clock`, `callbacks` | see `_parts` and `_siblings` | late |
| `rng` | every global random stream, and the action space's | last |

The rollout buffer of an on-policy algorithm is no component: at the boundary where snapshots are taken its rows are
used up, and the next rollout begins by emptying it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stable_baselines3.common.save_util import recursive_getattr

from casckpt.engine.strategy import check_choice
from casckpt.errors import InvalidInputError
from casckpt.integrations.replay import rings
from casckpt.integrations.sb3._environments import NormalizerState, VecEnvState
from casckpt.integrations.sb3._parts import Clock, Exploration, Noise, Observation, Pending, Progress
from casckpt.replay.ring import TRUSTS
from casckpt.state.rng import RngState

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm

NECESSITY = {"clock": "droppable"}  # its loss changes no number that training uses


def components(
    model: BaseAlgorithm, *, replay_trust: str = "counter", extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything that a model needs to go on, by component name.

    Args:
        model: any algorithm of Stable-Baselines3 or sb3-contrib with an environment.
        replay_trust: which rows of the replay buffer a commit reads: "counter", those that `add` wrote since the last
            one; or "digest", all, for code that writes into the buffer's arrays itself.
        extra: further components of your own: objects with `state_dict()` and `load_state_dict()`, or plain trees.

    Costs nothing until it is committed; weights, optimizers and replay rows are referred to, not copied.

    Raises:
        InvalidInputError: the model has no environment, `extra` takes a name that is in use, or there is no such trust.
        UnsupportedStateError: a replay buffer keeps rows as Python objects.
    """
    check_choice("replay_trust", replay_trust, TRUSTS)
    if model.env is None:
        raise InvalidInputError("the model has no environment: a training cannot go on. Call `model.set_env(env)`.")
    found = _networks(model)
    buffer = getattr(model, "replay_buffer", None)
    if buffer is not None:
        found |= rings(buffer, name="replay_buffer", trust=replay_trust)
    found["progress"], found["observation"] = Progress(model), Observation(model)
    normalizer = model.get_vec_normalize_env()
    if normalizer is not None:
        found["normalizer"] = NormalizerState(normalizer)
    found["env"] = VecEnvState(model.env, without=() if normalizer is None else (normalizer,))
    if model.action_noise is not None:
        found["action_noise"] = Noise(model)
    if model.use_sde:
        found["exploration"] = Exploration(model)
    found["log"], found["clock"] = Pending(model), Clock(model)
    found["rng"] = RngState(action_space=model.action_space)
    taken = sorted(set(found) & set(extra or {}))
    if taken:
        raise InvalidInputError(f"extra={taken}: the model has components of these names. Choose others.", names=taken)
    return {**found, **(extra or {})}


def replaceable(model: BaseAlgorithm) -> dict[str, Any]:
    """What a component refers to, by its name, where a model can be given another object: only the others ask it."""
    found = {**_networks(model), "replay_buffer": getattr(model, "replay_buffer", None)}
    return {**found, "normalizer": model.get_vec_normalize_env(), "env": model.env}


def _networks(model: BaseAlgorithm) -> dict[str, Any]:
    """Modules, optimizers and single tensors, under the names of SB3's own parameters."""
    modules, tensors = model._get_torch_save_params()
    found = {}
    for name in [*modules, *tensors]:
        value = recursive_getattr(model, name)
        found[name] = getattr(value, "_orig_mod", value)  # of a compiled module
    return found
