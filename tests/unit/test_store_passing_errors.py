"""What cannot be read *now* is not damage: it is never kept as a fact and never makes a restore choose another step."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec.structs import replace

import casckpt
from casckpt.errors import StorageError, StoreWarning
from casckpt.format.record import NODE
from casckpt.ids import ObjectId, SnapshotId
from casckpt.index.tables import decode_object
from casckpt.objects.keeper import IndexKeeper
from casckpt.storage.fs import LocalFileSystem, typed_error
from casckpt.storage.process import System
from casckpt.store import components
from casckpt.store.inspection import Inspection
from casckpt.store.opening import open_store
from casckpt.testing.wrapping import Operation, WrappedFileSystem

T = TypeVar("T")
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES)


class Refusing(WrappedFileSystem):
    """Refuses to open paths that contain `part`, while there is one."""

    def __init__(self, part: str, code: int) -> None:
        super().__init__(LocalFileSystem())
        self.part, self.code = part, code

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        if operation.name == "open" and self.part and self.part in operation.path:
            raise typed_error(OSError(self.code, os.strerror(self.code)), "open", operation.path)
        return super().perform(operation, act)


class BadSector(WrappedFileSystem):
    """Cannot read one place of the files whose path contains `part`."""

    def __init__(self, part: str, offset: int) -> None:
        super().__init__(LocalFileSystem())
        self.part, self.offset = part, offset

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        is_read = operation.name == "read" and self.part in operation.path
        if is_read and operation.offset <= self.offset < operation.offset + operation.size:
            raise typed_error(OSError(errno.EIO, os.strerror(errno.EIO)), "read", operation.path)
        return super().perform(operation, act)


def noise(seed: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(np.random.default_rng(seed).bytes(200_000), np.uint8)


@pytest.fixture
def three_steps(store_path: Path) -> Path:
    with casckpt.open(store_path, create=True) as store:
        for step in (1, 2, 3):
            store.commit(step, {"a": noise(step)})
    return store_path


def test_every_step_restores_in_the_store_as_it_was_made(three_steps: Path) -> None:
    with casckpt.open(three_steps) as store:
        for step in (1, 2, 3):
            assert store.restore(step)["a"].tobytes() == noise(step).tobytes()


@pytest.mark.few(2)
@pytest.mark.parametrize("part", ["/packs/", "/timeline/"])
@pytest.mark.parametrize("code", PASSING)
def test_a_refused_read_during_a_rebuild_is_raised_and_leaves_no_trace(three_steps: Path, part: str, code: int) -> None:
    shutil.rmtree(three_steps / "index")
    with pytest.raises(StorageError) as caught:
        open_store(three_steps, system=System(file_system=Refusing(part, code)))
    assert caught.value.errno == code
    with casckpt.open(three_steps) as store:
        assert store.verify().ok
        assert store.restore()["a"].tobytes() == noise(3).tobytes()


@pytest.mark.parametrize("part", ["/packs/", "/timeline/"])
def test_a_medium_error_during_a_rebuild_is_looked_at_again_when_the_store_is_opened(
    three_steps: Path, part: str
) -> None:
    shutil.rmtree(three_steps / "index")
    disk = Refusing(part, errno.EIO)
    if part == "/timeline/":
        disk.part = f"/{3:020d}"
    with open_store(three_steps, system=System(file_system=disk)) as store:
        assert not store.verify().ok
    with casckpt.open(three_steps) as store:
        assert store.verify().ok
        assert store.restore(3)["a"].tobytes() == noise(3).tobytes()


def test_a_bad_sector_under_a_list_of_chunks_leaves_the_store_open_for_all_else(store_path: Path) -> None:
    """Found when the index is made anew, and looked at again at each opening."""
    with casckpt.open(store_path, create=True, chunk_size=4096) as store:
        for step in (1, 2):
            store.commit(step, {"a": np.tile(noise(step), 80)[step:], "b": noise(step)})
        with store._keeper.kv.read() as txn:
            rows = list(txn.scan("objects"))
        manifests = [
            store._catalog.load(SnapshotId(bytes.fromhex(each.id))).components["a"] for each in store.timeline()
        ]
        nodes = [set(store._catalog.node_ids(store._catalog.manifest(ObjectId(ref.manifest)))) for ref in manifests]
        (place, *_) = next(decode_object(row)[1] for key, row in rows if key in nodes[1] - nodes[0])
        assert not place.is_inline
        disk = BadSector(store._keeper.reader.pack_id(place.pack_no).hex(), place.offset + place.header_size)
    shutil.rmtree(store_path / "index")
    for _ in range(3):
        with open_store(store_path, system=System(file_system=disk)) as store:
            assert store.restore(1)["b"].tobytes() == noise(1).tobytes()
            assert not store.verify().ok
    with casckpt.open(store_path) as store:  # it was for once
        assert store.verify(read_data=True).ok


@pytest.mark.parametrize("has_nodes", [False, True], ids=["manifest", "list of chunks"])
def test_what_is_read_well_and_is_no_list_is_looked_at_once(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, has_nodes: bool
) -> None:
    """It never will be one: an index that could not count below it is as good as it can be."""
    make, nodes = components._manifest, [(NODE, bytes(33))]
    with monkeypatch.context() as patch, open_store(store_path, create=True, chunk_size=4096) as store:
        if has_nodes:
            patch.setattr(components, "_add_nodes", lambda ids, writer: writer.add_all(nodes * 2) if ids else [])
        else:
            patch.setattr(components, "_manifest", lambda *given: replace(make(*given), ids=bytes(33)))
        store.commit(1, {"a": np.tile(noise(1), 22)})
    rebuilt: list[str] = []
    rebuild = IndexKeeper.rebuild

    def count_and_rebuild(keeper: IndexKeeper, **given: int) -> None:
        rebuilt.append("anew")
        rebuild(keeper, **given)

    monkeypatch.setattr(IndexKeeper, "rebuild", count_and_rebuild)
    for _ in range(3):
        with open_store(store_path) as store:
            assert not store.verify().ok
            with pytest.raises(casckpt.CorruptionError):
                store.restore(1)
    assert rebuilt == []
    shutil.rmtree(store_path / "index")
    for _ in range(3):
        open_store(store_path).close()
    assert rebuilt == ["anew"]


@pytest.mark.parametrize("code", PASSING)
def test_a_refused_read_during_a_verification_is_raised_and_is_no_damage(three_steps: Path, code: int) -> None:
    disk = Refusing("", code)
    with open_store(three_steps, system=System(file_system=disk)) as store:
        disk.part = "/packs/"
        with pytest.raises(StorageError):
            store.verify()
        disk.part = ""
        assert store.verify().ok
        assert store.commit(4, {"a": noise(3)}).new_bytes == 0


def test_a_medium_error_is_told_and_hides_nothing_else(three_steps: Path) -> None:
    disk = Refusing("", errno.EIO)
    with open_store(three_steps, system=System(file_system=disk)) as store:
        disk.part = max((path for path in (three_steps / "packs").rglob("*") if path.is_file()), key=_age).name
        report = store.verify()
        assert {problem.kind for problem in report.problems} == {"unreadable"}
        assert {step for problem in report.problems for _, _, step, _, _ in problem.snapshots} == {3}
        assert store.restore(2)["a"].tobytes() == noise(2).tobytes()
        states = {row.step: row.state for row in Inspection(store).history().rows}
    assert states[1] == states[2] == "consistent"


def _age(path: Path) -> int:
    return path.stat().st_mtime_ns


@pytest.mark.full
def test_few_descriptors_are_enough_for_many_packs(store_path: Path) -> None:
    with casckpt.open(store_path, create=True) as store:
        for step in range(40):
            store.commit(step, {f"part{step}": noise(step)}, inherit=[f"part{n}" for n in range(step)])
    program = f"""
import casckpt
with casckpt.open({str(store_path)!r}) as store:
    print(len(store.restore(39, allow_mixed=True)))
"""
    limit = 32

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, preexec_fn=limited, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "40"), done.stderr


def test_the_log_decides_who_the_store_is_when_its_document_was_changed(three_steps: Path) -> None:
    path = three_steps / "casckpt.json"
    document = json.loads(path.read_text())
    good = path.read_text()
    wrong = ("0" if document["store_id"][0] != "0" else "1") + document["store_id"][1:]
    path.write_text(json.dumps({**document, "store_id": wrong}))
    with pytest.warns(StoreWarning, match="was changed"), casckpt.open(three_steps) as store:
        store.commit(4, {"a": noise(4)})
    path.write_text(good)
    with casckpt.open(three_steps) as store:
        assert store.steps() == [1, 2, 3, 4]
        assert store.verify().ok


def test_flags_of_either_document_count(three_steps: Path) -> None:
    path = three_steps / "casckpt.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "features": {"read": ["of-tomorrow"], "write": [], "collect": []}}))
    with pytest.raises(casckpt.UnsupportedFormatError, match="of-tomorrow"):
        casckpt.open(three_steps)


def test_a_newest_entry_that_vanished_stays_reported_and_its_number_is_not_used_again(three_steps: Path) -> None:
    (three_steps / "timeline" / f"{0:014d}" / f"{3:020d}").unlink()
    with pytest.warns(StoreWarning, match="entry 3"), casckpt.open(three_steps) as store:
        assert store.steps() == [1, 2]
    with casckpt.open(three_steps) as store:
        report = store.verify()
        assert not report.ok and any("entry 3" in problem.message for problem in report.problems)
        assert store.commit(3, {"a": noise(30)}).seq == 4


def test_an_index_that_is_overwritten_under_an_open_handle_is_replaced(three_steps: Path) -> None:
    with casckpt.open(three_steps) as store:
        (data,) = (three_steps / "index").glob("*/data.mdb")
        size = data.stat().st_size
        with data.open("r+b") as file:
            file.write(b"\xff" * size)
        with pytest.warns(StoreWarning, match="index"):
            assert store.restore(2)["a"].tobytes() == noise(2).tobytes()
            store.commit(4, {"a": noise(4)})
    with casckpt.open(three_steps) as store:
        assert store.steps() == [1, 2, 3, 4]
