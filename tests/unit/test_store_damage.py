"""(S05, S21, S30, S37) Damage stays where it is: what does not need the damaged bytes works, what does says so, and
later commits never build on it.
"""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.errors import (
    ConcurrentMutationError,
    CorruptionError,
    IncompleteError,
    InvalidInputError,
    NotFoundError,
    StoreWarning,
)
from casckpt.format.record import CHUNK as CHUNK_KIND
from casckpt.format.snapshot import decode_manifest
from casckpt.ids import ObjectId
from casckpt.objects.writer import ObjectWriter
from casckpt.testing.anatomy import dissect
from casckpt.testing.trees import difference
from tests.unit.stores import open_store

CHUNK = 4096
SENTINEL = 7.0


@pytest.fixture
def store(store_path: Path) -> Iterator[Any]:
    with open_store(store_path, chunk_size=CHUNK) as opened:
        yield opened


def noise(seed: int, count: int = 100_000) -> Any:
    """Numbers that no encoding shrinks: stored raw, in a pack."""
    return np.random.default_rng(seed).integers(0, 1 << 63, count)


def packs_of(store: Any) -> list[Path]:
    return sorted(Path(store.path).glob("packs/*/*"))


def entry_of(store: Any, snapshot: Any) -> Path:
    return next(Path(store.path).glob(f"timeline/*/{snapshot.seq:020d}"))


def flip(path: Path, where: bytes) -> None:
    """Turn over one bit in the middle of `where`, which must be in the file once."""
    data = bytearray(path.read_bytes())
    assert data.count(where) == 1
    data[data.index(where) + len(where) // 2] ^= 4
    path.write_bytes(data)


# --- a restore is all or nothing ---


def test_restore_with_a_damaged_chunk_names_it_and_leaves_every_target_alone(store: Any) -> None:
    state = {"policy": {"first": noise(1), "second": noise(2)}, "value": {"w": noise(3)}}
    store.commit(1, state)
    flip(packs_of(store)[0], state["policy"]["second"][50_000:50_010].tobytes())
    targets = {name: {leaf: np.full(100_000, 7) for leaf in tree} for name, tree in state.items()}
    with pytest.raises(CorruptionError, match="policy/second") as caught:
        store.restore_into(targets, 1)
    assert caught.value.facts["component"] == "policy"
    assert caught.value.facts["paths"] == ["policy/second"]
    assert len(caught.value.facts["object_id"]) == 32
    assert all((array == 7).all() for tree in targets.values() for array in tree.values())


def test_restore_without_its_pack_says_incomplete_and_leaves_every_target_alone(store: Any) -> None:
    store.commit(1, {"policy": {"w": torch.from_numpy(noise(1))}})
    packs_of(store)[0].unlink()
    target = torch.full((100_000,), 7)
    with open_store(store.path) as again, pytest.raises(IncompleteError, match=r"pack .* is not here"):
        again.restore_into({"policy": {"w": target}}, 1)
    assert target.unique().tolist() == [7]


def test_streaming_restore_that_fails_says_which_leaves_were_touched(store: Any) -> None:
    state = {"policy": {"good": noise(1), "bad": noise(2)}}
    store.commit(1, state)
    flip(packs_of(store)[0], state["policy"]["bad"][-10:].tobytes())
    targets = {"policy": {"good": np.zeros(100_000, np.int64), "bad": np.zeros(100_000, np.int64)}}
    with pytest.raises(IncompleteError, match="stopped half way") as caught:
        store.restore_into(targets, 1, atomic=False)
    touched = {path.partition("/")[2] for path in caught.value.facts["touched"]}
    changed = {name for name, array in targets["policy"].items() if array.any()}
    assert changed <= touched == {"good", "bad"}
    causes = [caught.value, caught.value.__cause__, caught.value.__cause__.__cause__]
    assert any(isinstance(cause, CorruptionError) for cause in causes)
    assert store.commit(2, state).new_bytes == 800_000 % CHUNK  # what was found damaged is stored again


def test_undamaged_leaves_restore_by_name_and_the_damaged_one_is_named(store: Any) -> None:
    state = {"policy": {"good": noise(1), "bad": noise(2)}, "other": {"x": noise(3)}}
    store.commit(1, state)
    flip(packs_of(store)[0], state["policy"]["bad"][7:17].tobytes())
    assert difference({"policy": {"good": noise(1)}}, store.restore(1, only=["policy/good"])) is None
    assert difference({"other": {"x": noise(3)}}, store.restore(1, only=["other"])) is None
    for only in (["policy/bad"], ["policy"], None):
        with pytest.raises(CorruptionError, match="policy/bad"):
            store.restore(1, only=only)


def test_damaged_structure_costs_its_component_alone(store: Any) -> None:
    state = {"policy": {f"layer {i}": noise(i, 10) for i in range(500)}, "other": {"x": noise(3)}}
    store.commit(1, state)
    anatomy = dissect(store.path)
    manifest = ObjectId(bytes.fromhex(store.snapshot(1).components["policy"].manifest))
    structure = decode_manifest(anatomy.plain[manifest], "manifest").structure
    region = next(each for each in anatomy.regions if each.object_id == structure and each.name.endswith("payload"))
    with (Path(store.path) / region.path).open("r+b") as file:
        file.seek(region.offset)
        file.write(bytes(region.size))
    assert difference({"other": {"x": noise(3)}}, store.restore(1, only=["other"])) is None
    with pytest.raises(CorruptionError, match="component 'policy'"):
        store.restore(1)
    report = store.verify()
    assert [user[2:4] for problem in report.problems for user in problem.snapshots] == [(1, "policy")]


# --- commits never build on damage ---


@pytest.mark.parametrize("is_open", [True, False])
def test_state_in_a_lost_pack_is_stored_again(store: Any, is_open: bool) -> None:
    state = {"policy": {"w": noise(1)}}
    first = store.commit(1, state)
    packs_of(store)[0].unlink()
    second = _commit(store, is_open, 2, state)
    assert second.new_bytes == first.new_bytes
    assert difference(state, store.restore(2)) is None
    assert _commit(store, is_open, 3, state).new_bytes == 0
    assert difference(state, store.restore(1)) is None  # equal content: the first is whole again


@pytest.mark.parametrize("is_open", [True, False])
def test_state_in_a_cut_pack_is_stored_again(store: Any, is_open: bool) -> None:
    state = {"policy": {"w": noise(1)}}
    store.commit(1, state)
    os.truncate(packs_of(store)[0], 100_000)
    assert _commit(store, is_open, 2, state).new_bytes >= 800_000
    assert difference(state, store.restore(2)) is None


@pytest.mark.parametrize("size", [None, 0, 10, 200])
def test_state_inline_in_a_lost_or_cut_entry_is_stored_again(store: Any, size: int | None) -> None:
    state = {"policy": {"w": noise(1, 100)}, "counters": {"step": 3}}
    first = store.commit(1, state)
    if size is None:
        entry_of(store, first).unlink()
    else:
        os.truncate(entry_of(store, first), size)
    store.commit(2, state)
    assert difference(dict(sorted(state.items())), store.restore(2)) is None
    with open_store(store.path, read_only=True) as again:
        assert difference(dict(sorted(state.items())), again.restore(2)) is None


def test_object_found_damaged_is_stored_again_once_and_is_whole_from_then_on(store: Any) -> None:
    state = {"policy": {"w": noise(1)}}
    store.commit(1, state)
    flip(packs_of(store)[0], noise(1)[600:620].tobytes())
    with pytest.raises(CorruptionError):
        store.restore(1)
    second = store.commit(2, state)
    assert second.new_bytes == CHUNK
    assert difference(state, store.restore("latest")) is None
    assert store.snapshot("latest").id == second.id
    assert store.commit(3, state).new_bytes == 0
    assert difference(state, store.restore(1)) is None
    assert store.verify(read_data=True).ok


def test_object_found_damaged_by_verification_is_stored_again(store: Any) -> None:
    state = {"policy": {"w": noise(1)}}
    store.commit(1, state)
    flip(packs_of(store)[0], noise(1)[600:620].tobytes())
    assert not store.verify(read_data=True).ok
    assert store.commit(2, state).new_bytes == CHUNK
    assert store.verify(read_data=True).ok


def test_component_in_damaged_files_cannot_be_inherited(store: Any) -> None:
    store.commit(1, {"policy": {"w": noise(1)}, "counters": 1})
    packs_of(store)[0].unlink()
    with pytest.raises(CorruptionError, match="'policy' cannot be inherited from step 1"):
        store.commit(2, {"counters": 2}, inherit=["policy"])
    assert store.steps() == [1]
    assert store.commit(2, {"counters": 2}, drop=["policy"]).step == 2


def test_lost_node_between_manifest_and_chunks_is_stored_again(store: Any) -> None:
    """Nodes may lie in another file than the manifest above and the chunks below them."""
    ring = noise(1, 1024 * CHUNK // 8)
    store.commit(1, {"ring": {"once": ring}})  # 1024 chunks: no node yet
    second = store.commit(2, {"ring": {"once": ring, "x": noise(2, 1024)}})  # nodes, inline or in a pack of their own
    state = {"ring": {"once": ring, "x": noise(2, 1024)}, "again": {"once": ring, "x": noise(2, 1024), "y": 5}}
    store.commit(3, state)
    for path in [entry_of(store, second)]:
        path.unlink()
    store.commit(4, state)
    with open_store(store.path) as again:
        assert difference({name: state[name] for name in sorted(state)}, again.restore(4)) is None


def test_training_goes_on_when_the_entry_it_continues_is_damaged(store: Any) -> None:
    store.commit(1, {"a": 1}, config={"lr": 1})
    second = store.commit(2, {"a": 2})
    for snapshot in (store.snapshot(1), second):
        os.truncate(entry_of(store, snapshot), 10)
    third = store.commit(3, {"a": 3})
    assert (third.parent, store.restore(3), store.context(3).config) == (second.id, {"a": 3}, {"lr": 1})
    assert store.snapshot().step == 3


def _commit(store: Any, is_open: bool, step: int, state: Any) -> Any:
    """Commit by the handle that knows the parent, or by a new one, which cannot know what was in the context."""
    if is_open:
        return store.commit(step, state)
    with open_store(store.path) as other, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        snapshot = other.commit(step, state)
    assert all("config and schema version" in str(warning.message) for warning in caught)
    return snapshot


# --- open and listing always work ---


def test_list_leaves_out_an_unreadable_snapshot_and_says_so(store: Any) -> None:
    for step in (1, 2, 3):
        snapshot = store.commit(step, {"a": step})
        if step == 2:
            damaged = snapshot
    os.truncate(entry_of(store, damaged), 10)
    for listing in (lambda: list(store.timeline()), lambda: store.timeline()[:], lambda: store.timeline(all_runs=True)):
        with pytest.warns(StoreWarning, match=r"step 2 .*verify"):
            found = listing()
        assert [snapshot.step for snapshot in found] == [1, 3]
    assert store.timeline()[-1].step == 3
    assert store.steps() == [1, 2, 3]
    with pytest.raises(CorruptionError, match="step 2"):
        store.timeline()[1]
    with pytest.raises(CorruptionError, match="step 2"):
        store.restore(2)


def test_latest_passes_over_what_is_not_whole_and_says_why(store: Any) -> None:
    store.commit(1, {"a": noise(1)})
    store.commit(2, {"a": noise(2)})
    next(path for path in packs_of(store) if noise(2)[:9].tobytes() in path.read_bytes()).unlink()
    target = {"a": np.zeros(100_000, np.int64)}
    with pytest.warns(StoreWarning, match=r"'latest' is step 1; passed over: step 2 .*missing"):
        report = store.restore_into(target)
    assert report.step == 1
    assert len(report.skipped) == 1
    assert difference({"a": noise(1)}, target) is None


def test_run_of_nothing_but_damage_is_not_a_fresh_start(store: Any) -> None:
    store.commit(1, {"a": noise(1)})
    packs_of(store)[0].unlink()
    with pytest.raises(IncompleteError, match="no snapshot can be restored"):
        store.resume()
    for folder in ("timeline", "index"):
        shutil.rmtree(Path(store.path) / folder)
    with open_store(store.path) as again:
        with pytest.raises(IncompleteError, match="not certain that this is a fresh start"):
            again.resume_into({"a": np.zeros(3)})
        assert not again.verify().ok
        assert again.commit(1, {"a": 1}).seq == 1  # number 0 is the store's own, lost or not
        assert again.restore() == {"a": 1}


def test_stray_files_are_nobodys_entries(store: Any) -> None:
    store.commit(1, {"a": 1})
    shard = next(Path(store.path).glob("timeline/*"))
    names = ["²" * 20, "00000000000099999999", "99999999999999999999", "x", "0" * 19, "0" * 21, ".tmp", "1" * 20]
    for name in names:
        (shard / name).write_bytes(b"stray")
    (shard.parent / ("²" * 14)).mkdir()
    far = shard.parent / "00090000000000" / "00000090000000000000"  # a well-formed number that nobody can have reached
    far.parent.mkdir()
    far.write_bytes(b"stray")
    (Path(store.path) / "packs" / "zz").mkdir()
    (Path(store.path) / "packs" / "zz" / ("zz" + " " * 30)).write_bytes(b"stray")
    shutil.rmtree(Path(store.path) / "index")
    with open_store(store.path) as again:
        assert again.steps() == [1]
        assert again.commit(2, {"a": 2}).seq == 2
        assert again.verify().ok


def test_link_in_place_of_a_pack_is_not_followed(store: Any, tmp_path: Path) -> None:
    store.commit(1, {"a": noise(1)})
    pack = packs_of(store)[0]
    pack.rename(tmp_path / "elsewhere")
    pack.symlink_to(tmp_path / "elsewhere")
    with open_store(store.path, read_only=True) as again, pytest.raises(CorruptionError, match="symbolic link"):
        again.restore(1)


def test_deleted_index_loses_nothing(store: Any) -> None:
    state = {"a": noise(1), "b": {"x": 1}}
    store.commit(1, state)
    store.tag("good", 1)
    store.annotate(1, metrics={"m": 1})
    store.close()
    shutil.rmtree(Path(store.path) / "index")
    with open_store(store.path) as again:
        assert difference(state, again.restore("good")) is None
        assert again.snapshot(1).metrics == {"m": 1}
        assert again.commit(2, state).new_bytes == 0


@pytest.mark.parametrize("name", ["casckpt.json", "timeline/00000000000000/00000000000000000000"])
def test_either_copy_of_the_stores_document_is_enough(store: Any, name: str) -> None:
    store.commit(1, {"a": 1})
    store.close()
    for damage in (lambda path: path.write_bytes(b"{"), lambda path: path.write_bytes(b""), Path.unlink):
        damage(Path(store.path) / name)
        with open_store(store.path, create=False) as again:
            assert again.restore(1) == {"a": 1}
            assert again.document.chunk_size == CHUNK


def test_store_without_both_copies_is_refused_and_not_made_anew(store: Any) -> None:
    store.commit(1, {"a": 1})
    store.close()
    (Path(store.path) / "casckpt.json").unlink()
    os.truncate(Path(store.path) / "timeline" / ("0" * 14) / ("0" * 20), 20)
    for create in (False, True):
        with pytest.raises(CorruptionError, match=r"casckpt.json .*backup"):
            open_store(store.path, create=create)


# --- memory that moves ---


def test_array_that_moves_between_hash_and_write_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numpy arrays have no version counter; the bytes that go inline are compared with the digest."""
    array = noise(1, 256)
    add = ObjectWriter._add

    def move_and_add(self: Any, kind: int, *arguments: Any) -> None:
        if kind == CHUNK_KIND:
            array[:] = 0
        add(self, kind, *arguments)

    monkeypatch.setattr(ObjectWriter, "_add", move_and_add)
    with pytest.raises(ConcurrentMutationError, match="between updates"):
        store.commit(1, {"a": array})
    monkeypatch.undo()
    assert store.steps() == []
    assert store.commit(1, {"a": array}).step == 1


def test_thread_that_trains_during_a_blocking_commit_is_noticed_or_harmless(store: Any) -> None:
    """Whatever is acknowledged restores to one instant of each chunk, bit by bit as hashed."""
    array, stop = noise(1, 300_000), threading.Event()

    def train() -> None:
        while not stop.is_set():
            array[:] += 1

    thread = threading.Thread(target=train)
    thread.start()
    acknowledged = []
    try:
        for step in range(5):
            try:
                acknowledged.append(store.commit(step, {"a": array}).step)
            except ConcurrentMutationError:
                continue
    finally:
        stop.set()
        thread.join()
    assert store.steps() == acknowledged
    assert store.verify(read_data=True).ok


# --- what is asked for and not there ---


def test_unknown_component_or_leaf_is_named_with_what_there_is(store: Any) -> None:
    store.commit(1, {"policy": {"w": 1}})
    with pytest.raises(NotFoundError, match=r"'polciy' is no component.*\['policy'\]"):
        store.restore(1, only=["polciy"])
    with pytest.raises(NotFoundError, match="policy/v: no such leaf"):
        store.restore(1, only=["policy/v"])
    with pytest.raises(InvalidInputError, match=r"only=\['policy'\]"):
        store.restore(1, only="policy")
    assert store.restore(1, only=[]) == {}


def test_path_that_is_no_folder_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        for create in (False, True):
            with pytest.raises(casckpt.CasckptError, match="not a folder"):
                open_store(path, create=create)
