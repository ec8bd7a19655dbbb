"""Snapshots loaded with changes: migrated to today's schema, in parts, with values kept or set.

`Store.restore_into` puts a snapshot into live objects as it is. `load_into` does the same, and where something is to
differ takes a detour by trees: restore, migrate, put kept and overriding values in, compare, and only then fill the
live objects. Components that nothing is asked of go straight from the store. Whatever can be refused is refused before
the first live object is touched.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from casckpt.arguments import FLAG, MAPPING, TEXT, TEXTS, WHOLE, checked, maybe
from casckpt.errors import ConfigDriftWarning, InvalidInputError, MismatchError
from casckpt.recovery.migrations import Migrate, Migrations, migrate, registered
from casckpt.recovery.paths import check_kind, component_of, find_places, replace_at, value_at
from casckpt.replay.view import RingView
from casckpt.state.rng import RngState
from casckpt.state.rng_guard import RngGuard
from casckpt.state.transfer import Transfer, copy_tree
from casckpt.store.settle import ABSENT, ItemChange, item_changes, plain_config
from casckpt.store.store import Store
from casckpt.store.values import Snapshot, Value


@dataclass(frozen=True)
class LoadReport(Value):
    """What `load_into` did.

    Attributes:
        snapshot: what was loaded.
        components: those that live objects were filled with, wholly or in part.
        schema_versions: (stored, loaded); give the second to the next `commit`.
        taken: leaf paths that came from the snapshot, of components that were loaded in part.
        kept, overridden: leaf paths that kept their live value, or were given another.
        gone: components of the snapshot that the migrations did away with: name them in the next commit's `drop=`.
        config_changes: items of the config that differ from those of the snapshot, as text.
    """

    snapshot: Snapshot
    components: tuple[str, ...]
    schema_versions: tuple[int, int]
    taken: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    config_changes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "snapshot": self.snapshot.to_dict()}

    def __str__(self) -> str:
        lines = [f"loaded {self.snapshot}: {', '.join(self.components)}"]
        stored, loaded = self.schema_versions
        lines += [f"  migrated from schema version {stored} to {loaded}"] if stored != loaded else []
        for what in ("taken", "kept", "overridden", "gone", "config_changes"):
            found = getattr(self, what)
            lines += [f"  {what.replace('_', ' ')}: {', '.join(found)}"] if found else []
        return "\n".join(lines)


@checked(store=Store, fatal=TEXTS)
def config_drift(store: Store, config: Any, ref: Any = "latest", *, fatal: Sequence[str] = ()) -> list[ItemChange]:
    """What of a config is not as a snapshot has it, item by item.

    Args:
        config: anything JSON-like, as for `Store.commit`.
        fatal: dotted paths, with `*` for anything, of items that must not differ.

    Raises:
        MismatchError: one of `fatal` does; `items` holds them.
    """
    stored = store.context(ref).config
    changes = list(item_changes({} if stored is None else stored, msgspec.json.decode(plain_config(config))))
    broken = [change for change in changes if any(fnmatch.fnmatchcase(change.path, pattern) for pattern in fatal)]
    if broken:
        raise MismatchError(
            f"the config differs from that of {store.snapshot(ref)} in what must not: "
            f"{'; '.join(map(str, broken))}. Nothing was touched. Set it back, or take the item out of fatal=.",
            items=[(c.path, *(None if v is ABSENT else v for v in (c.before, c.after))) for c in broken],
        )
    return changes


@checked(
    store=Store,
    targets=MAPPING,
    only=maybe(TEXTS),
    keep=TEXTS,
    override=maybe(MAPPING),
    schema_version=maybe(WHOLE),
    migrations=Migrations,
    fatal=TEXTS,
    strict=FLAG,
    cast=FLAG,
    allow_mixed=FLAG,
    is_resume=FLAG,
    branch=maybe(TEXT),
)
def load_into(
    store: Store,
    targets: Mapping[str, Any],
    ref: Any = "latest",
    *,
    only: Sequence[str] | None = None,
    keep: Sequence[str] = (),
    override: Mapping[str, Any] | None = None,
    schema_version: int | None = None,
    migrations: Migrations = registered,
    config: Any = None,
    fatal: Sequence[str] = (),
    strict: bool = True,
    cast: bool = False,
    allow_mixed: bool = False,
    is_resume: bool = False,
    branch: str | None = None,
) -> LoadReport:
    """Fill live objects from a snapshot, with changes.

    Paths are leaf paths, or name a container and with it all that is below; `*` stands for any one name.

    Args:
        store: an open store. The snapshot may be one of another run.
        targets: component name → live object.
        ref: see `Store.snapshot`.
        only: what to take from the snapshot; everything else keeps its live value. None for all of the targets.
        keep: what keeps its live value, `optimizer/param_groups/*/lr` say.
        override: path → the value that it gets: a number for a number, a container for a container with all its names.
        schema_version: what today's code expects; None for whatever the snapshot has.
        migrations: those that lead there.
        config, fatal: today's config, and items of it that must be as in the snapshot; see `config_drift`. Others that
            differ are a `ConfigDriftWarning`.
        strict, cast, allow_mixed: as for `Store.restore_into`.
        is_resume: move the handle too: the next commit continues from this snapshot, on a branch of that name if it is
            not the head of its own.

    Cost: a restore; and for components that are changed, twice their bytes in memory meanwhile.

    Raises:
        NotFoundError: a path or reference that names nothing.
        MismatchError: schema, config, or stored and live state do not agree. Nothing was touched.
        InvalidInputError: paths that contradict each other, or an override of another kind. Nothing was touched.
        Otherwise as `Store.restore_into`.
    """
    snapshot = store.snapshot(ref)
    changes = [] if config is None else config_drift(store, config, snapshot, fatal=fatal)
    found_version = store.context(snapshot).schema_version
    chain = migrations.chain(found_version, found_version if schema_version is None else schema_version)
    selection = Selection(targets, only, keep, override or {})
    if is_resume and branch is not None:
        store._chooser.check_free(branch, "branch")
    trees, gone = _edited_trees(store, snapshot, targets, selection, chain, allow_mixed)
    straight = {name: targets[name] for name in selection.names - set(trees)}
    transfer = Transfer(trees, targets, strict=strict, cast=cast)
    if straight:
        store.restore_into(straight, snapshot, strict=strict, cast=cast, allow_mixed=allow_mixed)
    _fill_without_drawing(transfer, straight)
    if is_resume:
        store.resume(snapshot, only=[], branch=branch, allow_mixed=allow_mixed)
    if changes:
        warnings.warn(f"config: {'; '.join(map(str, changes))}", ConfigDriftWarning, stacklevel=3)  # past `checked`
    return LoadReport(
        snapshot,
        tuple(sorted(selection.names)),
        (found_version, found_version + len(chain)),
        *selection.places(),
        gone,
        tuple(map(str, changes)),
    )


def _fill_without_drawing(transfer: Transfer, restored: Mapping[str, Any]) -> None:
    """Streams come last: those that were restored stay as they are, whatever a `load_state_dict` draws."""
    streams = [RngGuard(live) for live in restored.values() if isinstance(live, RngState)]
    transfer.fill()
    for stream in streams:
        stream.put_back()


def _edited_trees(
    store: Store,
    snapshot: Snapshot,
    targets: Mapping[str, Any],
    selection: Selection,
    chain: list[Migrate],
    allow_mixed: bool,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What cannot go straight from the store, as trees to be loaded; and components that migrations took away."""
    restored = store.restore(snapshot, only=None if chain else sorted(selection.edited), allow_mixed=allow_mixed)
    state = migrate(dict(restored), chain)
    rings = {name for name, value in state.items() if isinstance(value, RingView)}
    if selection.edited & rings:
        names = sorted(selection.edited & rings)
        raise InvalidInputError(f"{names}: a ring is loaded as a whole. Leave it out of paths.", names=names)
    through = (selection.names & set(state)) - rings if chain else selection.edited
    trees = {name: selection.merge(name, state[name], targets[name]) for name in sorted(through)}
    return trees, tuple(sorted(set(restored) - set(state))) if chain else ()


class Selection:
    """Which places of which components come from the snapshot, stay as they are, or get another value.

    Attributes:
        names: components that are loaded at all.
        edited: those of them that are not loaded as they are.
        taken, kept, overridden: leaf paths, once `merge` met them.
    """

    def __init__(
        self, targets: Mapping[str, Any], only: Sequence[str] | None, keep: Sequence[str], override: Mapping[str, Any]
    ) -> None:
        self._only, self._keep, self._override = (
            _by_component(paths, targets) for paths in (only or (), keep, override)
        )
        self._values = override
        self._whole = set(targets) if only is None else {name for name, paths in self._only.items() if name in paths}
        partial = set(self._only) - self._whole
        self.names = self._whole | partial
        self.edited = partial | set(self._keep) | set(self._override)
        idle = sorted(self.edited - self.names)
        if idle:
            raise InvalidInputError(f"keep= and override= speak of {idle}, of which only= takes nothing.", names=idle)
        self.taken: list[str] = []
        self.kept: list[str] = []
        self.overridden: list[str] = []

    def places(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """What was taken, kept and overridden so far."""
        return tuple(self.taken), tuple(self.kept), tuple(self.overridden)

    def merge(self, name: str, stored: Any, live: Any) -> Any:
        """The tree that a live object is to be filled with.

        Raises:
            NotFoundError, InvalidInputError: a path names nothing, or two speak of one place.
        """
        needs_live = name not in self._whole or name in self._keep
        own = copy_tree(name, live) if needs_live else None
        tree = stored
        if name not in self._whole:
            tree = _overlay(own, stored, name, self._only[name], self.taken)
        tree = _overlay(tree, own, name, self._keep.get(name, ()), self.kept)
        for pattern in self._override.get(name, ()):
            for path, keys in find_places(tree, name, pattern).items():
                check_kind(value_at(tree, keys), self._values[pattern], path)
                tree = replace_at(tree, keys, self._values[pattern], path)
                self.overridden.append(path)
        twice = sorted(set(self.kept) & set(self.overridden))
        if twice:
            raise InvalidInputError(f"keep= and override= both speak of {twice}. Nothing was touched.", names=twice)
        return tree


def _by_component(paths: Iterable[str], targets: Mapping[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(component_of(path, targets), []).append(path)
    return found


def _overlay(tree: Any, source: Any, name: str, patterns: Iterable[str], done: list[str]) -> Any:
    """`tree` with what `source` has at the places that patterns name."""
    for pattern in patterns:
        for path, keys in find_places(source, name, pattern).items():
            tree = replace_at(tree, keys, value_at(source, keys), path)
            done.append(path)
    return tree
