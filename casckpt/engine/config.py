"""All settings of an engine as one value, and how it is read from a file.

::

    store: {path: runs/walker, run: seed-0, verify: reread}
    save_budget: 0.10
    overlap: wait
    components:
      policy:   {every_steps: 500, every_seconds: 1200}
      counters: {every_steps: 100}
      replay:   {every_seconds: 1200, lane: best_effort, level: fast, recent_only: {rows: 1000000}}

A mistake is an error that names the key with its path, before anything is opened. Files are JSON or, with the extra
`casckpt[yaml]`, YAML.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, TypeVar

from casckpt.codec.level import DEFAULT_LEVEL, find_level
from casckpt.engine.strategy import Recent, SaveStrategy, check_choice, check_number
from casckpt.engine.templates import find_template
from casckpt.errors import InvalidInputError, NotFoundError
from casckpt.limits import LOCK_TIMEOUT_S
from casckpt.objects.writer import VERIFY_MODES
from casckpt.store.catalog import check_name

OVERLAPS = ("wait", "skip", "queue")
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class StoreConfig:
    """Arguments of `casckpt.open`; `create` is true here, because a file with the path in it is no typing mistake."""

    path: str
    run: str = "main"
    create: bool = True
    verify: str = "reread"
    level: str = DEFAULT_LEVEL
    lock_timeout_s: float = LOCK_TIMEOUT_S

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not self.path:
            raise InvalidInputError(f"path={self.path!r:.60}: expected the path of a folder")
        check_name(self.run, "run")
        check_choice("create", self.create, (True, False))
        check_choice("verify", self.verify, VERIFY_MODES)
        find_level(self.level)
        check_number("lock_timeout_s", self.lock_timeout_s, float)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of a `CheckpointEngine`; see there.

    Attributes:
        components: strategies by component name, for those that are registered without one.
        template: refuse the first save, and the first after a registration, that lacks what this template ("ppo",
            "sac", "dqn", "grpo", "pbt") needs; None to refuse nothing.
        aliases: role of the template → paths where it is, if names alone do not tell.
        store: what `CheckpointEngine.open` opens.
    """

    save_budget: float | None = 0.10
    overlap: str = "wait"
    queue_size: int = 2
    async_mode: bool = True
    components: Mapping[str, SaveStrategy] = field(default_factory=dict)
    template: str | None = None
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    store: StoreConfig | None = None

    def __post_init__(self) -> None:
        if self.save_budget is not None:
            check_number("save_budget", self.save_budget, float)
            if self.save_budget > 1:
                raise InvalidInputError(f"save_budget={self.save_budget}: a share of the time, at most 1")
        check_choice("overlap", self.overlap, OVERLAPS)
        check_number("queue_size", self.queue_size, int)
        check_choice("async_mode", self.async_mode, (True, False))
        if self.template is not None:
            find_template(self.template)


def read_config(source: EngineConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> EngineConfig:
    """A config from whatever says it.

    Raises:
        InvalidInputError: names the key that is unknown or wrong.
        NotFoundError: there is no such file.
    """
    if source is None:
        return EngineConfig()
    if isinstance(source, EngineConfig):
        return source
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        return _engine_config(_read_file(path), path)
    return _engine_config(source, "config")


def _engine_config(values: Any, where: str) -> EngineConfig:
    values = dict(_mapping(values, where))
    components = _mapping(values.get("components") or {}, f"{where}: components")
    values["components"] = {
        check_name(name, "component"): _strategy(strategy, f"{where}: components.{name}")
        for name, strategy in components.items()
    }
    if not isinstance(values.get("store"), StoreConfig | None):
        values["store"] = _build(StoreConfig, _mapping(values["store"], f"{where}: store"), f"{where}: store")
    return _build(EngineConfig, values, where)


def _strategy(values: Any, where: str) -> SaveStrategy:
    if isinstance(values, SaveStrategy):
        return values
    values = dict(_mapping(values, where))
    if isinstance(values.get("recent_only"), Mapping):
        values["recent_only"] = _build(Recent, values["recent_only"], f"{where}.recent_only")
    return _build(SaveStrategy, values, where)


def _build(kind: type[Kind], values: Mapping[str, Any], where: str) -> Kind:
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise InvalidInputError(f"{where}: unknown key {key!r:.60}. There are {', '.join(known)}.", key=key)
    try:
        return kind(**values)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error.message}", **error.facts) from error
    except TypeError as error:  # a key without a default is missing
        raise InvalidInputError(f"{where}: {error}") from error


def _mapping(values: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise InvalidInputError(f"{where}: expected keys and values, found {type(values).__name__}")
    return values


def _read_file(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such config file. Check the path.", path=path) from None
    if path.endswith((".yaml", ".yml")):
        return _read_yaml(text, path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"{path}: no JSON ({error}). Name YAML files *.yaml.", path=path) from error


def _read_yaml(text: str, path: str) -> Any:
    try:
        yaml: Any = import_module("yaml")
    except ImportError as error:
        raise InvalidInputError(
            f"{path}: YAML needs a library that is not installed. Run `pip install 'casckpt[yaml]'`, or write JSON.",
            path=path,
        ) from error
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise InvalidInputError(f"{path}: no YAML ({error})", path=path) from error
