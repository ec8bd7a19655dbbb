"""The Arcade Learning Environment: the emulator with its random generator, as the bytes of its own serialization.

After a restore RAM, counters and the generator are those of the capture. The screen is drawn by the emulator's next
step; until then `getScreen…` shows the frame from before the restore.

With sticky actions (`repeat_action_probability` above 0, the default of the v5 games) the emulator remembers which
action it applied last, and neither serializes nor shows it: in one of four cases the next frame repeats it. That is
a finding. Gymnasium's StickyAction wrapper does the same in Python, and is captured.
"""

from __future__ import annotations

from typing import Any

import ale_py

from casckpt.errors import MismatchError
from casckpt.integrations.gymnasium.adapters import register_env_adapter
from casckpt.integrations.gymnasium.nodes import Finding


def register() -> None:
    """Make the adapter known."""
    register_env_adapter(ale_py.ALEInterface, _capture, _restore, check=_check, find=_find, gives_copies=True)


def _capture(ale: Any) -> dict[str, Any]:
    return {
        "emulator": bytes(ale.cloneState(include_rng=True).serialize()),
        "is_sticky": ale.getFloat("repeat_action_probability") > 0.0,
    }


def _find(state: Any, path: str) -> list[Finding]:
    if not state["is_sticky"]:
        return []
    reason = (
        "the emulator does not tell the action that it may repeat (repeat_action_probability is not 0). Make the game "
        "with repeat_action_probability=0.0 and wrap it in gymnasium.wrappers.StickyAction(env, 0.25)"
    )
    return [Finding(path, reason)]


def _read(state: Any) -> Any:
    try:
        return ale_py.ALEState(state["emulator"])
    except (RuntimeError, SystemError, TypeError) as error:  # what the binding makes of a C++ exception
        raise MismatchError(
            f"the stored emulator state is none that ale_py {ale_py.__version__} reads ({error}). "
            "Install the version that the snapshot's environment names: `casckpt show`."
        ) from error


def _check(ale: Any, state: Any) -> None:
    _read(state)


def _restore(ale: Any, state: Any) -> None:
    ale.restoreState(_read(state))
