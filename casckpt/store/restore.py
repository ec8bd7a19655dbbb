"""Snapshot to state: chunks read straight into memory that is handed out, or into live objects.

A restore is a pure read; it moves no handle. Everything is checked before memory is allocated from a stored number:
the structure's layout must be the one that the manifest counts, and every chunk must have the size that the layout
gives it.

Into live objects, `atomic` reads and hashes everything once before the first target is touched, and then streams it in;
without it each target is written as the data comes, and an error says which leaves were touched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from casckpt.errors import (
    CasckptError,
    CorruptionError,
    IncompleteError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
)
from casckpt.format.layout import SCALARS, Layout, plan_layout
from casckpt.format.snapshot import ComponentRef, Manifest, RingManifest
from casckpt.format.structure import Structure, decode_structure, leaf_places, opaque_paths
from casckpt.ids import ObjectId, SnapshotId, short
from casckpt.index.tables import Place
from casckpt.objects.keeper import IndexKeeper
from casckpt.objects.reader import Request
from casckpt.state.build import Assembly
from casckpt.state.differences import mismatch
from casckpt.state.target import Target
from casckpt.storage.fs import FileMap
from casckpt.store.catalog import Catalog
from casckpt.store.ring_reader import RingReader
from casckpt.store.ring_target import ColdTarget, RingTarget, make_target


@dataclass
class Stored:
    """A component as it lies in the store, checked and ready to be read; or a `part` of it, as messages say it."""

    name: str
    ref: ComponentRef
    manifest: Manifest
    structure: Structure
    layout: Layout
    ids: list[ObjectId]
    places: list[list[Place]]
    part: str = ""
    snapshot_id: SnapshotId | None = None

    def opaque_paths(self) -> list[str]:
        return opaque_paths(self.structure, self.name)

    def paths_in(self, chunk: int) -> list[str]:
        """The leaf paths whose bytes lie in a chunk, for messages."""
        blocks = {part.block for part in self.layout.parts(chunk)}
        leaves = {index for index, leaf in enumerate(self.structure.leaves) if leaf.block in blocks}
        return [
            place.path
            for place in leaf_places(self.structure, self.name)
            if (place.leaf in leaves if place.leaf is not None else SCALARS in blocks)
        ]


class Restorer:
    """Restores for one store handle. Thread-safe: it holds nothing between calls."""

    def __init__(self, keeper: IndexKeeper, catalog: Catalog) -> None:
        self._keeper = keeper
        self._catalog = catalog

    @property
    def catalog(self) -> Catalog:
        """What the snapshots of the store are."""
        return self._catalog

    def components(self, snapshot_id: SnapshotId, only: Sequence[str] | None) -> tuple[list[Stored], dict[str, Any]]:
        """The wanted components, and for those wanted in part the leaf paths.

        Raises:
            NotFoundError: `only` names something that is not in the snapshot, or was withdrawn from it.
        """
        snapshot = self._catalog.load(snapshot_id)
        wanted = choose(snapshot.components, only, snapshot.step)
        self._catalog.check_not_thinned(snapshot_id, wanted, snapshot.step)
        return [self.load(name, snapshot.components[name], snapshot_id=snapshot_id) for name in wanted], wanted

    def load(self, name: str, ref: ComponentRef, part: str = "", *, snapshot_id: SnapshotId | None = None) -> Stored:
        """Read and check everything of a component, or of a part of it, but its data.

        Raises:
            CorruptionError, IncompleteError, NotFoundError: with `component`.
        """
        try:
            manifest = self._catalog.manifest(ref.manifest)
            structure = decode_structure(self._keeper.reader.read(ObjectId(manifest.structure)))
            ids = self._catalog.chunk_ids(manifest)
            _check_sizes(structure, manifest)
            layout = plan_layout(structure.blocks, manifest.scalars_size, manifest.chunk_size)
            if layout.chunk_count != len(ids) or layout.payload_size != manifest.plain_size:
                raise CorruptionError(
                    f"manifest {short(ref.manifest)}: {len(ids)} chunks, its structure has {layout.chunk_count}"
                )
            places = self._keeper.reader.locate(ids)
            for object_id, size, found in zip(ids, layout.chunk_sizes, places, strict=True):
                if found and found[0].plain_size != size:
                    raise CorruptionError(
                        f"chunk {short(object_id)}: {found[0].plain_size} bytes, the structure needs {size}",
                        object_id=object_id,
                    )
        except CasckptError as error:
            error.facts["component"] = error.component = name  # type: ignore[attr-defined]
            raise type(error)(f"component {name!r}{part}: {error.message}", **error.facts) from error
        return Stored(name, ref, manifest, structure, layout, ids, places, part, snapshot_id)

    def read(self, wanted: Sequence[tuple[Stored, Mapping[int, memoryview]]]) -> None:
        """Fill blocks of components; block SCALARS is the scalar block.

        Raises:
            CorruptionError, IncompleteError, NotFoundError: with `component`, `paths` and `object_id`.
        """
        self.read_pieces([(stored, _pieces(stored, blocks)) for stored, blocks in wanted])

    def read_pieces(self, wanted: Sequence[tuple[Stored, Mapping[int, Sequence[tuple[int, memoryview]]]]]) -> None:
        """Fill parts of chunks: for each component, by chunk, (offset in the chunk, memory); nothing: only prove it.

        Raises:
            As `read`.
        """
        requests: list[Request] = []
        places: list[list[Place]] = []
        owners: list[tuple[Stored, int]] = []
        for stored, chunks in wanted:
            for chunk, pieces in chunks.items():
                requests.append(Request(stored.ids[chunk], stored.layout.chunk_sizes[chunk], pieces, len(owners)))
                places.append(stored.places[chunk])
                owners.append((stored, chunk))
        self._read(requests, places, owners)

    def map(self, stored: Stored, chunk: int) -> FileMap | None:
        """A chunk where it lies, as private memory, hashed; None where it is not raw in a pack."""
        return self._keeper.reader.map(stored.ids[chunk], stored.layout.chunk_sizes[chunk])

    def prove(self, wanted: Sequence[tuple[Stored, Mapping[int, memoryview]]]) -> None:
        """Read and hash every chunk that a later `read` needs, keeping nothing."""
        self.read_pieces(
            [
                (stored, {span.chunk: () for block in sorted(blocks) for span in stored.layout.spans(block)})
                for stored, blocks in wanted
            ]
        )

    def _read(self, requests: list[Request], places: list[list[Place]], owners: list[tuple[Stored, int]]) -> None:
        try:
            self._keeper.reader.read_many(requests, places)
        except CasckptError as error:
            tag = error.facts.pop("request_tag", None)
            if tag is None:
                raise
            stored, chunk = owners[tag]
            paths = stored.paths_in(chunk)
            shown = ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
            facts = {**error.facts, "component": stored.name, "paths": paths, "object_id": stored.ids[chunk]}
            raise type(error)(
                f"component {stored.name!r}{stored.part} ({shown}), chunk {short(stored.ids[chunk])}: {error.message}",
                **facts,
            ) from error

    # --- as values ---

    def values(
        self, snapshot_id: SnapshotId, only: Sequence[str] | None, device: Any, *, allow_pickle: bool
    ) -> dict[str, Any]:
        """Components as new objects; see `Store.restore`."""
        found, wanted = self.components(snapshot_id, only)
        for each in found:
            _refuse_rows(each, wanted[each.name] or ())
        assemblies = [Assembly(each.structure, each.name, only=wanted[each.name], device=device) for each in found]
        scalars = [bytearray(each.manifest.scalars_size) for each in found]
        self.read(
            [
                (stored, {**assembly.blocks, SCALARS: memoryview(buffer)})
                for stored, assembly, buffer in zip(found, assemblies, scalars, strict=True)
            ]
        )
        values = {}
        for stored, assembly, buffer in zip(found, assemblies, scalars, strict=True):
            value = assembly.tree(bytes(buffer), allow_pickle=allow_pickle)
            is_ring = isinstance(stored.manifest, RingManifest) and wanted[stored.name] is None
            values[stored.name] = RingReader(self, stored, bytes(buffer)).view(value["mutable"]) if is_ring else value
        return values

    # --- into live objects ---

    def into(
        self,
        targets: Mapping[str, Any],
        snapshot_id: SnapshotId,
        *,
        strict: bool,
        atomic: bool,
        cast: bool,
        allow_pickle: bool,
    ) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        """Fill live objects; see `Store.restore_into`. Returns facts per component, and casts."""
        snapshot = self._catalog.load(snapshot_id)
        unknown = sorted(set(targets) - set(snapshot.components))
        if unknown and strict:
            raise MismatchError(
                f"step {snapshot.step} has no component {unknown}; it has {sorted(snapshot.components)}. "
                "Restore under the names that were committed.",
                missing=unknown,
            )
        wanted = {name: target for name, target in targets.items() if name in snapshot.components}
        self._catalog.check_not_thinned(snapshot_id, wanted, snapshot.step)
        stored = {name: self.load(name, snapshot.components[name], snapshot_id=snapshot_id) for name in wanted}
        live = self._match(wanted, stored, strict=strict, cast=cast)
        scalars = self._scalars(stored)
        for name, target in live.items():
            target.check(scalars[name], allow_pickle)
        rings = [target for target in live.values() if isinstance(target, RingTarget)]
        if atomic:
            self.prove([(stored[name], target.blocks) for name, target in live.items()])
            for ring in rings:
                ring.prove()
        try:
            self.read([(stored[name], target.blocks) for name, target in live.items()])
            for ring in rings:
                ring.fill()
            for name in sorted(live, key=lambda name: live[name].restore_last):
                live[name].finish(scalars[name], allow_pickle)
        except CasckptError as error:
            touched = [path for target in live.values() for path in _touched(target)]
            raise IncompleteError(
                f"the restore stopped half way: {error.message} {len(touched)} leaves may hold new values "
                f"({', '.join(touched[:4])}{' …' if len(touched) > 4 else ''}). Restore again, from another step if "
                "need be, before these objects are used.",
                touched=touched,
                **{key: value for key, value in error.facts.items() if key != "touched"},
            ) from error
        facts = {
            name: {
                "step": stored[name].ref.step,
                "manifest": stored[name].ref.manifest.hex(),
                "bytes": stored[name].manifest.plain_size,
                "leaf_count": len(stored[name].structure.leaves),
                **(target.facts() if isinstance(target, RingTarget | ColdTarget) else {}),
            }
            for name, target in live.items()
        }
        return facts, {cast.path: cast.max_change for target in live.values() for cast in target.casts}

    def _scalars(self, stored: Mapping[str, Stored]) -> dict[str, bytes]:
        """The scalar blocks: small, and needed before anything is touched."""
        buffers = {name: bytearray(each.manifest.scalars_size) for name, each in stored.items()}
        self.read([(each, {SCALARS: memoryview(buffers[name])}) for name, each in stored.items()])
        return {name: bytes(buffer) for name, buffer in buffers.items()}

    def _match(
        self,
        targets: Mapping[str, Any],
        stored: Mapping[str, Stored],
        *,
        strict: bool,
        cast: bool,
    ) -> dict[str, Target]:
        """Compare all targets with what is stored; every difference of every component in one error."""
        live = {
            name: make_target(target, stored[name], self, strict=strict, cast=cast) for name, target in targets.items()
        }
        differences = [difference for target in live.values() for difference in target.differences]
        if differences:
            raise mismatch(differences)
        return live


def choose(components: Collection[str], only: Sequence[str] | None, step: int) -> dict[str, list[str] | None]:
    """The wanted components, and for those wanted in part the leaf paths.

    Raises:
        NotFoundError: a path that names no component and no leaf in one.
    """
    wanted: dict[str, list[str] | None] = dict.fromkeys(components) if only is None else {}
    for path in only or ():
        name = max((n for n in components if path == n or path.startswith(n + "/")), key=len, default=None)
        if name is None:
            raise NotFoundError(
                f"{path!r} is no component of step {step} and no leaf in one; it has {sorted(components)}. "
                "`casckpt show --leaves` lists the leaves.",
                path=path,
            )
        if path == name:
            wanted[name] = None
        elif wanted.get(name, []) is not None:
            wanted[name] = [*(wanted.get(name) or []), path]
    return wanted


def _refuse_rows(stored: Stored, paths: Sequence[str]) -> None:
    """What a ring has under `columns` are types, without rows: whoever asks for them wants the rows."""
    name = stored.name
    rows = [path for path in paths if f"{path}/".startswith(f"{name}/columns/")]
    if rows and isinstance(stored.manifest, RingManifest):
        raise InvalidInputError(
            f"only={rows}: {name!r} is a ring, whose rows are read from its view. Write `restore(only=[{name!r}])"
            f"[{name!r}].column(...)`.",
            paths=rows,
        )


def _check_sizes(structure: Structure, manifest: Manifest) -> None:
    """Before a layout is computed from them: block sizes must add up to what the manifest says."""
    total = sum(size for size, _ in structure.blocks) + manifest.scalars_size
    if total != manifest.plain_size:
        raise CorruptionError(f"manifest counts {manifest.plain_size} bytes, its structure {total}")


def _pieces(stored: Stored, memory: Mapping[int, memoryview]) -> dict[int, list[tuple[int, memoryview]]]:
    """For each chunk that is needed, which parts of it go where."""
    pieces: dict[int, list[tuple[int, memoryview]]] = {}
    for block, view in memory.items():
        for chunk, offset, start, size in stored.layout.spans(block):
            pieces.setdefault(chunk, []).append((offset, view[start : start + size]))
    return pieces


def _touched(target: Target) -> list[str]:
    """Leaves that may hold new values: those streamed into, and those already copied."""
    direct = [path for paths in target.direct_paths.values() for path in paths]
    return list(dict.fromkeys([*direct, *target.leaf_paths_touched]))
