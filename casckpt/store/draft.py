"""What a commit is asked to store: arguments checked, state captured, context compared with the parent's."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from casckpt.codec.level import Level, find_level
from casckpt.errors import ConfigDriftWarning, InvalidInputError
from casckpt.format.entry import MetricValue
from casckpt.format.snapshot import CONTEXT_VERSION, NECESSITIES, Context
from casckpt.replay.ring import Ring, StoredRing, Take
from casckpt.state.capture import Captured, capture
from casckpt.store.catalog import check_name, check_step
from casckpt.store.rings import is_segment
from casckpt.store.settle import changed_items, plain_config, plain_labels, plain_metrics
from casckpt.version import __version__

REST = "*"  # as `inherit`: whatever the parent has beside what is given and dropped
WORLD_SIZE = "WORLD_SIZE"  # in the environment: how many processes train together, as torchrun and others set it
_WATCHED = ("numpy", "torch", "gymnasium")  # libraries whose versions take part in what a state means


@dataclass
class Draft:
    """A commit to be made. `context` is complete: the parent's, with what this commit changes.

    `previous` are earlier copies of components, whose memory may be reused at any time: whoever reads them copies first
    and then proves what was copied. With `inherits_rest`, `inherit` is what the parent, once it is known, has beside
    what is given and dropped. `is_copy`: `captured` are copies, which nobody else writes to.
    """

    step: int
    captured: Mapping[str, Captured]
    metrics: dict[str, MetricValue]
    labels: dict[str, str]
    context: Context
    inherit: Sequence[str]
    drop: Sequence[str]
    necessity: Mapping[str, str]
    levels: Mapping[str, Level]
    previous: Mapping[str, Captured] = field(default_factory=dict)
    inherits_rest: bool = False
    is_copy: bool = False
    takes: Mapping[str, Take] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The components given. `captured` also holds segments of rings, under names that no component can have."""
        return [name for name in self.captured if not is_segment(name)]

    def settle(self, addresses: Mapping[str, bytes]) -> None:
        """Tell rings where their rows are now, or that they are nowhere. Only the first time counts."""
        for name, take in self.takes.items():
            take.settle(addresses.get(name))

    def release(self) -> None:
        """Let go of the user's objects; what is needed to recognise their structure stays."""
        for each in self.captured.values():
            each.release()


@dataclass(frozen=True)
class Options:
    """What a commit takes beside step and state; see `Store.commit`."""

    metrics: Mapping[str, MetricValue] | None
    labels: Mapping[str, str] | None
    config: Any
    schema_version: int | None
    inherit: Sequence[str]
    drop: Sequence[str]
    necessity: Mapping[str, str] | None
    levels: Mapping[str, str] | None
    allow_pickle: bool


class Drafter:
    """Makes drafts for one handle; keeps the last capture of each component to recognise an unchanged structure."""

    def __init__(self, stored_ring: Callable[[str], StoredRing | None]) -> None:
        self._stored_ring = stored_ring
        self._captured: dict[str, Captured] = {}
        self._configs_seen: set[bytes] = set()

    def remember(self, captured: Iterable[Captured]) -> None:
        """Know the structure of these components, so that their next capture need not make it."""
        for each in captured:
            self._captured[each.component] = each
            each.release()

    def draft(self, step: int, state: Mapping[str, Any], parent: Context | None, options: Options) -> Draft:
        """Check everything that can be checked before anything is read, then capture. See `Store.commit`."""
        number = check_step(step)
        _check_arguments(number, state, options)
        inherits_rest = options.inherit == REST
        inherit = () if inherits_rest else tuple(options.inherit)
        necessity, drop = dict(options.necessity or {}), tuple(options.drop)
        plain = plain_metrics(options.metrics or {}), plain_labels(options.labels or {})
        levels = {name: find_level(level) for name, level in (options.levels or {}).items()}
        context = self._context(number, parent, options.config, options.schema_version)
        captured: dict[str, Captured] = {}
        takes: dict[str, Take] = {}
        rings = {id(value): name for name, value in state.items() if isinstance(value, Ring)}
        for name, value in state.items():
            previous = self._captured.get(check_name(name, "component"))
            if isinstance(value, Ring):
                if rings[id(value)] != name:
                    raise InvalidInputError(
                        f"components {name!r} and {rings[id(value)]!r} are the same Ring: give it once, or wrap the "
                        "buffer twice.",
                        names=[name, rings[id(value)]],
                    )
                continue
            captured[name] = capture(name, value, allow_pickle=options.allow_pickle, previous=previous)
        try:
            for name, value in state.items():
                if isinstance(value, Ring):
                    takes[name] = value.take(name, number, self._stored_ring(name), self._captured)
                    captured.update(takes[name].captured)
        except BaseException:
            for take in takes.values():
                take.settle(None)  # nobody commits it: what is stored of its ring is what was before
            raise
        others = [name for name in self._captured if not is_segment(name)] if inherits_rest else inherit
        kept = {name: self._captured[name] for name in others if name in self._captured and name not in drop}
        self._captured = {**kept, **captured}
        draft = Draft(number, captured, *plain, context, inherit, drop, necessity, levels, takes=takes)
        draft.inherits_rest = inherits_rest
        return draft

    def _context(self, step: int, parent: Context | None, config: Any, schema_version: int | None) -> Context:
        if schema_version is not None and (type(schema_version) is not int or not 0 <= schema_version < 1 << 63):
            raise InvalidInputError(f"schema_version={schema_version!r}: expected an integer from 0 to 2**63 - 1")
        old = parent.config if parent else b""
        encoded = old if config is None else plain_config(config)
        if old and encoded != old and encoded not in self._configs_seen:
            self._configs_seen.add(encoded)
            items = changed_items(msgspec.json.decode(old), msgspec.json.decode(encoded))
            warnings.warn(
                f"step {step}: the config differs from the parent's: {'; '.join(items)}",
                ConfigDriftWarning,
                stacklevel=4,
            )
        kept = parent.schema_version if parent else 1
        return Context(
            CONTEXT_VERSION, kept if schema_version is None else schema_version, encoded, environment_versions()
        )


def _check_arguments(step: int, state: Any, options: Options) -> None:
    inherit, drop = options.inherit, options.drop
    if not isinstance(state, Mapping):
        raise InvalidInputError(
            f"state: expected a mapping of component name to its state, got {type(state).__name__}. "
            "Write `{'policy': policy, 'optimizer': optimizer}`."
        )
    if (isinstance(inherit, str) and inherit != REST) or isinstance(drop, str):
        raise InvalidInputError("inherit= and drop= take a list of component names. Write `inherit=['name']`.")
    both = [] if inherit == REST else sorted(set(inherit) & set(drop))
    if both:
        raise InvalidInputError(f"{both} in inherit= and in drop= too. Name each in one of them.", names=both)
    if not state and not inherit:
        raise InvalidInputError(f"step {step}: the state is empty. Give at least one component.")
    for name, value in (options.necessity or {}).items():
        if value not in NECESSITIES:
            raise InvalidInputError(f"necessity[{name!r}]={value!r}: expected one of {', '.join(NECESSITIES)}")
    for option, named in (("necessity", options.necessity), ("levels", options.levels)):
        for name in named or {}:
            if name not in state and name not in inherit and inherit != REST:
                raise InvalidInputError(f"{option}[{name!r}]: this commit has no such component")


def environment_versions() -> dict[str, str]:
    """Versions of what takes part in making a state, as far as it is loaded; and how many processes, if launched so."""
    versions = {"casckpt": __version__, "python": sys.version.split()[0]}
    if WORLD_SIZE in os.environ:
        versions["world_size"] = os.environ[WORLD_SIZE]
    for name in _WATCHED:
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", ""))
    return versions
