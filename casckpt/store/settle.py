"""User-given metadata brought into plain, comparable form: metrics, labels, configs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from casckpt.errors import InvalidInputError
from casckpt.format.entry import MetricValue
from casckpt.limits import ENTRY_SIZE_MAX

_METADATA_SIZE_MAX = ENTRY_SIZE_MAX // 16  # an entry also holds inline objects; larger tables belong into the state
_SHOWN = 20


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, MetricValue]:
    """Names to numbers or text. Scalars of numpy and torch become Python's."""
    found: dict[str, MetricValue] = {}
    for name, value in metrics.items():
        plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
        if not isinstance(name, str) or not isinstance(plain, bool | int | float | str):
            raise InvalidInputError(
                f"metrics[{name!r}]={value!r:.60}: expected text to a number, bool or text", name=name
            )
        if isinstance(plain, int) and not -(1 << 63) <= plain < 1 << 64:
            raise InvalidInputError(f"metrics[{name!r}]: an integer beyond 64 bits. Use a float or text.", name=name)
        found[name] = plain
    _check_size(found, "metrics")
    return found


def plain_labels(labels: Mapping[str, Any]) -> dict[str, str]:
    """Names to text."""
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidInputError(f"labels[{name!r}]={value!r:.60}: expected text to text", name=name)
    _check_size(dict(labels), "labels")
    return dict(labels)


def _check_size(value: Any, what: str) -> None:
    size = len(msgspec.msgpack.encode(value))
    if size > _METADATA_SIZE_MAX:
        raise InvalidInputError(
            f"{what}: {size} bytes, at most {_METADATA_SIZE_MAX} are allowed. Put large tables into the state."
        )


def plain_config(config: Any) -> bytes:
    """Canonical JSON of a config: dicts, dataclasses, namespaces, paths, numbers.

    Raises:
        InvalidInputError: something in it has no JSON form.
    """
    try:
        return msgspec.json.encode(msgspec.to_builtins(config, enc_hook=_plain, str_keys=True), order="sorted")
    except (TypeError, NotImplementedError, RecursionError, ValueError) as error:
        raise InvalidInputError(
            f"config: {error}. Give plain values (dict, dataclass, Namespace, numbers, text)."
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return value.item()
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        return vars(value)
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def changed_items(old: Any, new: Any, path: str = "") -> list[str]:
    """Item-by-item differences of two plain configs, as text."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in [*old, *(key for key in new if key not in old)]:
            name = f"{path}.{key}" if path else str(key)
            if key not in new:
                found.append(f"{name} was {old[key]!r}, is gone")
            elif key not in old:
                found.append(f"{name} is new: {new[key]!r}")
            else:
                found += changed_items(old[key], new[key], name)
        return found if path or len(found) <= _SHOWN else [*found[:_SHOWN], f"and {len(found) - _SHOWN} more"]
    return [] if old == new else [f"{path or 'config'}: {old!r} → {new!r}"]
