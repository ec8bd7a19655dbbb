"""From a stored tree back into a live environment: first every comparison, then every write.

`Put.compare` touches nothing and collects what does not fit. `Put.put` then sets attributes, so that afterwards each
object holds what it held at the capture: containers and generators keep their identity, arrays become new ones, except
where the live array is a view of memory that numpy does not own (MuJoCo's, shared memory): that memory is written.
"""

from __future__ import annotations

import types
from typing import Any

import gymnasium
import numpy as np

from casckpt.errors import MismatchError
from casckpt.integrations.gymnasium import clocks
from casckpt.integrations.gymnasium.adapters import find_adapter
from casckpt.integrations.gymnasium.kinds import ENVIRONMENTS, MAPPINGS, PLAIN, attributes_of, cells_of, is_tensor
from casckpt.integrations.gymnasium.nodes import node_name
from casckpt.integrations.gymnasium.parts import parts_of
from casckpt.integrations.gymnasium.walk import arguments_of, is_left_out, layers_of
from casckpt.state import StoredEnum, rng
from casckpt.state.differences import Difference
from casckpt.state.walk import is_namedtuple, type_name

ABSENT = object()  # no live value at this place
_PROGRAM = ("__main__.", "__mp_main__.")


class Put:
    """Compares a stored tree with a live environment, and puts it there. `differences` are complete after `compare`."""

    def __init__(self) -> None:
        self.differences: list[Difference] = []
        self._met: set[str] = set()
        self._made: dict[str, Any] = {}  # what stands at the path at which it was met first

    # --- comparing ---

    def compare(self, stored: Any, live: Any, path: str) -> None:
        """Collect what of `stored` has no place in `live`."""
        name = node_name(stored)
        self._met.add(path)
        if name == "Same":
            if stored.path not in self._met and not self.differences:
                self._differ(path, f"what is at {stored.path}", "nothing there")
        elif name == "Stack":
            self._compare_stack(stored, live, path)
        elif name == "Held":
            self._compare_held(stored, live, path)
        elif name == "Adapted":
            self._compare_adapted(stored, live, path)
        elif name == "Left":
            if live is ABSENT:
                self._differ(path, f"a {stored.kind}, which was not captured", "nothing")
        elif type(stored) is StoredEnum:
            self._compare_enum(stored, live, path)
        elif name is None and (isinstance(stored, (list, tuple, dict)) or hasattr(stored, "maxlen")):
            self._compare_items(stored, live, path)

    def _compare_items(self, stored: Any, live: Any, path: str) -> None:
        """Items at which objects stand need their places; of environments there must be as many."""
        items = _items(stored)
        has_environments = any(node_name(item) == "Stack" for _, item in items)
        if has_environments and live is not ABSENT and len(live) != len(items):
            self._differ(path, f"{len(items)} environments", str(len(live)))
        for key, item in items:
            if type(item) not in PLAIN:
                self.compare(item, _item_of(live, key), f"{path}[{key!r}]")

    def _differ(self, path: str, expected: str, found: str) -> None:
        self.differences.append(Difference(path, expected, found))

    def _compare_stack(self, stored: Any, live: Any, path: str) -> None:
        if not isinstance(live, ENVIRONMENTS):
            self._differ(path, "an environment", _named(live))
            return
        layers = list(layers_of(live, path))
        names = [f"{number}.{type(layer).__name__}" for number, (layer, _) in enumerate(layers)]
        if names != list(stored.layers):
            self._differ(path, " > ".join(stored.layers), " > ".join(names))
            return
        self._met.update(at for _, at in layers)
        for (layer, at), record in zip(layers, stored.layers.values(), strict=True):
            arguments = arguments_of(layer)
            for key in sorted(record.arguments.keys() | arguments.keys()):
                expected, found = record.arguments.get(key, ABSENT), arguments.get(key, ABSENT)
                if not same(expected, found):
                    self._differ(f"{at} ({key}=)", _shown(expected), _shown(found))
            self.compare(record.state, layer, at)
            self.compare(record.streams, layer, at)

    def _compare_held(self, stored: Any, live: Any, path: str) -> None:
        if live is ABSENT or not is_of_kind(live, stored.kind):
            self._differ(path, f"a {stored.kind} that the constructor made", _named(live))
            return
        attributes = visible(live)
        for name, item in stored.attributes.items():
            if name.startswith("__") and name.endswith("__") and name not in attributes:
                self._differ(f"{path}.{name}", "an attribute of an object", "a name of Python's own")
            if type(item) not in PLAIN:
                self.compare(item, attributes.get(name, ABSENT), f"{path}.{name}")

    def _compare_adapted(self, stored: Any, live: Any, path: str) -> None:
        _, adapter = find_adapter(live)
        if live is ABSENT or not is_of_kind(live, stored.kind) or adapter is None:
            self._differ(path, f"a {stored.kind}, and an adapter for it", _named(live))
        elif adapter.check is not None:
            try:
                adapter.check(live, stored.state)
            except MismatchError as error:
                self._differ(path, "a state that fits", str(error))

    def _compare_enum(self, stored: StoredEnum, live: Any, path: str) -> None:
        try:
            stored.resolve(type(live))
        except (MismatchError, AttributeError):
            self._differ(path, f"a member of {stored.type_name}", _named(live))

    # --- writing ---

    def put(self, stored: Any, live: Any, path: str) -> Any:
        """Put a value that `compare` accepted in place; returns what has to stand there now."""
        name = node_name(stored)
        if name == "Same":
            return self._made[stored.path]
        if name in ("Stack", "Held", "Adapted", "Left"):
            self._made[path] = live
            if name == "Stack":
                self._put_stack(stored, live, path)
            elif name == "Held":
                self._put_held(stored, live, path)
            elif name == "Adapted":
                find_adapter(live)[1].restore(live, stored.state)  # type: ignore[union-attr]
            return live
        made = self._value(stored, live, path)
        self._made.setdefault(path, made)
        return made

    def _put_stack(self, stored: Any, live: Any, path: str) -> None:
        layers = list(layers_of(live, path))
        self._made.update((at, layer) for layer, at in layers)
        for (layer, at), record in zip(layers, stored.layers.values(), strict=True):
            self.put(record.state, layer, at)
            if record.streams is not None:
                self.put(record.streams, layer, at)

    def _put_held(self, stored: Any, live: Any, path: str) -> None:
        attributes = visible(live)
        for name, item in stored.attributes.items():
            old = attributes.get(name, ABSENT)
            new = self.put(item, old, f"{path}.{name}")
            if new is not old:
                _set(live, name, new)
        if not isinstance(live, (types.FunctionType, types.MethodType, gymnasium.Space)):
            for name in attributes.keys() - stored.attributes.keys() - set(stored.left):
                if not is_left_out(name, attributes[name]):
                    object.__delattr__(live, name)  # it came after the capture
        clocks.restart(live)

    def _value(self, stored: Any, live: Any, path: str) -> Any:
        if type(stored) in PLAIN:
            return live if type(live) is type(stored) and same(stored, live) else stored
        if type(stored) is StoredEnum:
            return stored.resolve(type(live))
        kind = rng.kind_of(stored)
        if kind is not None:
            return _put_generator(kind, stored, live)
        if isinstance(stored, np.ndarray):
            return _put_array(stored, live)
        if type(stored) is set and type(live) is set:
            live.clear()
            live.update(stored)
            return live
        if is_tensor(stored):
            return stored.to(live.device) if is_tensor(live) else stored
        if isinstance(stored, tuple):
            items = [self.put(item, _item_of(live, key), f"{path}[{key!r}]") for key, item in _items(stored)]
            fits = is_namedtuple(live) and getattr(stored, "_fields", None) == live._fields
            return type(live)(*items) if fits else type(stored)(*items) if is_namedtuple(stored) else tuple(items)
        if isinstance(stored, (list, dict)) or hasattr(stored, "maxlen"):
            return self._container(stored, live, path)
        return stored

    def _container(self, stored: Any, live: Any, path: str) -> Any:
        """The live container with the stored items; a new one where there is none of this kind."""
        is_kept = type(live) is type(stored) and getattr(live, "maxlen", None) == getattr(stored, "maxlen", None)
        made = self._made[path] = live if is_kept else _empty(stored)
        items = [(key, self.put(item, _item_of(live, key), f"{path}[{key!r}]")) for key, item in _items(stored)]
        made.clear()
        if isinstance(made, MAPPINGS):
            made.update(items)
        else:
            made.extend(item for _, item in items)
        return made


def is_of_kind(live: Any, kind: str) -> bool:
    """Whether a live object is of a stored class; what a program defines has another module where it is imported."""
    found = type_name(live)
    if found == kind:
        return True
    is_of_a_program = kind.startswith(_PROGRAM) or found.startswith(_PROGRAM)
    return is_of_a_program and f".{kind}".endswith(f".{type(live).__qualname__}")


def visible(live: Any) -> dict[str, Any]:
    """The attributes of an object that a stored `Held` may name."""
    if isinstance(live, types.FunctionType):
        return cells_of(live)
    if isinstance(live, types.MethodType):
        return {"__self__": live.__self__}
    return attributes_of(live) or {}


def _set(live: Any, name: str, value: Any) -> None:
    if isinstance(live, types.FunctionType):
        cells = dict(zip(live.__code__.co_freevars, live.__closure__ or (), strict=True))
        cells[name].cell_contents = value
    else:
        object.__setattr__(live, name, value)


def _put_generator(kind: str, stored: Any, live: Any) -> Any:
    """The live generator in the stored state, or the stored one where none of its kind is."""
    if live is ABSENT or rng.kind_of(live) != kind:
        return stored
    tree = rng.tree_of(kind, stored)
    try:
        rng.check_fit(kind, live, tree, "generator")
    except MismatchError:  # another algorithm: an environment may choose one at each reset
        return stored
    rng.put(kind, live, tree)
    return live


def _put_array(stored: Any, live: Any) -> Any:
    fits = isinstance(live, np.ndarray) and live.shape == stored.shape and live.dtype == stored.dtype
    if fits and live.flags.writeable and _belongs_to_others(live):
        live[...] = stored
        return live
    return stored


def _belongs_to_others(array: Any) -> bool:
    """Whether an array is a view of memory that no numpy array owns."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is not None


def _empty(stored: Any) -> Any:
    made = stored.copy()
    made.clear()
    return made


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))


def _item_of(live: Any, key: Any) -> Any:
    if isinstance(live, dict):
        return live.get(key, ABSENT)
    if isinstance(live, (list, tuple)) or hasattr(live, "maxlen"):
        return live[key] if isinstance(key, int) and key < len(live) else ABSENT
    return ABSENT


def _named(live: Any) -> str:
    return "nothing" if live is ABSENT else f"a {type_name(live)}"


def _shown(value: Any) -> str:
    return "nothing" if value is ABSENT else f"{value!r:.80}"


def same(a: Any, b: Any) -> bool:
    """Whether two captured trees are equal to the last bit; NaN equals itself."""
    kind = rng.kind_of(a)
    if kind is not None:
        return rng.kind_of(b) == kind and same(rng.tree_of(kind, a), rng.tree_of(kind, b))
    if isinstance(a, StoredEnum) or isinstance(b, StoredEnum):
        return bool(_enum_of(a) == _enum_of(b))
    if isinstance(a, (np.ndarray, np.generic)):
        is_alike = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return bool(is_alike and a.tobytes() == b.tobytes())
    if is_tensor(a):
        return bool(is_tensor(b) and parts_of(a) == parts_of(b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(item, b[key]) for key, item in a.items())
    if isinstance(a, list) or hasattr(a, "maxlen"):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)


def _enum_of(value: Any) -> Any:
    return (getattr(value, "type_name", type(value).__name__), value.name, value.value)


def first_difference(stored: Any, found: Any, path: str) -> str:
    """The path of the first place where two captured trees differ; empty when they are equal."""
    if same(stored, found):
        return ""
    if isinstance(stored, tuple) and node_name(stored) is not None and node_name(stored) == node_name(found):
        stored, found = _fields_of(stored), _fields_of(found)
    if isinstance(stored, dict) and isinstance(found, dict):
        for key in [*stored, *(key for key in found if key not in stored)]:
            if key not in stored or key not in found or not same(stored[key], found[key]):
                below = first_difference(stored.get(key, ABSENT), found.get(key, ABSENT), f"{path}/{key}")
                return below or f"{path}/{key}"
    return path


def _fields_of(node: Any) -> dict[str, Any]:
    return dict(zip(node._fields, node, strict=True))
