"""What a value in an environment is: plain, constructed, or bound to this process.

*Constructed* things (functions, classes, specs, renderers, the definition of a space) are made by the environment's
constructor and never change what it does next; they are listed, and not captured. *Process-local* things (files,
sockets, threads, pointers, objects of compiled classes without an adapter) may decide what it does next and cannot be
captured; they are findings, and a strict capture refuses them.
"""

from __future__ import annotations

import ctypes
import functools
import io
import logging
import multiprocessing.process
import re
import socket
import subprocess
import sys
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from casckpt.state.values import to_foreign
from casckpt.state.walk import FACTORIES, type_name

PLAIN = (type(None), bool, int, float, complex, str, bytes)
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
SEQUENCES = (list, tuple, deque)
ENVIRONMENTS = (gymnasium.Env, VectorEnv)
SPACES = ("action_space", "observation_space", "single_action_space", "single_observation_space")

CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    type,
    types.ModuleType,
    types.GenericAlias,
    property,
    staticmethod,
    classmethod,
    functools._lru_cache_wrapper,
    np.ufunc,
    re.Pattern,
    range,
    slice,
    logging.Logger,
)
_PROCESS_LOCAL: tuple[tuple[Any, str], ...] = (
    (io.IOBase, "an open file"),
    (socket.socket, "a socket"),
    (threading.Thread, "a thread"),
    (multiprocessing.process.BaseProcess, "a process"),
    (subprocess.Popen, "a process"),
    ((type(threading.Lock()), type(threading.RLock()), threading.Condition), "a lock"),
    ((ctypes._SimpleCData, ctypes._Pointer, ctypes.Structure, ctypes.CDLL), "a pointer or memory of ctypes"),
    ((types.GeneratorType, types.CoroutineType), "a running generator"),
)

# What Gymnasium's classes keep about their construction and for drawing. Attributes of environments and wrappers only.
BOOKKEEPING = frozenset(
    {"spec", "_cached_spec", "metadata", "_metadata", "_ezpickle_args", "_ezpickle_kwargs", "_saved_kwargs", "env_fns"}
    | {"render_mode", "screen", "clock", "window", "window_surface", "surf", "viewer", "renderer", "isopen"}
)
# Constants that are large, by class: the transition tables of toy text.
CONSTANTS = {
    "gymnasium.envs.toy_text.taxi.TaxiEnv": frozenset({"P", "desc"}),
    "gymnasium.envs.toy_text.frozen_lake.FrozenLakeEnv": frozenset({"P", "desc"}),
    "gymnasium.envs.toy_text.cliffwalking.CliffWalkingEnv": frozenset({"P", "_cliff"}),
}
_TENSOR_MODULES = ("torch", "torch.nn.parameter")


def is_code(value: Any) -> bool:
    """Whether a value is code or a definition, which a constructor makes again; `partial` if what it holds is plain."""
    if isinstance(value, functools.partial):
        return all(is_code(part) or is_plain(part) for part in (value.func, *value.args, *value.keywords.values()))
    return isinstance(value, CODE)


def is_plain(value: Any) -> bool:
    """Whether a value is stored as it is, without a look inside, and cannot change."""
    if type(value) in PLAIN:
        return True
    try:
        return not isinstance(value, np.ndarray) and to_foreign(value) is not None
    except ValueError:  # a numpy scalar of a dtype that is not stored
        return False


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor; torch is not loaded for the question."""
    return "torch" in sys.modules and type(value).__module__ in _TENSOR_MODULES and hasattr(value, "untyped_storage")


def is_set_of_plain(value: Any) -> bool:
    """A set is one scalar of the snapshot, if what is in it is plain."""
    return type(value) in (set, frozenset) and all(map(_is_key, value))


def _is_key(value: Any) -> bool:
    """Whether a key of a dict, or an item of a set, can be stored."""
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_key, value)))


def has_storable_keys(mapping: Any) -> bool:
    """Whether a dict's keys can be stored, and its default factory."""
    if type(mapping) is defaultdict and mapping.default_factory not in FACTORIES.values():
        return False
    return all(map(_is_key, mapping))


def process_local(value: Any) -> str:
    """What a value is that no other process can have; empty for anything else."""
    for kinds, words in _PROCESS_LOCAL:
        if isinstance(value, kinds):
            return f"{words} ({type_name(value)}), which no other process has"
    return ""


def hidden(value: Any) -> str:
    """Why an object without visible attributes is not captured."""
    return f"{type_name(value)} keeps its state where Python cannot see it; give its class to register_env_adapter"


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of a Python class, slots included; None when it may hold more than attributes.

    A class whose instances are larger than an object with a dict, a weak reference and its slots has memory of a
    compiled base class, which no attribute shows.
    """
    kind = type(value)
    slots = [name for each in kind.__mro__ for name in _slots(each)]
    room_max = object.__basicsize__ + np.intp(0).itemsize * (2 + len(slots))
    if kind.__basicsize__ > room_max or kind.__itemsize__ or not (hasattr(value, "__dict__") or slots):
        return None
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found.update(getattr(value, "__dict__", {}))
    if isinstance(value, ENVIRONMENTS):
        found.update((name, space) for name, space in _spaces_of_class(kind) if name not in found)
    return found


def _spaces_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Spaces are often attributes of the class; their generators are state all the same."""
    for name in SPACES:
        space = next((each.__dict__[name] for each in kind.__mro__ if name in each.__dict__), None)
        if isinstance(space, gymnasium.Space):
            yield name, space


def _slots(kind: type) -> list[str]:
    stated = kind.__dict__.get("__slots__", ())
    names = [stated] if isinstance(stated, str) else list(stated)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def cells_of(function: Any) -> dict[str, Any]:
    """The closure of a function: what its free variables hold."""
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True) if _is_full(cell)}


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - the question is whether it raises
    except ValueError:
        return False
    return True
