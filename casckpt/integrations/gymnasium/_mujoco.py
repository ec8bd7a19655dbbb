"""MuJoCo: the full integration state, what environments read between steps, and the model's numbers.

`mjSTATE_INTEGRATION` decides what the next steps give. Environments also read derived numbers (positions of bodies,
contact forces) that the last step left behind and that a recomputation would give for a *later* point of the step; so
every float array of `MjData` is captured too. Contacts and constraints are not: they are computed anew from the
restored state, and again at the next step.

Of `MjModel` the float arrays and options are state, since domain randomisation writes them; its integer arrays say what
is connected with what, and must be equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mujoco  # type: ignore[import-untyped]
import numpy as np

from casckpt.digest import digest
from casckpt.errors import MismatchError
from casckpt.integrations.gymnasium.adapters import leave_out, register_env_adapter

_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
_OF_THE_SOLVER = (
    "efc_",
    "iefc_",
    "efm_",
    "iacc",
    "ifrc_",
)  # sized by the constraints of the moment, in memory that moves
_FOR_THE_EYE = ("tex_", "mat_", "skin_", "light_", "vis")


def register() -> None:
    """Make the adapters known."""
    register_env_adapter(mujoco.MjData, _capture_data, _restore_data, check=_check_data, gives_copies=True)
    register_env_adapter(mujoco.MjModel, _capture_model, _restore_model, check=_check_model, gives_copies=True)
    try:
        from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer
    except ImportError:  # without imageio Gymnasium has no renderer, and no MuJoCo environments
        return
    leave_out(MujocoRenderer)


class _Fields(NamedTuple):
    names: list[str]
    arrays: list[Any]


def _names_of(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if not name.startswith("_") and not callable(getattr(kind, name)))


_array_names: dict[tuple[type, str, tuple[str, ...]], list[str]] = {}


def _fields(struct: Any, kinds: str, without: tuple[str, ...]) -> _Fields:
    """The non-empty arrays of these dtype kinds, by name."""
    key = type(struct), kinds, without
    if key not in _array_names:
        values = {name: getattr(struct, name) for name in _names_of(type(struct)) if not name.startswith(without)}
        is_array = {name: isinstance(value, np.ndarray) and value.dtype.kind in kinds for name, value in values.items()}
        _array_names[key] = [name for name in values if is_array[name]]
    found = _Fields([], [])
    for name in _array_names[key]:
        value = getattr(struct, name)
        if value.size:
            found.names.append(name)
            found.arrays.append(value)
    return found


def _signature(fields: _Fields) -> str:
    shapes = ";".join(f"{name}{array.dtype.str}{array.shape}" for name, array in zip(*fields, strict=True))
    return digest(shapes.encode()).hex()


def _pack(fields: _Fields) -> Any:
    """All of them one after the other; one leaf instead of a hundred."""
    return np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in fields.arrays])


def _unpack(fields: _Fields, packed: Any) -> list[Any]:
    parts, at = [], 0
    for array in fields.arrays:
        parts.append(packed[at : at + array.nbytes].view(array.dtype).reshape(array.shape))
        at += array.nbytes
    return parts


def _write(fields: _Fields, packed: Any) -> None:
    for array, part in zip(fields.arrays, _unpack(fields, packed), strict=True):
        array[...] = part


# --- MjData ---


def _derived(data: Any) -> _Fields:
    return _fields(data, "f", _OF_THE_SOLVER)


def _capture_data(data: Any) -> dict[str, Any]:
    state = np.empty(mujoco.mj_stateSize(data.model, _STATE), np.float64)
    mujoco.mj_getState(data.model, data, state, _STATE)
    fields = _derived(data)
    return {"integration": state, "derived": _pack(fields), "signature": _signature(fields)}


def _check_data(data: Any, state: Any) -> None:
    expected = mujoco.mj_stateSize(data.model, _STATE)
    if state["integration"].shape != (expected,) or state["signature"] != _signature(_derived(data)):
        raise _other_model(f"{state['integration'].size} numbers of state", f"{expected}, or other arrays")


def _restore_data(data: Any, state: Any) -> None:
    mujoco.mj_setState(data.model, data, state["integration"], _STATE)
    mujoco.mj_forward(data.model, data)  # contacts and constraints, which may move the solver's warm start
    _write(_derived(data), state["derived"])  # all floats as they were, those of the state too


# --- MjModel ---


def _numbers(model: Any) -> _Fields:
    return _fields(model, "f", _FOR_THE_EYE)


def _topology(model: Any) -> _Fields:
    return _fields(model, "biu", _FOR_THE_EYE)


def _options(model: Any) -> dict[str, Any]:
    options = {name: getattr(model.opt, name) for name in _names_of(type(model.opt))}
    return {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}


def _capture_model(model: Any) -> dict[str, Any]:
    numbers, topology = _numbers(model), _topology(model)
    return {
        "numbers": _pack(numbers),
        "options": _options(model),
        "signature": _signature(numbers),
        "topology": digest(_pack(topology)).hex() + _signature(topology),
    }


def _check_model(model: Any, state: Any) -> None:
    topology = _topology(model)
    if state["signature"] != _signature(_numbers(model)):
        raise _other_model("arrays of other shapes", "those of the live model")
    if state["topology"] != digest(_pack(topology)).hex() + _signature(topology):
        raise _other_model("other integer arrays (what is connected with what)", "those of the live model")


def _restore_model(model: Any, state: Any) -> None:
    _write(_numbers(model), state["numbers"])
    for name, value in state["options"].items():
        if isinstance(value, np.ndarray):
            getattr(model.opt, name)[...] = value
        else:
            setattr(model.opt, name, value)


def _other_model(expected: str, found: str) -> MismatchError:
    return MismatchError(
        f"another MuJoCo model: expected {expected}, found {found}. Make the environment with the same XML file, and "
        f"with the MuJoCo version of the snapshot (`casckpt show`; here {mujoco.__version__})"
    )
