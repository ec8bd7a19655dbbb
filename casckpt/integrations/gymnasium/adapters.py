"""Adapters: how objects are captured that keep their state outside of Python attributes.

An object takes part without an adapter when its class has `get_state()` and `set_state(state)`, or `state_dict()` and
`load_state_dict(state)`. For a class that has neither, `register_env_adapter` says how. MuJoCo, the Arcade Learning
Environment and Gymnasium's AsyncVectorEnv have theirs here, registered when their library is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from casckpt.errors import InvalidInputError
from casckpt.integrations.gymnasium.nodes import Finding


@dataclass(frozen=True)
class Adapter:
    """How to capture and restore one class; see `register_env_adapter`."""

    capture: Callable[[Any], Any]
    restore: Callable[[Any, Any], None]
    check: Callable[[Any, Any], None] | None = None
    find: Callable[[Any, str], list[Finding]] | None = None
    gives_copies: bool = False


_adapters: dict[type, Adapter | None] = {}
_BUILT_IN = {"mujoco": "_mujoco", "ale_py": "_ale", "gymnasium": "_async"}
_loaded: set[str] = set()
_PROTOCOLS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def register_env_adapter(
    kind: type,
    capture: Callable[[Any], Any],
    restore: Callable[[Any, Any], None],
    *,
    check: Callable[[Any, Any], None] | None = None,
    find: Callable[[Any, str], list[Finding]] | None = None,
    gives_copies: bool = False,
) -> None:
    """Say how objects of a class, and of its subclasses, are captured wherever an environment holds one.

    Args:
        kind: the class.
        capture: `capture(object) -> state`: a plain tree of numbers, text, bytes, arrays, tensors and generators.
        restore: `restore(object, state)`: puts it into a live object of the class.
        check: `check(object, state)`: raises `MismatchError` when the state does not fit, before anything is touched.
        find: `find(state, path)`: findings about what the state lacks, for reports.
        gives_copies: what `capture` returns is changed by nobody afterwards; otherwise it is copied.

    Raises:
        InvalidInputError: `kind` is no class.
    """
    if not isinstance(kind, type):
        raise InvalidInputError(f"register_env_adapter: expected a class, got {kind!r:.80}. Give the class itself.")
    _adapters[kind] = Adapter(capture, restore, check, find, gives_copies)


def leave_out(kind: type) -> None:
    """Objects of this class draw pictures or keep books: the constructor makes them, nothing of them is state."""
    _adapters[kind] = None


def find_adapter(value: Any) -> tuple[bool, Adapter | None]:
    """Whether somebody registered the class of `value`, and what; methods of the class itself count as registered."""
    for module, name in _BUILT_IN.items():
        if module in sys.modules and module not in _loaded:
            _loaded.add(module)
            import_module(f"casckpt.integrations.gymnasium.{name}").register()
    for kind in type(value).__mro__:
        if kind in _adapters:
            return True, _adapters[kind]
    for get, put in _PROTOCOLS:
        if callable(getattr(type(value), get, None)) and callable(getattr(type(value), put, None)):
            return True, _by_methods(get, put)
    return False, None


def _by_methods(get: str, put: str) -> Adapter:
    return Adapter(lambda value: getattr(value, get)(), lambda value, state: getattr(value, put)(state))
