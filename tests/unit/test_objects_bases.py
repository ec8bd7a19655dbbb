"""Bases through the contracts of the objects layer: what may be one, how records are counted, what threads see."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from casckpt.codec import prediction
from casckpt.codec.level import DEPTH_MAX, LEVELS
from casckpt.codec.memory import Limits, Memory
from casckpt.codec.models import ADAM_WEIGHT
from casckpt.errors import ConcurrentMutationError, StorageError
from casckpt.format.record import CODEC_RAW
from casckpt.ids import ObjectId
from casckpt.index.tables import INLINE, Place
from casckpt.limits import BATCH_SIZE, INLINE_LIMIT
from casckpt.objects.bases import Bases, Standing, inherit
from casckpt.objects.chunks import ChunkEncoder, ChunkTask, Groups, OperandRef, Prediction
from casckpt.state.memory import window
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from casckpt.store.wholeness import WholenessCheck
from casckpt.testing.anatomy import dissect
from casckpt.testing.failing import FailingFileSystem
from casckpt.testing.invariants import check_depths, index_counts
from casckpt.testing.trees import difference
from casckpt.testing.workload import LEARNER, tree
from casckpt.testing.wrapping import Operation
from tests.unit.stores import UnsyncedFileSystem, open_store

T = TypeVar("T")


def _learn(path: Path, steps: range) -> Any:
    store = open_store(path, run=LEARNER)
    for step in steps:
        store.commit(step, tree(LEARNER, step))
    return store


def _first_places(store: Any) -> dict[ObjectId, Place]:
    ids = list(dissect(store.path).records)
    return {key: found[0] for key, found in zip(ids, store._keeper.reader.locate(ids), strict=True) if found}


# --- counts ---


def test_counts_of_a_training_are_those_of_the_files_after_every_kind_of_entry(store_path: Path) -> None:
    with _learn(store_path, range(1, 4)) as store:
        acts: tuple[Callable[[], object], ...] = (
            lambda: store.commit(4, tree(LEARNER, 4)),
            lambda: store.retire(2),
            lambda: store.resume(3),
            lambda: store.commit(5, tree(LEARNER, 5)),
            lambda: store.retire(1),
            lambda: store.retire("main"),
            lambda: store.commit(6, {"policy": tree(LEARNER, 1)["policy"]}, drop=["optimizer", "replay"]),
            lambda: store.retire(3),
            lambda: store.retire(5),
        )
        for act in acts:
            act()
            anatomy = dissect(store.path)
            assert index_counts(store) == {bytes(key): count for key, count in anatomy.counts().items()}
        before = index_counts(store)
        assert any(place.bases and bytes(key) not in before for key, place in _first_places(store).items()), (
            "records of retired snapshots hold no bases"
        )
        store._keeper.rebuild()
        assert index_counts(store) == before


@pytest.mark.parametrize("operation", ["link", "sync_folder"])
def test_pack_of_a_commit_that_failed_is_no_part_of_the_store(store_path: Path, operation: str) -> None:
    """Its records name other bases than those that were stored in its place, and a collector may take it away."""
    _learn(store_path, range(1, 4)).close()
    before = set(store_path.glob("packs/*/*"))
    fs = FailingFileSystem(LocalFileSystem(), fail_at=1, error=errno.EIO, operations={operation})
    with open_store(store_path, run=LEARNER, system=System(file_system=fs)) as store:
        with pytest.raises(StorageError):
            store.commit(4, tree(LEARNER, 4))
        (orphan,) = set(store_path.glob("packs/*/*")) - before
        shutil.rmtree(store_path / "index")
        store._keeper.rebuild()
        store.commit(5, tree(LEARNER, 5))
        store.commit(6, tree(LEARNER, 4))
        counts = index_counts(store)
        store._keeper.rebuild()
        assert index_counts(store) == counts
    os.unlink(orphan)
    shutil.rmtree(store_path / "index")
    with open_store(store_path, run=LEARNER) as store:
        assert difference(tree(LEARNER, 4), store.restore(6)) is None
        assert store.verify(read_data=True).ok


# --- what may be a base ---


def test_object_that_lies_in_an_entry_is_no_base(store_path: Path) -> None:
    """Light commits stay inline; what they bring is a difference to what lies in a pack, however many there are."""
    table = np.random.default_rng(0).integers(0, 1 << 30, INLINE_LIMIT).astype(np.int32)
    with open_store(store_path) as store:
        for step in range(1, 12):
            table = table.copy()
            table[step * 101 :: 5003] += step
            store.commit(step, {"a": {"table": table}})
        places = _first_places(store)
        inline = {key for key, place in places.items() if place.is_inline}
        light = [place for key, place in places.items() if key in inline and place.bases]
        assert len(light) >= 8
        assert not any(base in inline for place in places.values() for base in place.bases)
        check_depths(store)


def test_inherited_depth_is_one_more_than_the_deepest_and_cost_counts_each_extra_base_once() -> None:
    low, high = Standing(ObjectId(b"l" * 32), 2, 30, CODEC_RAW), Standing(ObjectId(b"h" * 32), 7, 5, CODEC_RAW)
    assert inherit([low, high], [low, low], 10) == (8, 40)
    assert inherit([low], [], 10) == (3, 10)


def test_bytes_of_a_parent_that_changed_meanwhile_are_not_used(store_path: Path) -> None:
    """The buffer of the previous staging is written over at any time: then the store is read instead."""
    content = np.random.default_rng(0).integers(0, 1 << 62, 9000)
    with open_store(store_path) as store:
        store.commit(1, {"a": {"x": content}})
        reader = store._keeper.reader
        (object_id,) = [key for key, place in _first_places(store).items() if place.plain_size == content.nbytes]
        reads = []

        def moved() -> memoryview:
            reads.append("moved")
            return memoryview(content[::-1].copy()).cast("B")

        bases = Bases(reader, lambda ids: [True] * len(ids), {object_id: moved}, [])
        assert bases.plain(object_id) == content.tobytes()
        assert reads == ["moved"]


def test_base_is_as_deep_as_its_deepest_record_and_none_where_one_lies_in_an_entry() -> None:
    """Whichever of its records is lost, what is built on it is deeper than the one that is left."""
    shallow, deep = ObjectId(b"s" * 32), ObjectId(b"d" * 32)
    inline = Place(INLINE, 1, 96, 10, 10, 0)
    records = {
        shallow: [Place(0, 64, 96, 10, 10, 0), Place(0, 512, 128, 5, 10, 4, depth=3, bases=(deep,))],
        deep: [Place(0, 960, 96, 10, 10, 0), inline],
    }

    class Reader:
        def chains(self, ids: list[ObjectId]) -> dict[ObjectId, Place]:
            return {each: records[each][0] for each in ids if each in records}

        def locate(self, ids: list[ObjectId]) -> list[list[Place]]:
            return [records[each] for each in ids]

    wanted = dict.fromkeys(records)
    bases = Bases(Reader(), lambda ids: [True] * len(ids), wanted, [])  # type: ignore[arg-type]
    assert bases.standing(shallow) == Standing(shallow, 3, 0, 0)
    assert bases.standing(deep) is None


def test_chunk_predicted_from_chunks_of_its_own_commit_is_encoded_after_them() -> None:
    """Whatever the order of the tasks; chunks that share operands stay in one batch."""
    limits = Limits(LEVELS["balanced"], 255)

    def task(*operands: int) -> ChunkTask:
        found = [Prediction([], [OperandRef((at,), False, 4)]) for at in operands]
        return ChunkTask(lambda: memoryview(b""), 4 << 20, 4, None, Memory(), limits, found)

    encoder = ChunkEncoder([task(1), task(5), task(), task(2), task(), task()], lambda ids: [], None)
    assert encoder._groups.ranks == [2, 1, 0, 1, 0, 0]
    batches = encoder.batches()
    assert sorted(at for batch in batches for at in batch) == list(range(6))
    together = [{0, 1, 5}, {2, 3}]
    assert all(any(group <= set(batch) for batch in batches) for group in together)


def _tasks(operands: list[list[list[int]]], size: int) -> list[ChunkTask]:
    """Tasks with candidates, each a list of positions in this snapshot."""
    limits = Limits(LEVELS["balanced"], 255)
    return [
        ChunkTask(
            lambda: memoryview(b""),
            size,
            4,
            None,
            Memory(),
            limits,
            [Prediction([], [OperandRef(tuple(each), False, 4)]) for each in found],
        )
        for found in operands
    ]


def test_candidates_that_lead_back_are_dropped() -> None:
    """As a weight from a moment and that moment as a copy of the weight."""
    groups = Groups(_tasks([[[1]], [[2]], [[0], [3]], []], 1 << 20))
    assert groups.ranks == [3, 2, 1, 0]
    assert groups.allowed == {0: [0], 1: [0], 2: [1]}
    itself = Groups(_tasks([[[0]], []], 1 << 20))
    assert (itself.ranks, itself.allowed) == ([0, 0], {0: []})


def test_many_candidates_make_no_group_larger_than_a_batch() -> None:
    count = 200
    tasks = _tasks([[[(at + 1) % count, 0], [(at + 7) % count]] for at in range(count)], 1 << 20)
    groups = Groups(tasks)
    members = [found for found, _ in groups.members()]
    sizes = [len(found) for found in members]
    assert sum(sizes) == count
    assert max(sizes) <= BATCH_SIZE >> 20
    where = {at: number for number, found in enumerate(members) for at in found}
    for at, task in enumerate(tasks):
        for number in groups.allowed[at]:
            assert {where[each] for each, _ in task.operands(number)} == {where[at]}


# --- threads ---


class _Meeting(UnsyncedFileSystem):
    """Two threads look at the size of a pack at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier: threading.Barrier | None = None

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        if self.barrier is not None and operation.name == "size" and "/packs/" in operation.path:
            self.barrier.wait(200)
        return super().perform(operation, act)


def test_threads_that_ask_at_once_get_the_same_answer(store_path: Path) -> None:
    """One must not take the other's look at a common base for a circle."""
    meeting = _Meeting()
    with open_store(store_path, run=LEARNER, system=System(file_system=meeting)) as store:
        for step in range(1, 4):
            store.commit(step, tree(LEARNER, step))
        wanted = [key for key, place in _first_places(store).items() if place.depth == 2]
        assert wanted
        check = WholenessCheck(store._timeline, store._keeper, store._catalog)
        answers: list[list[bool]] = []
        meeting.barrier = threading.Barrier(2)
        threads = [threading.Thread(target=lambda: answers.append(check.are_present(wanted[:1]))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        meeting.barrier = None
    assert answers == [[True], [True]]


# --- histories ---


@pytest.mark.full
@pytest.mark.parametrize("level", ["balanced", "small"])
def test_depth_and_cost_stay_in_bounds_over_a_long_history(store_path: Path, level: str) -> None:
    with open_store(store_path, run=LEARNER, level=level) as store:
        for step in range(1, 101):
            store.commit(step, tree(LEARNER, step))
        check_depths(store)
        places = _first_places(store)
        depths = [place.depth for place in places.values()]
        assert max(depths) > 10
        # A chunk predicted from chunks of its own commit may lie above them: m, then v, then w.
        assert max(depths) <= DEPTH_MAX + 2
        assert any(place.codec == CODEC_RAW or not place.bases for place in places.values())
        for step in (1, 2, 50, 99, 100):
            assert difference(tree(LEARNER, step), store.restore(step)) is None


# --- memory that moves ---


@pytest.mark.few(2)
@pytest.mark.parametrize("level", ["balanced", "small"])
@pytest.mark.parametrize("verify", ["off", "reread"])
def test_operand_that_changes_before_a_chunk_is_predicted_from_it_fails_the_commit(
    store_path: Path, level: str, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record would be proven against the changed bytes, and name those that were hashed."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(256, 256))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, foreach=False)
    state = {"net": {"weight": weight.data}, "optimizer": optimizer, "room": torch.zeros(1 << 20)}
    encode_right = prediction.encode_prediction
    changed: list[int] = []

    def encode(plain: memoryview, models: Any, operands: Any, hint: Any = None, *, ceiling: int) -> Any:
        if models[0].kind == ADAM_WEIGHT and weight.grad is not None and optimizer.state[weight]["step"] == 4:
            changed.append(1)
            np.frombuffer(window(optimizer.state[weight]["exp_avg"].data_ptr() + 401, 1, writable=True), np.uint8)[
                0
            ] ^= 9
        return encode_right(plain, models, operands, hint, ceiling=ceiling)

    monkeypatch.setattr(prediction, "encode_prediction", encode)
    with open_store(store_path, level=level, verify=verify) as store:
        for step in range(1, 4):
            _update(weight, optimizer)
            store.commit(step, state)
        _update(weight, optimizer)
        with pytest.raises(ConcurrentMutationError, match="changed while the commit"):
            store.commit(4, state)
        assert changed
        assert list(store.steps()) == [1, 2, 3]
        assert store.verify(read_data=True).ok
        monkeypatch.undo()
        store.commit(4, state)
        assert torch.equal(store.restore(4)["net"]["weight"], weight)


def _update(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    weight.grad = torch.randn_like(weight)
    optimizer.step()


def test_16_bit_moments_beside_32_bit_weights_are_committed(store_path: Path) -> None:
    """Moments look like rounded copies of weights, and weights follow from moments: nothing may go round."""
    torch.manual_seed(0)
    nets = {name: torch.randn(256, 256) for name in ("net", "target")}
    moments = {name: torch.randn(256, 256).bfloat16() for name in ("exp_avg", "exp_avg_sq")}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "params": [0]}
    with open_store(store_path) as store:
        for step in range(1, 4):
            optimizer = {"state": {0: {"step": torch.tensor(float(step)), **moments}}, "param_groups": [group]}
            state = {"nets": nets, "optimizer": optimizer, "room": torch.zeros(1 << 20)}
            store.commit(step, state)
            assert difference(state, store.restore(step)) is None
            nets["net"] += 1e-6
            moments["exp_avg"] *= 0.9
