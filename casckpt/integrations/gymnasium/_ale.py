"""The Arcade Learning Environment: the emulator with its random generator, as the bytes of its own serialization.

After a restore RAM, counters and the generator are those of the capture. The screen is drawn by the emulator's next
step; until then `getScreen…` shows the frame from before the restore.
"""

from __future__ import annotations

from typing import Any

import ale_py

from casckpt.errors import MismatchError
from casckpt.integrations.gymnasium.adapters import register_env_adapter


def register() -> None:
    """Make the adapter known."""
    register_env_adapter(ale_py.ALEInterface, _capture, _restore, check=_check, gives_copies=True)


def _capture(ale: Any) -> bytes:
    return bytes(ale.cloneState(include_rng=True).serialize())


def _read(state: Any) -> Any:
    try:
        return ale_py.ALEState(state)
    except (RuntimeError, SystemError, TypeError) as error:  # what the binding makes of a C++ exception
        raise MismatchError(
            f"the stored emulator state is none that ale_py {ale_py.__version__} reads ({error}). "
            "Install the version that the snapshot's environment names: `casckpt show`."
        ) from error


def _check(ale: Any, state: Any) -> None:
    _read(state)


def _restore(ale: Any, state: Any) -> None:
    ale.restoreState(_read(state))
