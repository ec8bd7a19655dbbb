"""From a live environment to a tree of plain values and nodes: one walk over everything it holds.

Attributes are followed through Python objects, containers and closures. What is met twice is stored once, so that
shared generators, lists and objects are shared again after a restore; arrays keep their sharing through the store, by
address.
Nothing is skipped in silence: what is not captured is `constructed` or `missing`, with its path.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np

from casckpt.errors import InvalidInputError
from casckpt.integrations.gymnasium import clocks
from casckpt.integrations.gymnasium.adapters import find_adapter
from casckpt.integrations.gymnasium.kinds import (
    BOOKKEEPING,
    CONSTANTS,
    ENVIRONMENTS,
    MAPPINGS,
    PLAIN,
    SEQUENCES,
    attributes_of,
    cells_of,
    has_storable_keys,
    hidden,
    is_code,
    is_plain,
    is_set_of_plain,
    is_tensor,
    process_local,
)
from casckpt.integrations.gymnasium.nodes import Adapted, Finding, Held, Layer, Left, Same, Stack
from casckpt.integrations.gymnasium.parts import parts_of, tree_of
from casckpt.state import rng
from casckpt.state._numpy import describe, dtype_name
from casckpt.state.walk import is_namedtuple, type_name

OBJECTS_MAX = 20_000  # an environment that reaches more objects holds on to something else, a trainer or a data set
_DRAWING = frozenset(
    (
        "render_mode",
        "width",
        "height",
        "camera_id",
        "camera_name",
        "default_camera_config",
        "max_geom",
        "visual_options",
    )
)


class EnvWalk:
    """Walks one environment. Afterwards the lists are complete.

    The tree refers to live arrays and generators, unless `copies` is true; then it holds copies of its own, each array
    for itself (see `overlapping`).

    Attributes:
        captured: paths of leaves, generators and adapted objects.
        constructed: what the constructor makes again.
        missing: what is state, or may be, and cannot be captured.
        unseeded: generators that nobody has seeded yet; the first draw will seed them from the system's entropy.
        arrays: the live arrays and tensors in the tree.
    """

    def __init__(self, *, copies: bool = False) -> None:
        self.copies = copies
        self.arrays: list[Any] = []
        self.captured: list[str] = []
        self.constructed: list[Finding] = []
        self.missing: list[Finding] = []
        self.unseeded: list[str] = []
        self._met: dict[int, str] = {}
        self._alive: list[Any] = []

    def node(self, value: Any, path: str) -> Any:
        """The tree of a value."""
        if type(value) in PLAIN or is_plain(value):
            self.captured.append(path)
            return value
        if type(value) is tuple or is_namedtuple(value):
            return self._row(value, path)
        if id(value) in self._met:
            return Same(self._met[id(value)])
        self._meet(value, path)
        kind, is_array = rng.kind_of(value), self._is_array(value)
        if kind is not None or is_array or is_set_of_plain(value):
            self.captured.append(path)
            if is_array:
                self.arrays.append(value)
            return self._copied(value, kind) if self.copies else value
        if type(value) in SEQUENCES:
            return self._row(value, path)
        if type(value) in MAPPINGS and has_storable_keys(value):
            return self._mapping(value, path)
        return self._object(value, path)

    def _meet(self, value: Any, path: str) -> None:
        if len(self._alive) >= OBJECTS_MAX:
            raise InvalidInputError(
                f"{path}: the environment reaches more than {OBJECTS_MAX} objects. Give the class that holds what is "
                "no part of it get_state() and set_state(), or an adapter (register_env_adapter)",
                path=path,
            )
        self._met[id(value)] = path
        self._alive.append(value)

    @staticmethod
    def _is_array(value: Any) -> bool:
        if type(value) not in (np.ndarray, np.memmap):
            return is_tensor(value)
        try:
            return bool(dtype_name(value.dtype))
        except ValueError:  # objects, and dtypes that are not stored
            return False

    @staticmethod
    def _copied(value: Any, kind: str | None) -> Any:
        if kind is not None:
            return rng.make(kind, rng.tree_of(kind, value))
        if isinstance(value, np.ndarray):
            return np.array(value, order="K")
        return value.detach().clone() if is_tensor(value) else type(value)(value)

    # --- containers ---

    def _row(self, value: Any, path: str) -> Any:
        if all(type(item) in PLAIN for item in value):
            self.captured.append(path)
            return value.copy() if self.copies and type(value) is not tuple and hasattr(value, "copy") else value
        items = [self.node(item, f"{path}[{position}]") for position, item in enumerate(value)]
        if is_namedtuple(value):
            return type(value)(*items)
        return type(value)(items, value.maxlen) if hasattr(value, "maxlen") else type(value)(items)

    def _mapping(self, value: Any, path: str) -> Any:
        made = value.copy()
        for key, item in value.items():
            made[key] = self.node(item, f"{path}[{key!r}]")
        return made

    # --- objects ---

    def _object(self, value: Any, path: str) -> Any:
        is_known, adapter = find_adapter(value)
        if is_known and adapter is None:
            return self._construct(value, path, f"{type_name(value)} draws or keeps books")
        if isinstance(value, ENVIRONMENTS):
            return Stack(dict(self._layers(value, path)))
        if adapter is not None:
            return self._adapt(value, path, adapter)
        if isinstance(value, gymnasium.Space):
            return self._held(value, path, _generators_of_space(value))
        if isinstance(value, types.MethodType) and not is_code(value.__self__):
            return self._held(value, path, {"__self__": value.__self__})
        if isinstance(value, types.FunctionType) and not all(map(is_plain, cells_of(value).values())):
            return self._held(value, path, cells_of(value))
        if is_code(value) or isinstance(value, types.MethodType):
            return self._construct(value, path, "code")
        local, attributes = process_local(value), attributes_of(value)
        if local or attributes is None:
            self.missing.append(Finding(path, local or hidden(value)))
            return Left(type_name(value))
        return self._held(value, path, attributes)

    def _construct(self, value: Any, path: str, reason: str) -> Left:
        self.constructed.append(Finding(path, reason))
        return Left(type_name(value))

    def _adapt(self, value: Any, path: str, adapter: Any) -> Adapted:
        state = adapter.capture(value)
        if self.copies and not adapter.gives_copies:
            state = tree_of(parts_of(state))
        self.captured.append(path)
        if adapter.find is not None:
            self.missing += adapter.find(state, path)
        return Adapted(type_name(value), state)

    def _held(self, value: Any, path: str, attributes: dict[str, Any], left_out: Iterable[str] = ()) -> Held:
        kept = clocks.without(value, attributes)
        found: dict[str, Any] = {}
        left = [*left_out, *(attributes.keys() - kept.keys())]
        for name, item in kept.items():
            node = self.node(item, f"{path}.{name}")
            if isinstance(node, Left):
                left.append(name)
            else:
                found[name] = node
        has_generator = "_np_random" in found or getattr(type(value), "_np_random", property) is None
        if has_generator and found.get("_np_random") is None:
            self.unseeded.append(f"{path}._np_random")
        return Held(type_name(value), found, sorted(left))

    # --- environments ---

    def _layers(self, env: Any, path: str) -> Iterator[tuple[str, Layer]]:
        for number, (layer, at) in enumerate(layers_of(env, path)):
            if number:
                self._meet(layer, at)
            state = self._layer(layer, at)
            streams = self._streams(layer, at) if isinstance(state, Adapted) else None
            yield f"{number}.{type(layer).__name__}", Layer(type_name(layer), arguments_of(layer), state, streams)

    def _layer(self, layer: Any, path: str) -> Any:
        _, adapter = find_adapter(layer)
        if adapter is not None:
            return self._adapt(layer, path, adapter)
        attributes = attributes_of(layer)
        if attributes is None:
            self.missing.append(Finding(path, hidden(layer)))
            return Held(type_name(layer), {}, [])
        constants = attributes.keys() & (CONSTANTS.get(type_name(layer), frozenset()) | BOOKKEEPING)
        for name in sorted(constants):
            self.constructed.append(Finding(f"{path}.{name}", "constant, of the construction, or for drawing"))
        inner = {"env"} if isinstance(attributes.get("env"), ENVIRONMENTS) else set()
        kept = {name: value for name, value in attributes.items() if name not in constants | inner}
        return self._held(layer, path, kept, constants | inner)

    def _streams(self, layer: Any, path: str) -> Held:
        attributes = attributes_of(layer) or {}
        drawing = {
            name: value
            for name, value in attributes.items()
            if isinstance(value, gymnasium.Space) or rng.kind_of(value) is not None
        }
        return self._held(layer, path, drawing, attributes.keys() - drawing.keys())


def is_left_out(name: str, value: Any) -> bool:
    """Whether an attribute that a capture did not meet would have been left out of it."""
    return name in BOOKKEEPING or isinstance(EnvWalk().node(value, name), Left)


def overlapping(arrays: list[Any]) -> bool:
    """Whether some of these share memory, so that copies of each for itself would not."""
    if any(map(is_tensor, arrays)):
        return True
    extents = sorted((low or 0, high) for _, low, high, _, _ in map(describe, arrays) if high)
    return any(start < stop for (_, stop), (start, _) in pairwise(extents))


def layers_of(env: Any, path: str) -> Iterator[tuple[Any, str]]:
    """The wrappers of an environment from the outside in, and the environment, each with its path."""
    while True:
        yield env, path
        inner = getattr(env, "__dict__", {}).get("env")
        if not isinstance(inner, ENVIRONMENTS):
            return
        env, path = inner, f"{path}.env"


def arguments_of(layer: Any) -> dict[str, Any]:
    """What the constructor was called with, as Gymnasium's own records have it, but for what is drawn."""
    attributes = getattr(layer, "__dict__", {})
    of_make = getattr(attributes.get("spec"), "kwargs", {})
    named = {**of_make, **attributes.get("_ezpickle_kwargs", {}), **attributes.get("_saved_kwargs", {})}
    placed = dict(enumerate(attributes.get("_ezpickle_args", ())))
    return {
        str(name): value
        for name, value in {**placed, **named}.items()
        if name not in _DRAWING and (is_plain(value) or (type(value) in (list, tuple) and all(map(is_plain, value))))
    }


def _generators_of_space(space: Any) -> dict[str, Any]:
    """Of a space: its generator and the spaces inside; the rest is its definition."""
    inner = {
        name: value for name, value in vars(space).items() if isinstance(value, gymnasium.Space) or name == "spaces"
    }
    return {"_np_random": space._np_random, **inner}
