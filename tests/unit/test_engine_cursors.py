"""Cursors: an interrupted reading of data gives what the uninterrupted one gives; nothing is skipped or seen twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import casckpt
from casckpt.engine.cursors import Counters, DataCursor, IndexCursor, InFlightRollouts


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_every_epoch_gives_each_index_once_in_an_order_of_its_own(length: int) -> None:
    cursor = IndexCursor(length, seed=3)
    epochs = [cursor.take(length) for _ in range(3)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    if length == 1000:
        assert epochs[0] != epochs[1] != epochs[2]
        in_place = sum(place == index for place, index in enumerate(epochs[0]))
        neighbours = sum(abs(a - b) == 1 for a, b in zip(epochs[0], epochs[0][1:], strict=False))
        assert in_place < 10 and neighbours < 12  # of a random order 1 and 2 are expected


def test_orders_stay_what_they_are() -> None:
    """Computed once by another program, in unsigned arithmetic of numpy."""
    assert IndexCursor(10, seed=0).take(10) == [8, 7, 5, 6, 9, 3, 0, 4, 2, 1]
    assert IndexCursor(5, seed=0, shuffle=False).take(7) == [0, 1, 2, 3, 4, 0, 1]


def test_indices_that_are_taken_after_a_restore_are_those_that_came_next(store_path: Any) -> None:
    cursor = IndexCursor(23, seed=9)
    with casckpt.open(store_path, create=True) as store:
        for step in range(1, 12):
            store.commit(step, {"prompts": cursor})
            cursor.take(5)
        whole = IndexCursor(23, seed=9).take(200)
        for step in range(1, 12):
            fresh = IndexCursor(23, seed=9)
            store.restore_into({"prompts": fresh}, step)
            assert fresh.take(60) == whole[5 * (step - 1) : 5 * (step - 1) + 60]


@pytest.mark.parametrize("other", [{"length": 24}, {"seed": 1}, {"shuffle": False}], ids=lambda each: next(iter(each)))
def test_position_in_other_data_is_refused(other: dict[str, Any]) -> None:
    arguments = {"length": 23, "seed": 9, "shuffle": True}
    cursor = IndexCursor(**{**arguments, **other})
    taken = cursor.take(3)
    with pytest.raises(casckpt.MismatchError, match=next(iter(other))):
        cursor.load_state_dict(IndexCursor(**arguments).state_dict())
    assert len(taken) == cursor.position == 3


@pytest.mark.parametrize("length", [0, -1, 2.0, True])
def test_impossible_length_is_refused(length: Any) -> None:
    with pytest.raises(casckpt.InvalidInputError, match="expected the number of items"):
        IndexCursor(length, seed=0)


@pytest.mark.parametrize("size", [0, -1, 2.0])
def test_impossible_batch_size_is_refused(size: Any) -> None:
    with pytest.raises(casckpt.InvalidInputError, match="batch_size"):
        DataCursor(10, batch_size=size, seed=0)


# --- the loader of torch ---

ITEMS, BATCH, EPOCHS = 22, 4, 3


def loader_of(cursor: DataCursor, workers: int) -> Any:
    items = torch.arange(ITEMS) * 10
    context = "fork" if workers else None
    return DataLoader(
        torch.utils.data.TensorDataset(items),
        batch_size=BATCH,
        sampler=cursor,  # type: ignore[arg-type]
        drop_last=cursor.drop_last,
        num_workers=workers,
        multiprocessing_context=context,
    )


def read(cursor: DataCursor, rng: Any, workers: int, saved: list[Any] | None = None) -> list[Any]:
    """Batches to the end of the last epoch, each with a draw of torch's; saves the states after each batch."""
    loader, seen = loader_of(cursor, workers), []
    while cursor.epoch < EPOCHS:
        for (batch,) in cursor.batches(loader):
            seen.append((cursor.epoch, batch.tolist(), torch.rand(1).item()))
            if saved is not None:
                saved.append((cursor.state_dict(), rng.state_dict()))
    return seen


def check_every_interruption(drop_last: bool, workers: int, every: int) -> None:
    rng = casckpt.RngState()
    torch.manual_seed(4)
    saved: list[Any] = []
    whole = read(DataCursor(ITEMS, batch_size=BATCH, seed=1, drop_last=drop_last), rng, workers, saved)
    assert len(whole) == EPOCHS * (ITEMS // BATCH + (not drop_last))
    for at in range(0, len(saved), every):
        cursor = DataCursor(ITEMS, batch_size=BATCH, seed=1, drop_last=drop_last)
        cursor.load_state_dict(saved[at][0])
        rng.load_state_dict(saved[at][1])
        assert read(cursor, rng, workers) == whole[at + 1 :]


@pytest.mark.parametrize("drop_last", [False, True])
def test_reading_interrupted_after_any_batch_goes_on_with_the_next(drop_last: bool) -> None:
    check_every_interruption(drop_last, 0, 1)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # workers that only index start fastest so
def test_batches_that_workers_fetched_ahead_are_not_lost() -> None:
    check_every_interruption(False, 2, 4)


def test_whole_epoch_is_known_to_be_exhausted_and_the_next_begins() -> None:
    cursor = DataCursor(8, batch_size=4, seed=0)
    batches = cursor.batches(list(range(2)))
    next(batches)
    assert not cursor.is_exhausted
    next(batches)
    assert cursor.is_exhausted
    fresh = DataCursor(8, batch_size=4, seed=0)
    fresh.load_state_dict(cursor.state_dict())
    assert list(fresh.batches(loader_of(fresh, 0))) == []
    assert (fresh.epoch, fresh.position) == (1, 0)


# --- rollouts and counts ---


def test_rollouts_under_way_at_a_snapshot_are_known_after_a_restore_and_no_others(store_path: Any) -> None:
    rollouts = InFlightRollouts()
    first, second = (
        rollouts.begin(prompt=4, tokens=torch.tensor([1])),
        rollouts.begin(prompt=7, tokens=torch.tensor([2])),
    )
    rollouts.update(second, tokens=torch.tensor([2, 3]))
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"rollouts": rollouts})
        assert rollouts.finish(first)["prompt"] == 4
        rollouts.begin(prompt=9)
        fresh = InFlightRollouts()
        store.restore_into({"rollouts": fresh}, 1)
    assert [kept["prompt"] for kept in fresh.pending().values()] == [4, 7]
    assert fresh.pending()[second]["tokens"].tolist() == [2, 3]
    assert fresh.begin(prompt=1) == 2
    with pytest.raises(casckpt.NotFoundError, match="rollout 5 is not under way"):
        fresh.finish(5)


def test_counters_that_disagree_with_another_part_are_named() -> None:
    counters = Counters(updates=0, frames=0)
    counters.add(updates=500, frames=1000)
    assert counters.disagreements({"updates": 500, "other": 3}) == []
    with pytest.raises(casckpt.MismatchError, match="updates: counted 500 here, 480 there") as caught:
        counters.check(updates=480, frames=1000)
    assert len(caught.value.disagreements) == 1


def test_counters_go_on_after_a_restore_and_refuse_unknown_names() -> None:
    counters, fresh = Counters(frames=0), Counters(frames=0)
    counters.add(frames=7)
    fresh.load_state_dict(counters.state_dict())
    fresh.add(frames=1)
    assert (counters["frames"], fresh["frames"]) == (7, 8)
    with pytest.raises(casckpt.NotFoundError, match="no counter 'steps'"):
        fresh.add(frames=1, steps=1)
    assert fresh["frames"] == 8
    with pytest.raises(casckpt.MismatchError, match="episodes"):
        fresh.load_state_dict({"episodes": 3})
