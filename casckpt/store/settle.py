"""User-given metadata brought into plain, comparable form: metrics, labels, configs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from casckpt.errors import InvalidInputError
from casckpt.format.entry import MetricValue
from casckpt.limits import ENTRY_SIZE_MAX

_METADATA_SIZE_MAX = ENTRY_SIZE_MAX // 16  # an entry also holds inline objects; larger tables belong into the state
_SHOWN = 20
ABSENT: Any = object()


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, MetricValue]:
    """Names to numbers or text. Scalars of numpy and torch become Python's."""
    found: dict[str, MetricValue] = {}
    for name, value in _items(metrics, "metrics"):
        plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
        if not is_text(name) or not (isinstance(plain, bool | int | float) or is_text(plain)):
            raise InvalidInputError(
                f"metrics[{name!r}]={value!r:.60}: expected text to a number, bool or text (UTF-8)", name=name
            )
        plain = _builtin(plain)
        if isinstance(plain, int) and not -(1 << 63) <= plain < 1 << 64:
            raise InvalidInputError(f"metrics[{name!r}]: an integer beyond 64 bits. Use a float or text.", name=name)
        found[_builtin(name)] = plain
    _check_size(found, "metrics")
    return found


def plain_labels(labels: Mapping[str, Any]) -> dict[str, str]:
    """Names to text."""
    for name, value in _items(labels, "labels"):
        if not is_text(name) or not is_text(value):
            raise InvalidInputError(f"labels[{name!r}]={value!r:.60}: expected text to text (UTF-8)", name=name)
    found = {_builtin(name): _builtin(value) for name, value in labels.items()}
    _check_size(found, "labels")
    return found


def is_text(value: Any) -> bool:
    """Whether a value is a str that UTF-8 can write: no lone surrogates, as undecodable file names have."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _builtin(value: Any) -> Any:
    """Text or a number as Python's own type, whatever a subclass (of an enum, say) makes of str() and int()."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return value if isinstance(value, bool) or not isinstance(value, int) else int.__int__(value)


def _items(mapping: Any, what: str) -> Iterable[tuple[Any, Any]]:
    if not isinstance(mapping, Mapping):
        raise InvalidInputError(f"{what}={mapping!r:.60}: expected a mapping of names to values")
    return mapping.items()


def _check_size(value: Any, what: str) -> None:
    size = len(msgspec.msgpack.encode(value))
    if size > _METADATA_SIZE_MAX:
        raise InvalidInputError(
            f"{what}: {size} bytes, at most {_METADATA_SIZE_MAX} are allowed. Put large tables into the state."
        )


def plain_config(config: Any) -> bytes:
    """Canonical JSON of a config: dicts, dataclasses, namespaces, paths, numbers.

    Sets become sorted lists. JSON has no infinities and no NaN: they become the text "inf", "-inf" and "nan".

    Raises:
        InvalidInputError: something in it has no JSON form.
    """
    try:
        plain = msgspec.to_builtins(config, enc_hook=_plain, str_keys=True, order="sorted")
        return msgspec.json.encode(_without_nonfinite(plain), order="sorted")
    except (TypeError, NotImplementedError, RecursionError, ValueError) as error:
        raise InvalidInputError(
            f"config: {error}. Give plain values (dict, dataclass, Namespace, numbers, text)."
        ) from error


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float):  # a subclass, which msgspec leaves to us
        return _builtin(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return value.item()
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        return vars(value)
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


class ItemChange(NamedTuple):
    """An item of a plain config that has another value; ABSENT on the side that lacks it."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if self.after is ABSENT:
            return f"{self.path} was {self.before!r}, is gone"
        if self.before is ABSENT:
            return f"{self.path} is new: {self.after!r}"
        return f"{self.path}: {self.before!r} → {self.after!r}"


def item_changes(old: Any, new: Any, path: str = "") -> Iterator[ItemChange]:
    """Item-by-item differences of two plain configs; paths are dotted."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            name = f"{path}.{key}" if path else str(key)
            if key in old and key in new:
                yield from item_changes(old[key], new[key], name)
            else:
                yield ItemChange(name, old.get(key, ABSENT), new.get(key, ABSENT))
    elif msgspec.json.encode(old) != msgspec.json.encode(new):  # 1, 1.0 and True are three values
        yield ItemChange(path or "config", old, new)


def changed_items(old: Any, new: Any) -> list[str]:
    """Item-by-item differences of two plain configs, as text; the first of very many."""
    found = [str(change) for change in item_changes(old, new)]
    return found if len(found) <= _SHOWN else [*found[:_SHOWN], f"and {len(found) - _SHOWN} more"]
