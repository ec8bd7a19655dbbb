"""`casckpt export`: a snapshot as files that need no casckpt: safetensors and JSON.

::

    DIR/step_0000001200/
        snapshot.json             the snapshot, its config and versions, and the files of each component
        <component>.safetensors   its tensors, arrays, long bytes and pickles
        <component>.json          its tree, scalars in place, and what the file beside it cannot say
        <component>.arrow         of a ring: its rows, as an Arrow file

A tensor's name is its path inside the component. Memory that leaves share is written once: a leaf whose elements are
all those of another one has its name; views that overlap in part are written each for itself, and the JSON says where
they lie in one block. The folder appears whole or not at all.

Components are written one after the other; the memory that takes is the largest of them, once more for what of it is
strided or overlaps. Releases of safetensors that copy before they write (0.4 does) take it once more.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from casckpt.cli import _safetensors
from casckpt.cli._screen import (
    chosen_run,
    json_option,
    looking,
    plain,
    print_json,
    progress,
    ref_argument,
    run_option,
    say,
    snapshot_json,
    store_argument,
)
from casckpt.cli._text import plural, size
from casckpt.cli._tree import tree_node
from casckpt.digest import digest
from casckpt.errors import AlreadyExistsError, NotFoundError
from casckpt.state.gather import gather

if TYPE_CHECKING:
    from casckpt.store.contents import Contents
    from casckpt.store.inspection import Inspection
    from casckpt.store.values import Snapshot

STEP_DIGITS = 10
_STEM_SIZE_MAX = 150  # with ending and digits below the 255 bytes that file systems allow
_RESERVED = ("snapshot",)

Wanted = Mapping[str, "list[str] | None"]  # component → leaf paths, None for all


@click.command()
@store_argument
@ref_argument(is_required=True)
@click.argument("folder", metavar="DIR")
@run_option
@click.option("--only", multiple=True, metavar="PATH", help="A component or leaf path; repeatable. [default: all]")
@json_option
def export(path: str, ref: str, folder: str, run: str | None, only: tuple[str, ...], as_json: bool) -> None:
    """Write a snapshot as safetensors and JSON files into DIR/step_<step>/, bit-exactly.

    The folder must not be there yet. It appears whole, or not at all.
    """
    from casckpt.store.restore import choose

    with looking(path) as (store, inspection):
        snapshot = inspection.find(ref, chosen_run(inspection, run))
        wanted = choose(snapshot.components, only or None, snapshot.step)
        target = os.path.join(folder, f"step_{snapshot.step:0{STEP_DIGITS}d}")
        about = {"store_id": store.store_id.hex(), "context": store.context(snapshot.id).to_dict()}
        with progress("components") as bar:
            files = _export(inspection, snapshot, wanted, target, about, bar)
    total = sum(each["bytes"] for each in files.values())
    if as_json:
        document = {"store": store.path, "snapshot": snapshot_json(snapshot), "folder": target, "components": files}
        print_json("export", document)
    else:
        say(f"{snapshot}: {plural(len(files), 'component')}, {size(total)} in {target}")


def _export(
    inspection: Inspection,
    snapshot: Snapshot,
    wanted: Wanted,
    target: str,
    about: Mapping[str, Any],
    bar: Callable[[int, int], None] | None,
) -> dict[str, dict[str, Any]]:
    """Write everything beside the target, then give it its name."""
    files: dict[str, dict[str, Any]] = {}
    stems = stems_of(list(wanted))
    with _appearing(target) as working:
        for done, (name, paths) in enumerate(wanted.items(), 1):
            contents = inspection.contents(snapshot, name)
            files[name] = _Component(name, contents, paths).write(working, stems[name], snapshot.components[name].step)
            ring = contents.ring() if paths is None else None
            if ring is not None:
                files[name]["rows"] = f"{stems[name]}.arrow"
                ring.write(os.path.join(working, files[name]["rows"]), "arrow")
                files[name]["bytes"] += os.path.getsize(os.path.join(working, files[name]["rows"]))
            if bar is not None:
                bar(done, len(wanted))
        _write_json(
            os.path.join(working, "snapshot.json"), {"snapshot": snapshot_json(snapshot), **about, "files": files}
        )
    return files


@contextlib.contextmanager
def _appearing(target: str) -> Iterator[str]:
    """A temporary folder beside `target` that takes its name when the block ends, and is removed when it raises.

    Raises:
        AlreadyExistsError: the target is there already.
    """
    parent = os.path.dirname(os.path.abspath(target))
    _refuse_existing(target)
    os.makedirs(parent, exist_ok=True)
    working = os.path.join(parent, f".{os.path.basename(target)}.{secrets.token_hex(6)}.tmp")
    os.mkdir(working)
    try:
        yield working
        _sync_folder(working)
        _refuse_existing(target)  # a rename would take the place of an empty folder
        os.rename(working, target)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
    _sync_folder(parent)


def _refuse_existing(target: str) -> None:
    if os.path.lexists(target):
        raise AlreadyExistsError(f"{target} is there already. Remove it, or export into another folder.", path=target)


def _sync_folder(path: str) -> None:
    if os.name == "nt":
        return  # Windows has no folder descriptors
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: str, document: Mapping[str, Any]) -> None:
    with open(path, "x", encoding="ascii") as file:
        json.dump(plain(document), file, indent=1, ensure_ascii=True, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def stems_of(names: Sequence[str]) -> dict[str, str]:
    """File names without ending for components: harmless on every file system, and different from each other.

    Everything but ASCII letters, digits and `_ . -` is percent-encoded, a leading dot too; long names are cut and get
    a digest; names that differ in case alone, or are taken by a file of the folder, too.
    """
    found: dict[str, str] = {}
    used = set(_RESERVED)
    for name in names:
        stem = quote(name, safe="", errors="surrogatepass").replace("~", "%7E")
        stem = f"%2E{stem[1:]}" if stem.startswith(".") else stem
        mark = digest(name.encode("utf-8", "surrogatepass")).hex()[:16]
        if not stem or len(stem) > _STEM_SIZE_MAX or stem.casefold() in used:
            stem = f"{stem[:_STEM_SIZE_MAX]}-{mark}"
        used.add(stem.casefold())
        found[name] = stem
    return found


class _Component:
    """One component on its way into its two files."""

    def __init__(self, name: str, contents: Contents, paths: list[str] | None) -> None:
        self._name = name
        self._contents = contents
        self._leaves = contents.structure.leaves
        self._names: dict[int, str] = {}  # leaf → tensor name
        self._facts: dict[str, dict[str, Any]] = {}
        self._forms: dict[str, _safetensors.TensorForm] = {}
        self._index: dict[str, int] = {}  # tensor name → leaf
        self._collect(paths)

    def _collect(self, paths: list[str] | None) -> None:
        """Name every wanted leaf once; further paths to the same elements share the name."""
        same: dict[Any, str] = {}
        found_paths: set[str] = set()
        for facts in self._contents.leaves():
            hits = {path for path in paths or () if facts.path == path or facts.path.startswith(path + "/")}
            found_paths |= hits
            if facts.leaf is None or (paths is not None and not hits):
                continue
            leaf = self._leaves[facts.leaf]
            elements = (leaf.block, leaf.offset, leaf.kind, leaf.dtype, leaf.shape, leaf.strides)
            name = same.get(elements) if leaf.block >= 0 else self._names.get(facts.leaf)
            if name is None:
                name = self._new_name(facts.path)
                form = _safetensors.form_of(leaf.kind, leaf.dtype, leaf.shape, facts.size_bytes)
                self._forms[name], self._index[name], same[elements] = form, facts.leaf, name
                self._facts[name] = _tensor_facts(facts.kind, leaf, form)
            self._names[facts.leaf] = name
            self._facts[name]["paths"].append(facts.path)
        missing = sorted(set(paths or ()) - found_paths)
        if missing:
            raise NotFoundError(f"{missing[0]}: no such leaf. `casckpt show --leaves` lists them.", path=missing[0])

    def _new_name(self, path: str) -> str:
        """The path inside the component. "~" in paths is always followed by 0 or 1, so "~2" makes it another name."""
        name = path.removeprefix(self._name + "/")
        name = f"~{name}" if name == "__metadata__" else name
        number, unique = 1, name
        while unique in self._forms:
            number += 1
            unique = f"{name}~{number}"
        return unique

    def write(self, folder: str, stem: str, step: int) -> dict[str, Any]:
        """Both files, synced; returns their names and sizes. Memory: see `_data`."""
        self._note_overlaps()
        tree = tree_node(self._contents.structure, self._contents.scalars(), self._names.get)
        tensors, document = f"{stem}.safetensors", f"{stem}.json"
        about = {"format": "pt", "component": self._name, "tree": document}
        written = _safetensors.write(os.path.join(folder, tensors), self._data(), about)
        whole = {"component": self._name, "step": step, "tensors": self._facts, "tree": tree}
        _write_json(os.path.join(folder, document), whole)
        return {"tensors": tensors, "tree": document, "bytes": written}

    def _note_overlaps(self) -> None:
        """Say which tensors lie in one block of memory; their offsets and strides tell how."""
        blocks: dict[int, list[str]] = {}
        for name, index in self._index.items():
            blocks.setdefault(self._leaves[index].block, []).append(name)
        for block, names in blocks.items():
            if block >= 0 and len(names) > 1:
                for name in names:
                    leaf = self._leaves[self._index[name]]
                    place = {"block": block, "offset_bytes": leaf.offset, "strides": leaf.strides}
                    self._facts[name]["overlaps"] = {"with": [other for other in names if other != name], **place}

    def _data(self) -> dict[str, Any]:
        """The tensors to be written, by name: views of the component's blocks where their bytes lie so.

        Memory: the blocks of the wanted leaves, and copies of those that are strided or overlap others.
        """
        memory = self._contents.read_blocks({self._leaves[at].block for at in self._index.values()} - {-1})
        found = {}
        for name, index in self._index.items():
            leaf = self._leaves[index]
            data = gather(leaf, memory.get(leaf.block, memoryview(b"")))
            if data.readonly or "overlaps" in self._facts[name]:  # the library refuses two tensors over one memory
                data = memoryview(bytearray(data))
            found[name] = _safetensors.tensor(self._forms[name], data)
        return found


def _tensor_facts(kind: str, leaf: Any, form: _safetensors.TensorForm) -> dict[str, Any]:
    facts = {"paths": [], "kind": kind, "dtype": leaf.dtype, "shape": list(leaf.shape), "stored_as": form.meaning}
    if leaf.flags:
        from casckpt.format.structure import PARAMETER, REQUIRES_GRAD

        facts["is_parameter"] = bool(leaf.flags & PARAMETER)
        facts["requires_grad"] = bool(leaf.flags & REQUIRES_GRAD)
    return facts
