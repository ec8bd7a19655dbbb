"""All settings of an engine as one value, and how it is read from a file.

::

    store: {path: runs/walker, run: seed-0, verify: reread}
    save_budget: 0.10
    overlap: wait
    components:
      policy:   {every_steps: 500, every_seconds: 1200}
      counters: {every_steps: 100}
      replay:   {every_seconds: 1200, lane: best_effort, level: fast, recent_only: {rows: 1000000}}
    maintenance: {retention: {latest: 3, every_steps: 10000}}

A mistake is an error that names the key with its path, before anything is opened; so is a key that is there twice, of
which libraries would take the last. Files are JSON or, with the extra `casckpt[yaml]`, YAML.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, TypeVar

from casckpt.codec.level import DEFAULT_LEVEL, find_level
from casckpt.engine.maintenance import MaintenanceSettings, read_maintenance
from casckpt.engine.strategy import Recent, SaveStrategy, check_choice, settle_numbers
from casckpt.engine.templates import check_aliases, find_template
from casckpt.errors import InvalidInputError, NotFoundError
from casckpt.limits import LOCK_TIMEOUT_S
from casckpt.objects.writer import VERIFY_MODES
from casckpt.store.catalog import check_name

OVERLAPS = ("wait", "skip", "queue")
Kind = TypeVar("Kind")
_SECTIONS = ("components", "aliases", "store", "maintenance")  # whose name with nothing below it, in YAML, says nothing


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
        settle_numbers(self, lock_timeout_s=float)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of a `CheckpointEngine`; see there.

    Attributes:
        components: strategies by component name, for those that are registered without one.
        template: refuse the first save, and the first after a registration, that lacks what this template ("ppo",
            "sac", "dqn", "grpo", "pbt") needs; None to refuse nothing.
        aliases: role of the template → paths where it is, if names alone do not tell.
        store: what `CheckpointEngine.open` opens.
        maintenance: retention at work beside the training, as `read_maintenance` makes it; begun and ended by the
            engine.
    """

    save_budget: float | None = 0.10
    overlap: str = "wait"
    queue_size: int = 2
    async_mode: bool = True
    components: Mapping[str, SaveStrategy] = field(default_factory=dict)
    template: str | None = None
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    store: StoreConfig | None = None
    maintenance: MaintenanceSettings | None = None

    def __post_init__(self) -> None:
        settle_numbers(self, save_budget=float, queue_size=int)
        if self.save_budget is not None and self.save_budget > 1:
            raise InvalidInputError(
                f"save_budget={self.save_budget}: a share of the time, at most 1", key="save_budget"
            )
        if self.queue_size is None:
            raise InvalidInputError("queue_size=None: expected a positive integer", key="queue_size")
        check_choice("overlap", self.overlap, OVERLAPS)
        check_choice("async_mode", self.async_mode, (True, False))
        check_aliases(self.aliases, None if self.template is None else find_template(self.template))
        _check_kind("components", self.components, Mapping)
        for name, strategy in self.components.items():
            _check_kind(f"components.{check_name(name, 'component')}", strategy, SaveStrategy)
        _check_kind("store", self.store, StoreConfig | None)
        _check_kind("maintenance", self.maintenance, MaintenanceSettings | None)


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


def _check_kind(key: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        raise InvalidInputError(
            f"{key}: {type(value).__name__} is no setting here. Give the config as a mapping or a file, or as values "
            "of EngineConfig, StoreConfig, SaveStrategy.",
            key=key,
        )


def _engine_config(values: Any, where: str) -> EngineConfig:
    values = _mapping(values, where)
    values = {key: value for key, value in values.items() if value is not None or key not in _SECTIONS}
    components = _mapping(values.get("components", {}), f"{where}: components")
    values["components"] = {
        check_name(name, "component"): _strategy(strategy, f"{where}: components.{name}")
        for name, strategy in components.items()
    }
    if "store" in values and not isinstance(values["store"], StoreConfig):
        values["store"] = build(StoreConfig, values["store"], f"{where}: store")
    if isinstance(values.get("maintenance"), Mapping):
        values["maintenance"] = read_maintenance(values["maintenance"], f"{where}: maintenance")
    return build(EngineConfig, values, where)


def _strategy(values: Any, where: str) -> SaveStrategy:
    if isinstance(values, SaveStrategy):
        return values
    values = dict(_mapping(values, where))
    if isinstance(values.get("recent_only"), Mapping):
        values["recent_only"] = build(Recent, values["recent_only"], f"{where}.recent_only")
    return build(SaveStrategy, values, where)


def build(kind: type[Kind], values: Any, where: str) -> Kind:
    """A dataclass that checks itself, from keys and values.

    Args:
        kind: the dataclass.
        values: a mapping of its fields' names.
        where: begins every message.

    Raises:
        InvalidInputError: no mapping; a key is unknown, missing or wrong.
    """
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for key in _mapping(values, where):
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
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path}: cannot be read as UTF-8 text ({error})", path=path) from error
    if path.endswith((".yaml", ".yml")):
        return _read_yaml(text, path)
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, path))
    except (ValueError, RecursionError) as error:
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
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        _refuse_twice(root, yaml.MappingNode, path, set())
        return {} if root is None else loader.construct_document(root)
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidInputError(f"{path}: no YAML ({error})", path=path) from error


def _refuse_twice(node: Any, mapping: Any, path: str, seen: set[int]) -> None:
    """Look for keys that are there twice in a document's nodes, of which YAML's constructor takes the last."""
    if node is None or isinstance(node.value, str) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, mapping):
        _unique([(key.value, None) for key, _ in node.value if isinstance(key.value, str)], path)
    for child in node.value:
        for each in child if isinstance(child, tuple) else (child,):
            _refuse_twice(each, mapping, path, seen)


def _unique(pairs: list[tuple[str, Any]], path: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise InvalidInputError(f"{path}: {', '.join(twice)} is there twice. Leave one.", path=path, key=twice[0])
    return found
