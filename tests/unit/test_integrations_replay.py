"""Buffers of real frameworks as rings: the next draws are equal, commits cost new rows, and nothing is taken for known
that was changed behind the counter.

Expected values are what the framework itself draws from the buffer that was committed.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.errors import InvalidInputError, MismatchError, UnsupportedStateError
from casckpt.integrations.replay import rings
from casckpt.replay import Ring
from tests.unit.buffers import (
    ACTION,
    CAPACITY,
    DRAWS,
    ENVS,
    EVERY_KIND,
    GOALS,
    KINDS,
    Goals,
    Kind,
    add_cached,
    add_sb3,
    add_tianshou,
    draw_sb3,
    framework,
    fresh,
    sb3_kind,
    transition,
)

# --- R06 ---


@pytest.mark.full
@EVERY_KIND
@pytest.mark.parametrize("trust", ["counter", "digest"])
def test_next_draws_after_a_restore_are_those_of_the_buffer_that_was_committed(
    kind: Kind, trust: str, store_path: Path
) -> None:
    rng = np.random.default_rng(1)
    live = kind.make()
    kind.fill(live, 7, rng)
    state = {**rings(live, trust=trust), "rng": casckpt.RngState()}
    expected = {}
    with casckpt.open(str(store_path), create=True) as store:
        for step in range(1, 6):  # part of a ring, nearly full, wrapped, wrapped twice
            store.commit(step, state)
            expected[step] = kind.draws(live)
            kind.fill(live, 9, rng)
        assert store.verify().ok
        target = fresh(kind)
        again = {**rings(target, trust=trust), "rng": casckpt.RngState()}
        for step in (5, 2, 4, 1, 3, 3):  # twice: a restore replaces
            store.restore_into(again, step)
            for drawn, wanted in zip(kind.draws(target), expected[step], strict=True):
                assert len(drawn) == len(wanted) > 3
                assert all(one.dtype == other.dtype for one, other in zip(drawn, wanted, strict=True))
                assert all(np.array_equal(one, other) for one, other in zip(drawn, wanted, strict=True))


@pytest.mark.full
@EVERY_KIND
def test_training_goes_on_after_a_restore_as_it_did(kind: Kind, store_path: Path) -> None:
    live = kind.make()
    kind.fill(live, 23, np.random.default_rng(2))
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, {**rings(live), "rng": casckpt.RngState()})
        target = fresh(kind)
        state = {**rings(target), "rng": casckpt.RngState()}
        store.resume_into(state, 1)
        kind.fill(live, 6, np.random.default_rng(3))
        kind.fill(target, 6, np.random.default_rng(3))
        store.commit(2, state)
        store.restore_into({**rings(fresh(kind)), "rng": casckpt.RngState()}, 2)
        other = fresh(kind)
        store.restore_into({**rings(other), "rng": casckpt.RngState()}, 2)
        drawn = []
        for buffer in (live, target, other):
            np.random.seed(4)
            torch.manual_seed(4)
            drawn.append(kind.draws(buffer, 100))
    for one, *others in zip(*drawn, strict=True):
        for each in others:
            assert all(np.array_equal(a, b) for a, b in zip(one, each, strict=True))


@pytest.mark.full
@EVERY_KIND
def test_a_commit_costs_the_rows_that_are_new(kind: Kind, store_path: Path) -> None:
    rng = np.random.default_rng(5)
    live = kind.make()
    kind.fill(live, 3 * CAPACITY, rng)
    with casckpt.open(str(store_path), create=True) as store:
        state = rings(live)
        row_size = max(each.row_size for each in state.values() if isinstance(each, Ring))
        first = store.commit(1, state).new_bytes
        kind.fill(live, 1, rng)
        second = store.commit(2, state).new_bytes
        mutable = store.commit(3, state).new_bytes
    new_count = 3 if len(state) > 2 else 1
    if kind is KINDS["tianshou Cached"]:
        new_count += CAPACITY  # an episode that ended went from its cache to the rest, of which it is the whole now
    assert first > (CAPACITY - 1) * row_size > 18_000
    assert mutable == 0
    assert second < new_count * row_size + 5000  # priorities and episodes of a small ring


# --- what is changed behind the counter ---


@pytest.mark.full
@pytest.mark.parametrize("name", ["sb3 Replay", "tianshou Replay", "torchrl memory"])
def test_a_place_that_moved_without_the_counter_has_every_row_read_anew(name: str, store_path: Path) -> None:
    kind = KINDS[name]
    live, other = kind.make(), kind.make()
    kind.fill(live, 8, np.random.default_rng(6))
    kind.fill(other, 13, np.random.default_rng(7))
    with casckpt.open(str(store_path), create=True) as store:
        state = rings(live)
        store.commit(1, state)
        if name.startswith("sb3"):
            live.pos = 13
            for key in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
                getattr(live, key)[...] = getattr(other, key)
        elif name.startswith("tianshou"):
            live.reset()
            live.update(other)
        else:
            live.load_state_dict(other.state_dict())
            live._writer._write_count += 4
        store.commit(2, state)
        target = fresh(kind)
        store.restore_into(rings(target), 2)
        np.random.seed(8)
        torch.manual_seed(8)
        expected = kind.draws(other)
        np.random.seed(8)
        torch.manual_seed(8)
        assert all(
            np.array_equal(a, b)
            for one, wanted in zip(kind.draws(target), expected, strict=True)
            for a, b in zip(one, wanted, strict=True)
        )


def _through_hdf5(buffer: Any, folder: Path) -> Any:
    buffer.save_hdf5(str(folder / "buffer.hdf5"))
    return type(buffer).load_hdf5(str(folder / "buffer.hdf5"))


COPIES: dict[str, Callable[[Any, Path], Any]] = {
    "pickled": lambda buffer, _: pickle.loads(pickle.dumps(buffer)),  # noqa: S301 - what `save_replay_buffer` does
    "copied": lambda buffer, _: copy.deepcopy(buffer),
    "copied as a shell": lambda buffer, _: copy.copy(buffer),
    "saved as HDF5": _through_hdf5,
}


@pytest.mark.full
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["sb3 Replay", "sb3 HER", "tianshou Replay", "tianshou Prioritized"])
def test_a_buffer_whose_adds_are_counted_can_be_saved_and_copied_as_before(name: str, how: str, tmp_path: Path) -> None:
    if how == "saved as HDF5" and not name.startswith("tianshou"):
        pytest.skip("no method of this framework")
    kind = KINDS[name]
    live = kind.make()
    kind.fill(live, 5, np.random.default_rng(9))
    rings(live)
    twin = COPIES[how](live, tmp_path)
    kind.fill(twin, 3, np.random.default_rng(9))
    for buffer, count in ((live, 5), (twin, 8)):
        (ring,) = rings(buffer).values()
        position = ring.buffer.position()
        assert (position.head, position.held, position.total) == (count, count, count)
        assert type(buffer).__name__ == type(kind.make()).__name__


@pytest.mark.full
def test_columns_that_tianshou_learns_of_with_a_later_row_are_stored_with_it(store_path: Path) -> None:
    """What environments say of an ended episode is there when the first one ends."""
    batch = framework("tianshou.data").Batch
    live, target = (framework("tianshou.data").VectorReplayBuffer(30, 2) for _ in range(2))

    def add(buffer: Any, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for at in range(count):
            row = transition(rng, 2)
            if seed % 2 and at == count - 1:
                row.info = batch(row.info, episode=batch(r=rng.normal(size=2), l=rng.integers(1, 9, 2)))
            buffer.add(row)

    add(live, 8, 2)
    state = {**rings(live), "rng": casckpt.RngState()}
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, state)
        add(live, 5, 3)
        store.commit(2, state)
        add(live, 30, 4)
        store.commit(3, state)
        expected = [live.sample(16)[0] for _ in range(DRAWS)]
        add(target, 1, 5)
        store.restore_into({**rings(target), "rng": casckpt.RngState()})
        for wanted in expected:
            drawn = target.sample(16)[0]
            assert np.array_equal(drawn.info.episode.r, wanted.info.episode.r)
            assert np.array_equal(drawn.info.episode.l, wanted.info.episode.l)
            assert np.array_equal(drawn.obs, wanted.obs)
        assert "info/episode/r" not in store.restore(1)["replay.0"].columns
        assert store.restore(2)["replay.0"].last(1)["info/episode/r"][0] != 0


@pytest.mark.full
def test_episodes_that_went_from_a_cache_to_the_rest_cost_their_rows(store_path: Path) -> None:
    tianshou = framework("tianshou.data")
    live, rng = tianshou.CachedReplayBuffer(tianshou.ReplayBuffer(400), 3, 30), np.random.default_rng(15)
    for _ in range(300):
        add_cached(live, rng)
    moved = 0
    with casckpt.open(str(store_path), create=True) as store:
        state = rings(live)
        store.commit(1, state)
        for step in range(2, 12):
            before = live.main_buffer._index
            add_cached(live, rng)
            new_rows = (live.main_buffer._index - before) % 400
            new_bytes = store.commit(step, state).components["replay.0"].new_bytes
            assert new_bytes < new_rows * state["replay.0"].row_size + 2000
            moved += new_rows
    assert moved > 10


@pytest.mark.full
@pytest.mark.parametrize("how", ["emptied", "emptied but for its count", "loaded"])
def test_a_torchrl_buffer_that_starts_anew_is_another_ring(how: str, store_path: Path) -> None:
    def extend(buffer: Any, values: list[float]) -> Any:
        buffer.extend(framework("tensordict").TensorDict({"n": torch.tensor(values)}, [len(values)]))
        return buffer

    def made(values: list[float]) -> Any:
        torchrl = framework("torchrl.data")
        rows = torchrl.LazyTensorStorage(CAPACITY)
        return extend(torchrl.TensorDictReplayBuffer(storage=rows, batch_size=4), values)

    before, after = [0.0] * 7, [0.0] * 9
    before[5], after[5] = 1.0, 2.0  # among rows that are equal wherever samples are looked at
    live = made(before)
    with casckpt.open(str(store_path), create=True) as store:
        state = rings(live)
        store.commit(1, state)
        if how == "loaded":
            live.load_state_dict(made(after).state_dict())
        else:
            live.empty(empty_write_count=how == "emptied")
            extend(live, after)
        store.commit(2, state)
        assert store.restore(2)["replay"].column("n").tolist() == after


@pytest.mark.full
def test_batches_that_torchrl_drew_ahead_are_of_the_restored_rows(store_path: Path) -> None:
    def made(first: int) -> Any:
        torchrl = framework("torchrl.data")
        rows = torchrl.LazyTensorStorage(CAPACITY)
        buffer = torchrl.TensorDictReplayBuffer(storage=rows, batch_size=4, prefetch=3)
        buffer.extend(framework("tensordict").TensorDict({"n": torch.arange(first, first + CAPACITY)}, [CAPACITY]))
        return buffer

    live, target = made(0), made(100)
    with casckpt.open(str(store_path), create=True) as store, target._prefetch_executor:
        store.commit(1, rings(live))
        assert target.sample()["n"].min() >= 100
        store.restore_into(rings(target))
        assert all(target.sample()["n"].max() < 100 for _ in range(DRAWS))


@pytest.mark.full
def test_of_the_batches_drawn_ahead_only_those_are_waited_for_that_cannot_be_cancelled(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was cancelled before it began is never said to be done; one that has begun reads rows until it is."""
    torchrl = framework("torchrl.data")
    target = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(CAPACITY), batch_size=4, prefetch=3)
    target.extend(framework("tensordict").TensorDict({"n": torch.arange(CAPACITY)}, [CAPACITY]))
    begun, waiting = Future[Any](), Future[Any]()
    assert begun.set_running_or_notify_cancel()
    waited: list[tuple[list[Any], int]] = []

    def wait_for(futures: Any) -> None:
        waited.append((list(futures), len(target._prefetch_queue)))

    monkeypatch.setattr("casckpt.integrations.replay._torchrl.wait", wait_for)
    with casckpt.open(str(store_path), create=True) as store, target._prefetch_executor:
        store.commit(1, rings(target))
        target._prefetch_queue.extend([begun, waiting])
        store.restore_into(rings(target))
    assert waited == [([begun], 2)]  # before they are forgotten
    assert waiting.cancelled() and not target._prefetch_queue


@pytest.mark.full
def test_a_hindsight_buffer_that_was_cut_is_stored_as_cut(store_path: Path) -> None:
    kind = KINDS["sb3 HER"]
    live = kind.make()
    kind.fill(live, 9, np.random.default_rng(10))
    with casckpt.open(str(store_path), create=True) as store:
        state = rings(live)
        store.commit(1, state)
        live.dones[live.pos - 1] = 0
        live._current_ep_start[:] = live.pos - 2
        with pytest.warns(UserWarning, match="truncated"):
            live.truncate_last_trajectory()
        store.commit(2, state)
        target = fresh(kind)
        store.restore_into(rings(target), 2)
        assert (target.dones[live.pos - 1] == 1).all()
        assert np.array_equal(target.ep_length, live.ep_length)
        store.restore_into(rings(target), 1)
        assert not np.array_equal(target.ep_length, live.ep_length)


@pytest.mark.full
@pytest.mark.parametrize("name", ["tianshou HER", "tianshou HERVector"])
def test_goals_that_were_written_over_rows_for_a_draw_are_not_stored(name: str, store_path: Path) -> None:
    kind = KINDS[name]
    live, drawn = kind.make(), kind.make()
    for buffer in (live, drawn):
        kind.fill(buffer, 18, np.random.default_rng(12))
    with casckpt.open(str(store_path), create=True) as store:
        kind.draws(drawn)  # leaves other goals in the rows until the next draw
        store.commit(1, rings(drawn))
        target = fresh(kind)
        kind.draws(target)
        store.restore_into(rings(target), 1)
        found = []
        for buffer in (live, target):
            np.random.seed(4)
            found.append(kind.draws(buffer))
    assert all(np.array_equal(a, b) for one, other in zip(*found, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.full
def test_buffer_of_an_algorithm_of_sb3_contrib_draws_as_it_did(store_path: Path) -> None:
    contrib = pytest.importorskip("sb3_contrib", reason='needs the extra "sb3"')

    def model(seed: int) -> Any:
        policy = {"net_arch": [8]}
        return contrib.TQC(
            "MlpPolicy", "Pendulum-v1", policy_kwargs=policy, learning_starts=9, buffer_size=30, seed=seed
        )

    live, other = model(1), model(2)
    live.learn(40)
    other.learn(12)
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, {**rings(live.replay_buffer), "rng": casckpt.RngState()})
        expected = [[part.numpy().copy() for part in live.replay_buffer.sample(16)[:5]] for _ in range(100)]
        store.restore_into({**rings(other.replay_buffer), "rng": casckpt.RngState()})
        for wanted in expected:
            drawn = other.replay_buffer.sample(16)[:5]
            assert all(np.array_equal(one.numpy(), each) for one, each in zip(drawn, wanted, strict=True))


@pytest.mark.full
def test_priorities_of_tianshou_are_equal_in_a_fresh_buffer_and_refused_by_a_smaller_one(store_path: Path) -> None:
    def made(capacity: int, row_count: int) -> Any:
        buffer = framework("tianshou.data").PrioritizedReplayBuffer(capacity, alpha=0.6, beta=0.4)
        rng = np.random.default_rng(row_count)
        for _ in range(row_count):
            add_tianshou(buffer, rng)
        return buffer

    live, same, smaller = made(100, 24), made(100, 2), made(50, 3)
    before = smaller.weight._value.copy(), smaller._meta.rew.copy(), smaller._index
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, rings(live))
        store.restore_into(rings(same), 1)
        np.testing.assert_array_equal(same.weight[np.arange(100)], live.weight[np.arange(100)])
        assert same.weight[np.arange(24)].min() > 0 == same.weight[np.arange(24, 100)].max()
        for rule in ("refuse", "newest"):
            with pytest.raises(MismatchError, match="replay/mutable"):
                store.restore_into(rings(smaller, on_capacity=rule), 1)
        after = smaller.weight._value, smaller._meta.rew, smaller._index
        assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


# --- TorchRL's priorities ---


class _Tree:
    """A segment tree as TorchRL's compiled part has them, as far as an adapter sees it."""

    def __init__(self, capacity: int) -> None:
        self.leaves = np.zeros(capacity, np.float32)

    def __getitem__(self, at: Any) -> Any:
        return self.leaves[at]

    def __setitem__(self, at: Any, values: Any) -> None:
        self.leaves[at] = values


def _prioritized(row_count: int) -> Any:
    """A buffer whose row n has the priority n + 1, in both trees."""
    torchrl = framework("torchrl.data")

    class Sampler(torchrl.RandomSampler):
        """The priorities of a prioritized sampler, over trees that need nothing compiled."""

        def __init__(self) -> None:
            super().__init__()
            self._alpha, self._beta, self._eps = 0.6, 0.4, 1e-8
            self._empty()

        def _empty(self) -> None:
            self._sum_tree, self._min_tree, self._max_priority = _Tree(CAPACITY), _Tree(CAPACITY), (None, None)

    rows = torchrl.LazyTensorStorage(CAPACITY)
    buffer = torchrl.TensorDictReplayBuffer(storage=rows, sampler=Sampler(), batch_size=4)
    for row in range(row_count):
        buffer.extend(framework("tensordict").TensorDict({"n": torch.tensor([float(row)])}, [1]))
        for tree in (buffer.sampler._sum_tree, buffer.sampler._min_tree):
            tree[row % CAPACITY] = row + 1
    buffer.sampler._max_priority = (float(row_count), (row_count - 1) % CAPACITY)
    return buffer


def _priorities(buffer: Any) -> dict[int, tuple[float, float]]:
    """Row number to its two priorities; a slot without a row has none."""
    sums, minima = buffer.sampler._sum_tree.leaves, buffer.sampler._min_tree.leaves
    assert not sums[len(buffer) :].any()
    rows = buffer._storage._storage["n"][: len(buffer)].tolist()
    return {int(row): (float(sums[at]), float(minima[at])) for at, row in enumerate(rows)}


@pytest.mark.full
@pytest.mark.parametrize("written", [7, CAPACITY, 33, 2 * CAPACITY + 5])
@pytest.mark.parametrize("kept", [5, 13, CAPACITY])
@pytest.mark.parametrize("when", ["commit", "restore"])
def test_priorities_of_torchrl_follow_the_rows_that_are_kept(
    written: int, kept: int, when: str, store_path: Path
) -> None:
    live, target = _prioritized(written), _prioritized(3)
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, rings(live, **({"keep_rows": kept} if when == "commit" else {})))
        (ring,) = rings(target).values()
        store.restore_into({"replay": ring.restoring(rows=kept) if when == "restore" else ring})
        first = max(0, written - min(kept, CAPACITY))
        assert _priorities(target) == {row: (row + 1, row + 1) for row in range(first, written)}
        value, at = target.sampler._max_priority
        assert (value, target._storage._storage["n"][at].item()) == (written, written - 1)
        store.restore_into({"replay": ring.cold()})
        assert _priorities(target) == {}


# --- what is refused ---


@pytest.mark.full
@pytest.mark.parametrize("name", ["sb3 HER", "tianshou Replay", "tianshou Prioritized", "torchrl without replacement"])
def test_rows_are_not_left_out_where_something_by_slot_could_not_follow(name: str, store_path: Path) -> None:
    kind = KINDS[name]
    live, target = kind.make(), fresh(kind)
    kind.fill(live, CAPACITY + 4, np.random.default_rng(13))
    kind.draws(live)
    with pytest.raises(InvalidInputError, match="could be restored"):
        rings(live, keep_rows=4)
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, rings(live))
        (ring,) = rings(target).values()
        before = ring.buffer.position()
        for rows in (4, 9):  # the newest four would keep their slots
            with pytest.raises(MismatchError, match="replay/mutable"):
                store.restore_into({"replay": ring.restoring(rows=rows)}, 1)
        assert ring.buffer.position() == before


@pytest.mark.full
def test_what_cannot_be_a_ring_is_refused_and_says_what_to_do(store_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"Wrap it in casckpt\.replay\.Arrays"):
        rings([1, 2, 3])
    for name in ("tianshou Replay", "torchrl memory"):
        with pytest.raises(InvalidInputError, match="does not tell its columns"):
            rings(KINDS[name].make())
    torchrl = framework("torchrl.data")
    with pytest.raises(InvalidInputError, match="no ring of tensors"):
        rings(torchrl.ReplayBuffer(storage=torchrl.ListStorage(10)))
    with pytest.raises(InvalidInputError, match="2 dimensions"):
        buffer = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(10, ndim=2))
        buffer.extend(framework("tensordict").TensorDict({"x": torch.zeros(2, 2)}, [2, 2]))
        rings(buffer)
    objects = sb3_kind("HerReplayBuffer", GOALS, env=Goals(), copy_info_dict=True).make()
    with pytest.raises(UnsupportedStateError, match="copy_info_dict=False"):
        rings(objects)


@pytest.mark.full
def test_hindsight_rows_do_not_go_into_another_capacity(store_path: Path) -> None:
    kind = KINDS["sb3 HER"]
    live = kind.make()
    kind.fill(live, 9, np.random.default_rng(11))
    smaller = Kind(lambda: type(live)(10, GOALS, ACTION, device="cpu", n_envs=ENVS, env=Goals()), add_sb3, draw_sb3)
    target = fresh(smaller)
    before = pickle.dumps(vars(target)["actions"])
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(1, rings(live))
        for rule in ("refuse", "newest"):  # episodes are known by their slots
            with pytest.raises(MismatchError):
                store.restore_into(rings(target, on_capacity=rule), 1)
            assert pickle.dumps(vars(target)["actions"]) == before
