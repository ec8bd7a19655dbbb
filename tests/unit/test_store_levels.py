"""Levels: validated, mixed, and without influence on what comes back; commits of several processes and threads."""

from __future__ import annotations

import copy
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.codec.contract import DIFFERENCE
from casckpt.codec.level import COST_UNIT, DEPTH_MAX, LEVELS
from casckpt.errors import InvalidInputError
from casckpt.index.tables import Place
from casckpt.state.memory import window
from casckpt.store import components
from casckpt.testing.anatomy import dissect
from casckpt.testing.invariants import check_depths, index_counts
from casckpt.testing.trees import difference
from casckpt.testing.workload import LEARNER, tree
from tests.unit.stores import open_store


def _places(store: Any) -> list[tuple[bytes, Place]]:
    """The preferred place of every object."""
    ids = list(dissect(store.path).records)
    return [(key, found[0]) for key, found in zip(ids, store._keeper.reader.locate(ids), strict=True) if found]


# --- arguments ---


@pytest.mark.parametrize("level", ["medium", "", "FAST", None, 1, b"fast", ["fast"]])
def test_level_that_is_none_is_refused_before_anything_is_made(store_path: Path, level: Any) -> None:
    with pytest.raises(InvalidInputError, match="fast, balanced, small"):
        casckpt.open(store_path, create=True, level=level)
    assert not store_path.exists()


def test_levels_of_a_commit_name_components_that_it_has(store_path: Path) -> None:
    with open_store(store_path) as store:
        for levels in ({"a": "tiny"}, {"b": "fast"}, {"a": None}):
            with pytest.raises(InvalidInputError):
                store.commit(1, {"a": {"x": 1}}, levels=levels)
            with pytest.raises(InvalidInputError):
                store.commit_async(1, {"a": {"x": 1}}, levels=levels)
        assert store.steps() == []
        store.commit(1, {"a": {"x": 1}}, levels={"a": "small"})


# --- what comes back ---


@pytest.mark.few(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "background"])
def test_each_level_gives_back_what_was_committed(store_path: Path, level: str, is_async: bool) -> None:
    with open_store(store_path, run=LEARNER, level=level) as store:
        for step in range(1, 9):
            if is_async:
                store.commit_async(step, tree(LEARNER, step))
            else:
                store.commit(step, tree(LEARNER, step))
        store.wait()
        check_depths(store)
        assert level == "fast" or any(place.bases for _, place in _places(store))
    with open_store(store_path, run=LEARNER, read_only=True) as store:
        for step in range(1, 9):
            assert difference(tree(LEARNER, step), store.restore(step)) is None


def test_levels_may_change_with_every_commit_and_component(store_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = list(LEVELS)
    for opened in range(3):
        with open_store(store_path, run=LEARNER, level=names[opened]) as store:
            for step in range(1 + 6 * opened, 7 + 6 * opened):
                state = tree(LEARNER, step)
                store.commit(step, state, levels={name: str(rng.choice(names)) for name in state})
    with open_store(store_path, run=LEARNER) as store:
        check_depths(store)
        assert store.verify(read_data=True).ok
        for step in range(1, 19):
            assert difference(tree(LEARNER, step), store.restore(step)) is None


def _drifting(step: int) -> dict[str, Any]:
    """Sparse, dense and hopeless content of 17 chunks each, a function of the step."""
    rng = np.random.default_rng(5)
    sparse, dense = rng.integers(0, 1 << 40, 9000), rng.normal(size=9000)
    for at in range(step):
        sparse[at * 31 % 113 :: 1009] += at
    dense += np.cumsum(np.random.default_rng(6).normal(size=(step + 1, 9000), scale=1e-9), axis=0)[-1]
    return {"a": {"sparse": sparse, "dense": dense, "noise": np.random.default_rng(1000 + step).bytes(70_000)}}


@pytest.mark.full
@pytest.mark.parametrize("level", LEVELS)
def test_decoding_cost_of_every_step_of_a_long_history_is_what_the_level_allows(
    store_path: Path, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the costs in the records: each chunk, with all that it is decoded from, against the level's mean."""
    monkeypatch.setattr(components, "OPENING_SIZE", 0)  # which would allow so small a state anything
    count = 100
    with open_store(store_path, level=level, chunk_size=4096) as store:
        for step in range(count):
            store.commit(step, _drifting(step))
        places = dict(_places(store))
        assert max(place.depth for place in places.values()) <= DEPTH_MAX + 2
        check_depths(store)
        anatomy = dissect(store.path)
        for _, snapshot in anatomy.commits.values():
            reached = set().union(*anatomy.reach(snapshot).values())
            found = [places[each] for each in reached if each in places]
            size = sum(place.plain_size for place in found)
            spent = sum(place.plain_size * place.cost for place in found)
            assert spent <= 1.25 * LEVELS[level].cost_max * COST_UNIT * size, snapshot.step
        for step in (0, 1, count // 2, count - 1):
            assert difference(_drifting(step), store.restore(step)) is None


@pytest.mark.few(1)
@pytest.mark.parametrize("level", ["balanced", "small"])
def test_bf16_weights_that_hardly_move_are_differences_although_a_prediction_holds(
    store_path: Path, level: str
) -> None:
    """A prediction would take nothing, and the difference nearly nothing: what decodes faster is stored. Moments of
    which nothing is predicted are not kept raw for it."""
    torch.manual_seed(4)
    weight = torch.nn.Parameter((0.05 * torch.randn(1024, 2048)).bfloat16())
    optimizer = torch.optim.AdamW([weight], lr=1e-6, foreach=False)
    expected = {}
    with open_store(store_path, level=level, chunk_size=1 << 20) as store:
        for step in range(1, 7):
            before = weight.detach().clone()
            weight.grad = torch.randn_like(weight)
            optimizer.step()
            store.commit(step, {"policy": {"w": weight}, "optimizer": optimizer})
            expected[step] = weight.detach().clone()
            assert 0 < (before != weight).float().mean() < 0.02
        places, anatomy = dict(_places(store)), dissect(store.path)
        snapshot = max((found for _, found in anatomy.commits.values()), key=lambda found: found.step)
        reached = anatomy.reach(snapshot)
        chunks = [places[each] for each in reached["policy"] if places[each].plain_size == 1 << 20]
        assert len(chunks) == 4
        assert {place.codec for place in chunks} == {DIFFERENCE}
        assert all(place.size < 0.05 * place.plain_size for place in chunks)
        moments = [places[each] for each in reached["optimizer"] if places[each].plain_size == 1 << 20]
        assert len(moments) == 8
        assert sum(place.size for place in moments) < 0.85 * sum(place.plain_size for place in moments)
        for step, values in expected.items():
            assert torch.equal(store.restore(step)["policy"]["w"].view(torch.int16), values.view(torch.int16))


@pytest.mark.full
@pytest.mark.parametrize("level", LEVELS)
def test_tensors_of_every_dtype_come_back_from_differences_of_every_density(store_path: Path, level: str) -> None:
    """Any bits: NaNs of all payloads and subnormal numbers among them; none, a few or all items change."""
    names = ("bool", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
    names += ("complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64")
    rng = np.random.default_rng(3)
    bits = {name: rng.integers(0, 256, 1 << 17, np.uint8) for name in names}
    expected: dict[int, dict[str, bytes]] = {}
    with open_store(store_path, level=level, chunk_size=65_536) as store:
        for step, density in enumerate((1.0, 0.0, 0.001, 0.03, 0.3, 0.5, 1.0, 0.01)):
            for name in names:
                size = getattr(torch, name).itemsize
                changed = np.repeat(rng.random(len(bits[name]) // size) < density, size)
                bits[name] = np.where(changed, bits[name] + rng.integers(0, 4, len(changed), np.uint8), bits[name])
                bits[name] &= 1 if name == "bool" else 255
            expected[step] = {name: each.tobytes() for name, each in bits.items()}
            tensors = {name: torch.from_numpy(each.copy()).view(getattr(torch, name)) for name, each in bits.items()}
            store.commit(step, {"a": tensors})
        codecs = {place.codec for _, place in _places(store)}
        assert DIFFERENCE in codecs
        for step, kept in expected.items():
            found = store.restore(step)["a"]
            assert {name: each.view(torch.uint8).numpy().tobytes() for name, each in found.items()} == kept
            assert {name: str(each.dtype) for name, each in found.items()} == {name: f"torch.{name}" for name in names}


@pytest.mark.full
def test_counts_after_retiring_are_those_of_what_remains(store_path: Path) -> None:
    with open_store(store_path, chunk_size=4096) as store:
        for step in range(12):
            store.commit(step, _drifting(step))
        before = len(index_counts(store))
        for step in (0, 1, 2, 5, 7, 11):
            store.retire(step)
            assert index_counts(store) == {bytes(key): count for key, count in dissect(store.path).counts().items()}
        assert len(index_counts(store)) < before
        for step in (3, 4, 6, 8, 9, 10):
            assert difference(_drifting(step), store.restore(step)) is None


# --- processes and threads ---


def _take_turns(path: str, run: str, number: int, turns: Any) -> None:
    """Commit one step whenever it is this process's turn."""
    with casckpt.open(path, create=True, run=run, level=list(LEVELS)[number]) as store:
        for step in range(1, 7):
            assert turns[number].acquire(timeout=300)
            store.commit(step, tree(LEARNER, step))
            turns[1 - number].release()


@pytest.mark.full  # two interpreters that import torch
def test_processes_that_share_content_in_turn_build_on_each_others_chunks(store_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    turns = [context.Semaphore(1), context.Semaphore(0)]
    casckpt.open(store_path, create=True).close()
    processes = [
        context.Process(target=_take_turns, args=(str(store_path), run, number, turns))
        for number, run in enumerate(("one", "two"))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(350)
    assert [process.exitcode for process in processes] == [0, 0]
    for run in ("one", "two"):
        with open_store(store_path, run=run) as store:
            for step in range(1, 7):
                assert difference(tree(LEARNER, step), store.restore(step)) is None
            check_depths(store)
            counts = index_counts(store)
            store._keeper.rebuild()
            assert index_counts(store) == counts
    sizes = [path.stat().st_size for path in store_path.glob("packs/*/*")]
    assert len(sizes) <= 7, "the second process stores nothing again"


def test_forked_child_goes_on_with_the_chain(store_path: Path) -> None:
    with open_store(store_path, run=LEARNER) as store:
        for step in (1, 2, 3):
            store.commit(step, tree(LEARNER, step))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with open_store(store_path, run=LEARNER) as own:
                    own.commit(4, tree(LEARNER, 4))
                    code = 0 if difference(tree(LEARNER, 4), own.restore(4)) is None else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        store.resume("latest")
        assert store.commit(5, tree(LEARNER, 5)).parent == store.snapshot(4).id
        check_depths(store)
        for step in range(1, 6):
            assert difference(tree(LEARNER, step), store.restore(step)) is None


@pytest.mark.few(1)
@pytest.mark.parametrize("level", LEVELS)
def test_buffers_that_somebody_wrote_to_before_a_commit_builds_on_them_spoil_nothing(
    store_path: Path, level: str
) -> None:
    """The next save must notice that the last copy is no longer what was stored, and read that instead."""
    with open_store(store_path, run=LEARNER, level=level) as store:
        for step in range(1, 9):
            store.commit_async(step, tree(LEARNER, step)).result()
            for slots in store._saver._staging._slots.values():
                for slot in slots:
                    memory = window(slot.address, slot.capacity, writable=True)
                    np.frombuffer(memory, np.uint8)[step::4099] ^= 1
        check_depths(store)
        assert store.verify(read_data=True).ok
        for step in range(1, 9):
            assert difference(tree(LEARNER, step), store.restore(step)) is None


@pytest.mark.parametrize("level", ["balanced", "small"])
def test_leaf_whose_past_lies_in_the_timeline_takes_no_more_than_at_level_fast(store_path: Path, level: str) -> None:
    """What a small commit stores is no base of the next one: differences that paid before say nothing then."""
    rng = np.random.default_rng(0)
    frozen, leaf = rng.bytes(1 << 20), rng.integers(0, 100, 15_000).astype(np.float32)
    taken = {}
    for name in ("fast", level):
        values, taken[name] = leaf.copy(), 0
        with open_store(store_path / name, level=name) as store:
            for step in range(8):
                store.commit(step, {"frozen": {"bytes": frozen}, "trained": {"leaf": values}})
                taken[name] += store.snapshot(step).stored_bytes if step else 0  # without the large first commit
                values = values + (rng.integers(0, 100, len(values)) if step == 1 else np.ones(1)).astype(np.float32)
    assert taken[level] <= 1.01 * taken["fast"]


@pytest.mark.full
def test_one_step_of_adamw_costs_its_first_moments(store_path: Path) -> None:
    """What the guide promises of commits one optimizer step apart: weights and second moments cost next to nothing."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1024, 1024) / 32)
    optimizer = torch.optim.AdamW([weight], lr=1e-4)
    steps: dict[int, Any] = {}
    with open_store(store_path) as store:
        for step in range(1, 4):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
            snapshot = store.commit(step, {"net": {"weight": weight.data}, "optimizer": optimizer})
            steps[step] = weight.detach().clone(), optimizer.state[weight]["exp_avg_sq"].clone()
        assert snapshot.logical_bytes > 12 << 20
        assert snapshot.stored_bytes < (4 << 20) * 1.1  # of 12 MiB: the first moments, plain
        for step, (kept, moment) in steps.items():
            restored = store.restore(step)
            assert torch.equal(restored["net"]["weight"], kept)
            assert torch.equal(restored["optimizer"]["state"][0]["exp_avg_sq"], moment)


# --- equal content in one commit ---


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["opponent", "zero-sum opponent"])  # by its name before "policy", and after it
def test_copy_of_what_changes_is_stored_with_it_once(store_path: Path, level: str, name: str) -> None:
    """A league adds the policy as an opponent in the commit that has its newest weights."""
    torch.manual_seed(0)
    net = torch.nn.Linear(256, 256)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    league: dict[str, Any] = {}
    kept: dict[int, Any] = {}
    with open_store(store_path, level=level) as store:
        for step in range(1, 7):
            net(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            if step in (3, 5):
                league[f"{name} {step}"] = copy.deepcopy(net.state_dict())
            state = {"policy": net.state_dict(), "optimizer": optimizer.state_dict(), **league}
            kept[step] = copy.deepcopy(dict(sorted(state.items())))
            store.commit(step, kept[step])
        for step, state in kept.items():
            assert difference(state, store.restore(step)) is None, step
        records = dissect(store.path).records
    assert max(len(found) for found in records.values()) == 1
