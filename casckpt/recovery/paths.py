"""Places in trees of values, named by leaf paths: `optimizer/param_groups/0/lr`, and with `*` for any one name.

A path names a leaf or everything below a container. Trees are never changed: `replace_at` gives a new one that shares
with the old all that it did not have to rebuild.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from casckpt.errors import InvalidInputError, NotFoundError
from casckpt.format.structure import join_path

Keys = tuple[Any, ...]
ANY = "*"


def find_places(tree: Any, component: str, pattern: str) -> dict[str, Keys]:
    """Path → keys of every place in a component's tree that a pattern names.

    Raises:
        NotFoundError: there is none.
    """
    found: dict[str, Keys] = {}
    _find(tree, component, pattern.split("/")[1:], (), found)
    if not found:
        raise NotFoundError(
            f"{pattern!r} names nothing in component {component!r}. `casckpt show --leaves` lists the leaves.",
            path=pattern,
        )
    return found


def component_of(pattern: str, components: Iterable[str]) -> str:
    """The component that a path lies in.

    Raises:
        NotFoundError: none of them.
    """
    head = pattern.partition("/")[0]
    names = sorted(components)
    if head not in names:
        raise NotFoundError(f"{pattern!r} is in no component; there are {names}.", path=pattern)
    return head


def _find(tree: Any, path: str, segments: Sequence[str], keys: Keys, found: dict[str, Keys]) -> None:
    if not segments:
        found[path] = keys
        return
    for key, child in _items(tree):
        below = join_path(path, key)
        if segments[0] in (ANY, below.rpartition("/")[2]):
            _find(child, below, segments[1:], (*keys, key), found)


def _items(tree: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return tree.items()
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return zip(tree._fields, tree, strict=True)
    if isinstance(tree, list | tuple | deque):
        return enumerate(tree)
    return ()


def value_at(tree: Any, keys: Keys) -> Any:
    """What stands at a place that `find_places` gave for this tree."""
    for key in keys:
        tree = getattr(tree, key) if isinstance(tree, tuple) and hasattr(tree, "_fields") else tree[key]
    return tree


def replace_at(tree: Any, keys: Keys, value: Any, path: str) -> Any:
    """The tree with another value at one place; a dict takes a last key that it did not have.

    Raises:
        InvalidInputError: the tree has no such place.
    """
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    is_mapping = isinstance(tree, Mapping)
    known = {each for each, _ in _items(tree)}
    if key not in known and not (is_mapping and not rest):
        raise InvalidInputError(
            f"{path}: there is no {key!r} to replace in a {type(tree).__name__}. Name the container that has it.",
            path=path,
        )
    child = value if not rest else replace_at(value_at(tree, (key,)), rest, value, path)
    if isinstance(tree, tuple):
        if hasattr(tree, "_fields"):
            return tree._replace(**{key: child})  # type: ignore[attr-defined]
        return (*tree[:key], child, *tree[key + 1 :])
    changed = copy.copy(tree)
    changed[key] = child
    return changed


def check_kind(old: Any, new: Any, path: str) -> None:
    """Raise unless a value can stand where the old one does, as far as its kind says: what is loaded from a tree half
    checks it itself, when half of it is loaded.

    Raises:
        InvalidInputError: a container, an array, a text, a number or None where another of these is, or a container
            that lacks names. Any value may follow None, and None a truth value: such options have three values.
    """
    found, expected = _kind_of(new), _kind_of(old)
    is_number = expected == "an array" and found == "a number" and not old.shape
    is_option = expected == "nothing" or (new is None and isinstance(old, bool))
    if found != expected and not is_number and not is_option:
        raise InvalidInputError(
            f"override {path!r}: expected {expected}, found {found}: {new!r:.60}. Nothing was touched.", path=path
        )
    if expected == "a mapping":
        missing = [key for key in old if key not in new] if found == expected else list(old)
        if missing:
            raise InvalidInputError(
                f"override {path!r}: {sorted(map(str, missing))[:5]} of {len(old)} names are missing. Name single "
                f"places ({path}/…), or give all. Nothing was touched.",
                path=path,
            )
        for key, child in _items(old):
            check_kind(child, new[key], join_path(path, key))


def _kind_of(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple | deque):
        return "a list"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return "an array"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float | complex):
        return "a number"
    return "nothing" if value is None else f"a {type(value).__name__}"
