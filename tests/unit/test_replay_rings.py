"""Rings committed and restored: what a commit costs, what comes back, and what is never stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from casckpt.errors import (
    InvalidInputError,
    MismatchError,
    NotFoundError,
    StoreWarning,
    UnsupportedStateError,
)
from casckpt.replay import Arrays, Position, Ring, RingView, Sliced
from casckpt.testing.invariants import check_depths
from tests.unit.rings import PlainRing, assert_rows
from tests.unit.stores import open_store

TRUSTS = ("digest", "counter")


# --- R01: a commit costs the new rows ---


@pytest.mark.full
@pytest.mark.parametrize("trust", TRUSTS)
def test_sixty_commits_of_five_hundred_rows_cost_little_more_than_their_rows(store_path: Path, trust: str) -> None:
    live = PlainRing(10_000, width=1015)  # 1 KiB a row, with action and flag
    ring = live.ring(trust=trust)
    sizes = []
    with open_store(store_path) as store:
        for step in range(1, 61):
            live.add(500)
            sizes.append(store.commit(step, {"replay": ring}).stored_bytes)
            if step == 7:
                expected = live.expected(0, 3500)
        assert ring.row_size == 1024
        assert sum(sizes) / 60 <= 500 * 1024 * 1.2 + 4096
        assert_rows(store.restore(7)["replay"].rows(0, 3500), expected)
        for step in range(1, 7):
            store.retire(step)
        view = store.restore(7)["replay"]
        assert_rows(view.rows(0, 3500), expected)
        assert store.verify().ok


def test_rows_of_an_unchanged_ring_are_not_stored_again(store_path: Path) -> None:
    live = PlainRing(100, width=4096)
    live.add(130)
    with open_store(store_path) as store:
        for trust in TRUSTS:
            ring = live.ring(trust=trust)
            store.commit(store.step + 1 if store.step else 1, {"replay": ring})
            again = store.commit(store.step + 1, {"replay": ring})
            assert again.new_bytes == 0
            assert again.components["replay"].manifest == store.snapshot(again.step - 1).components["replay"].manifest


def test_new_process_stores_only_what_the_parent_has_not(store_path: Path) -> None:
    live = PlainRing(200, width=4096)
    live.add(250)
    with open_store(store_path) as store:
        store.commit(1, {"replay": live.ring(trust="counter")})
    live.add(10)
    with open_store(store_path) as store:  # nothing was restored: the new ring knows nothing, and reads everything
        snapshot = store.commit(2, {"replay": live.ring(trust="counter")})
        assert 10 * 4096 < snapshot.new_bytes < 15 * 4096
        assert_rows(store.restore(2)["replay"].rows(60, 260), live.expected(60, 260))


# --- R04: order ---


@pytest.mark.parametrize("trust", TRUSTS)
def test_ring_of_one_slot_has_the_newest_row(store_path: Path, trust: str) -> None:
    live = PlainRing(1)
    ring = live.ring(trust=trust)
    totals = (0, 0, 1, 2, 2, 5)
    with open_store(store_path) as store:
        for step, total in enumerate(totals):
            live.add(total - live.total)
            store.commit(step, {"replay": ring})
        for step, total in enumerate(totals):
            other = PlainRing(1)
            store.restore_into({"replay": other.ring(trust=trust)}, step)
            assert other.total == total
            found = {name: column[:total] for name, column in other.columns().items()}
            assert_rows(found, live.expected(max(0, total - 1), total))


@pytest.mark.few(6)
@pytest.mark.parametrize("total", [0, 1, 17, 49, 50, 51, 75, 99, 100, 101, 1234])
@pytest.mark.parametrize("trust", TRUSTS)
def test_rows_come_back_in_order_wherever_the_ring_stood(store_path: Path, total: int, trust: str) -> None:
    live = PlainRing(50)
    ring = live.ring(trust=trust)
    with open_store(store_path) as store:
        for step, upto in enumerate((total // 3, total), 1):
            live.add(upto - live.total)
            store.commit(step, {"replay": ring})
        view = store.restore(2)["replay"]
        assert isinstance(view, RingView)
        first = max(0, total - 50)
        assert (view.first, view.total, view.capacity, len(view)) == (first, total, 50, total - first)
        assert view.head == total % 50
        assert view.tail == first % 50
        assert_rows(view.rows(first, total), live.expected(first, total))
        other = PlainRing(50)
        store.restore_into({"replay": other.ring(trust=trust)}, 2)
        slots = np.arange(first, total) % 50
        assert other.total == total
        assert_rows({name: column[slots] for name, column in other.columns().items()}, live.expected(first, total))


# --- R03: replace, never append ---


def test_restoring_again_and_again_never_grows_the_ring(store_path: Path) -> None:
    live = PlainRing(64)
    for cycle in range(3):
        with open_store(store_path) as store:
            ring = live.ring(trust="counter")
            report = store.resume_into({"replay": ring})
            assert report.is_fresh is (cycle == 0)
            store.restore_into({"replay": ring}) if cycle else None
            assert live.total == 40 * cycle
            live.add(40)
            store.commit(cycle + 1, {"replay": ring})
            live = PlainRing(64, seed=cycle + 1)
            live.log = [()] * 40 * (cycle + 1)
    with open_store(store_path) as store:
        view = store.restore()["replay"]
        assert (view.first, view.total, len(view)) == (56, 120, 64)


def test_restored_counter_ring_goes_on_with_new_rows_alone(store_path: Path) -> None:
    live = PlainRing(100, width=4096)
    live.add(150)
    with open_store(store_path) as store:
        store.commit(1, {"replay": live.ring(trust="counter")})
    other = PlainRing(100, width=4096, seed=7)
    with open_store(store_path) as store:
        ring = other.ring(trust="counter")
        store.resume_into({"replay": ring})
        other.log = list(live.log)
        other.add(5)
        assert store.commit(2, {"replay": ring}).new_bytes < 6 * 4200
        assert_rows(store.restore(2)["replay"].rows(55, 155), other.expected(55, 155))


# --- R05: rows changed in place ---


def test_changed_flag_of_an_old_row_is_stored_by_digest(store_path: Path) -> None:
    live = PlainRing(100, width=4096)
    live.add(100)
    ring = live.ring()
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        live.done[42] ^= True
        snapshot = store.commit(2, {"replay": ring})
        assert snapshot.stored_bytes < 5000
        assert bool(store.restore(2)["replay"].rows(42, 43)["done"][0]) == bool(live.done[42])
        assert bool(store.restore(1)["replay"].rows(42, 43)["done"][0]) != bool(live.done[42])


def test_changed_row_of_the_half_overwritten_segment_is_stored_by_digest(store_path: Path) -> None:
    live = PlainRing(100)
    live.add(100)
    ring = live.ring()
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        live.add(3)
        live.obs[4] = 255
        store.commit(2, {"replay": ring})
        expected = live.expected(3, 103)
        expected["obs"][1] = 255
        assert_rows(store.restore(2)["replay"].rows(3, 103), expected)


def test_mutable_column_is_stored_whole_whatever_the_counter_says(store_path: Path) -> None:
    live = PlainRing(100)
    live.add(100)
    ring = live.ring(trust="counter", mutable=("done",))
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        live.done[:] = ~live.done
        store.commit(2, {"replay": ring})
        np.testing.assert_array_equal(store.restore(2)["replay"].mutable["done"], live.done)
        other = PlainRing(100)
        store.restore_into({"replay": other.ring(mutable=("done",))}, 2)
        np.testing.assert_array_equal(other.done, live.done)


def test_rows_changed_under_a_trusted_counter_are_told_and_stored(store_path: Path) -> None:
    live = PlainRing(100)
    live.add(80)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        live.obs[:80] ^= 1
        live.add(5)
        with pytest.warns(StoreWarning, match="changed in place"):
            store.commit(2, {"replay": ring})
        np.testing.assert_array_equal(store.restore(2)["replay"].column("obs"), live.obs[:85])


def test_counter_is_not_trusted_after_a_move_to_another_snapshot(store_path: Path) -> None:
    live = PlainRing(100)
    live.add(30)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        live.add(30)
        store.commit(2, {"replay": ring})
        store.resume(1)  # values: the live ring still holds what step 2 has
        live.add(1)
        store.commit(3, {"replay": ring})
        assert_rows(store.restore(3)["replay"].rows(0, 61), live.expected(0, 61))


def test_cleared_ring_is_another_ring(store_path: Path) -> None:
    live = PlainRing(100)
    live.add(90)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        live.total, live.log = 0, []
        live.add(20)
        store.commit(2, {"replay": ring})
        assert_rows(store.restore(2)["replay"].rows(0, 20), live.expected(0, 20))


# --- R07, R08: what rows may lie in ---


def test_commit_of_a_memory_map_owns_its_bytes(store_path: Path, tmp_path: Path) -> None:
    obs = np.memmap(tmp_path / "obs", np.uint8, "w+", shape=(50, 100))
    obs[:] = np.arange(50)[:, None]
    place = {"total": 50}
    ring = Ring(Arrays({"obs": obs}, place, total="total"), trust="counter")
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        obs[:] = 255
        np.testing.assert_array_equal(store.restore(1)["replay"].column("obs")[:, 0], np.arange(50))
        store.restore_into({"replay": ring}, 1)
        np.testing.assert_array_equal(obs[:, 0], np.arange(50))
    del ring, obs


class OnlySlices:
    """Length and slices, and nothing else; counts what was read."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.largest = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: slice) -> dict[str, Any]:
        assert isinstance(at, slice)
        self.largest = max(self.largest, at.stop - at.start)
        return {"x": self.rows[at], "y": self.rows[at, 0]}


def test_buffer_of_slices_alone_is_read_in_slices_and_restored_in_order(store_path: Path) -> None:
    rows = np.random.default_rng(1).random((3000, 64))
    buffer = OnlySlices(rows)
    loaded: list[Any] = []
    ring = Ring(
        Sliced(buffer, capacity=4000, load=lambda part: loaded.clear() if part is None else loaded.append(part))
    )
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        assert buffer.largest * 64 * 8 <= (1 << 20) + 2 * 64 * 8  # a chunk, and the rows that it cuts
        view = store.restore(1)["replay"]
        np.testing.assert_array_equal(view.rows(100, 200)["x"], rows[100:200])
        for _ in range(2):
            store.restore_into({"replay": ring}, 1)
            np.testing.assert_array_equal(np.concatenate([part["x"] for part in loaded]), rows)
            np.testing.assert_array_equal(np.concatenate([part["y"] for part in loaded]), rows[:, 0])


def test_rows_of_torch_tensors_come_back_as_tensors(store_path: Path) -> None:
    obs = torch.arange(40 * 6, dtype=torch.bfloat16).reshape(40, 6)
    reward = torch.arange(40, dtype=torch.float64)
    place = {"total": 47}
    ring = Ring(Arrays({"obs": obs, "reward": reward}, place, total="total"), trust="counter")
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        view = store.restore(1)["replay"]
        order = [(row % 40) for row in range(7, 47)]
        assert torch.equal(view.column("obs"), obs[order])
        assert torch.equal(view.take([46, 7])["reward"], reward[[6, 7]])
        kept = obs.clone()
        obs.zero_()
        version = obs._version
        store.restore_into({"replay": ring}, 1)
        assert torch.equal(obs, kept)
        assert obs._version > version


# --- R13: frames that repeat ---


@pytest.mark.parametrize("has_next", [False, True])
def test_stacked_frames_and_next_observations_are_stored_once(store_path: Path, has_next: bool) -> None:
    rng = np.random.default_rng(5)
    frames = rng.integers(0, 256, (68, 84, 84), dtype=np.uint8)  # noise: whatever is saved is what repeats
    stacks = np.stack([frames[at : at + 4] for at in range(65)])
    columns = {name: np.zeros((1200, 4, 84, 84), np.uint8) for name in ("obs", "next_obs")[: 1 + has_next]}
    for at, column in enumerate(columns.values()):
        column[:64] = stacks[at : 64 + at]
    ring = Ring(Arrays(columns, {"total": 64}, total="total"))
    with open_store(store_path) as store:
        snapshot = store.commit(1, {"replay": ring})
        once = 1.1 * frames.nbytes  # the first chunk of each column starts with whole stacks
        assert snapshot.stored_bytes < once
        assert snapshot.logical_bytes > 3.7 * frames.nbytes * len(columns)
    with open_store(store_path) as store:
        view = store.restore()["replay"]
        for name, column in columns.items():
            np.testing.assert_array_equal(view.column(name), column[:64])
        check_depths(store)
        assert store.verify().ok


# --- reading ---


def test_rows_are_read_from_the_segments_that_hold_them(store_path: Path) -> None:
    live = PlainRing(1000, width=4096)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        for step in range(1, 11):
            live.add(100)
            store.commit(step, {"replay": ring})
        view = store.restore()["replay"]
        read = []
        inner = view._source._restorer.read_pieces
        view._source._restorer.read_pieces = lambda wanted: (read.extend(wanted), inner(wanted))
        assert_rows(view.rows(350, 360), live.expected(350, 360))
        chunks = sum(len(pieces) for _, pieces in read)
        assert 1 <= chunks <= 3
        read.clear()
        newest = next(iter(view.batches(newest_first=True)))
        assert newest[0] >= 900
        assert_rows(newest[1], live.expected(newest[0], 1000))
        first = next(iter(view.batches()))
        assert first[0] == 0
        del view._source._restorer.read_pieces


def test_view_refuses_rows_and_columns_that_are_not_there(store_path: Path) -> None:
    live = PlainRing(20)
    live.add(30)
    with open_store(store_path) as store:
        store.commit(1, {"replay": live.ring()})
        view = store.restore(1)["replay"]
        for start, stop in ((9, 12), (25, 31), (20, 15)):
            with pytest.raises(InvalidInputError, match="holds 10 to 30"):
                view.rows(start, stop)
        with pytest.raises(InvalidInputError, match="holds 10 to 30"):
            view.take([9])
        with pytest.raises(NotFoundError, match="there are"):
            view.column("reward")
        assert len(view.rows(30, 30)["obs"]) == 0
        assert_rows(view.last(5), live.expected(25, 30))
        assert len(view.last(500)["obs"]) == 20


def test_trimmed_view_and_trimmed_restore_have_the_newest_rows(store_path: Path) -> None:
    live = PlainRing(100)
    ring = live.ring()
    with open_store(store_path) as store:
        for step in (10, 20, 30):
            live.add(50)
            store.commit(step, {"replay": ring})
        view = store.restore()["replay"]
        assert view.trimmed(rows=30).first == 120
        assert view.trimmed(since_step=30).first == 100
        assert view.trimmed(since_step=11).first == 50
        times = {step: store.snapshot(step).created_at for step in (20, 30)}
        apart_s = (times[30] - times[20]).total_seconds()
        for age_s, first in ((1e6, 50), (apart_s + 1e-5, 50), (apart_s - 1e-5, 100), (0, 100)):
            assert view.trimmed(max_age_s=age_s).first == first
        assert view.trimmed(max_age_s=1e6, rows=20).first == 130
        for wrong in ({"rows": -1}, {"max_age_s": -0.5}, {"max_age_s": float("nan")}, {"rows": 2.5}):
            with pytest.raises(InvalidInputError, match=r"from 0 on"):
                view.trimmed(**wrong)
        old = PlainRing(100)
        store.restore_into({"replay": old.ring().restoring(max_age_s=apart_s / 2)})
        assert_rows({name: column[:50] for name, column in old.columns().items()}, live.expected(100, 150))
        other = PlainRing(100)
        report = store.restore_into({"replay": other.ring().restoring(rows=30)})
        assert_rows({name: column[:30] for name, column in other.columns().items()}, live.expected(120, 150))
        assert other.total == 30
        assert report.components["replay"]["rows"] == 30
        assert "70 older ones left out" in str(report)


def test_mutable_column_follows_rows_that_get_other_slots(store_path: Path) -> None:
    live, priorities = PlainRing(100), np.zeros(100)
    live.add(150)
    priorities[:] = live.obs[:, 0]

    def ring_of(buffer: PlainRing, values: Any, mutable: Any) -> Ring:
        return Ring(Arrays({"obs": buffer.obs, "p": values}, buffer, total="total", mutable=mutable))

    with open_store(store_path) as store:
        store.commit(1, {"replay": ring_of(live, priorities, ["p"])})
        other, values = PlainRing(100), np.zeros(100)
        store.restore_into({"replay": ring_of(other, values, ["p"]).restoring(rows=70)}, 1)
        np.testing.assert_array_equal(other.obs[:70], live.expected(80, 150)["obs"])
        np.testing.assert_array_equal(values[:70], other.obs[:70, 0])
        fixed = Ring(Arrays({"obs": other.obs}, other, total="total", mutable={"p": values}))
        for rows in (70, 50):  # the newest 50 would keep their slots
            with pytest.raises(MismatchError, match="replay/mutable"):
                store.restore_into({"replay": fixed.restoring(rows=rows)}, 1)


def test_commit_that_keeps_fewer_rows_stores_those_alone(store_path: Path) -> None:
    live = PlainRing(100)
    ring = live.ring(keep_rows=30)
    with open_store(store_path) as store:
        for step in (1, 2, 3):
            live.add(45)
            store.commit(step, {"replay": ring})
        view = store.restore()["replay"]
        assert (view.first, view.total) == (105, 135)
        assert_rows(view.rows(105, 135), live.expected(105, 135))
        other = PlainRing(100)
        target = other.ring()
        store.resume_into({"replay": target})
        other.log = list(live.log)
        other.add(3)
        store.commit(4, {"replay": target})
        assert_rows(store.restore()["replay"].rows(105, 138), other.expected(105, 138))


def test_steps_old_enough_are_left_out_of_a_commit(store_path: Path) -> None:
    live = PlainRing(1000)
    ring = live.ring(keep_steps=2)
    with open_store(store_path) as store:
        for step in range(1, 6):
            live.add(10)
            store.commit(step, {"replay": ring})
        view = store.restore()["replay"]
        assert (view.first, view.total) == (20, 50)


# --- R09, R10, R15 ---


def test_capacity_is_kept_or_changed_by_rule(store_path: Path) -> None:
    live = PlainRing(1000)
    live.add(1700)
    with open_store(store_path) as store:
        store.commit(1, {"replay": live.ring()})
        small = PlainRing(500)
        before = {name: column.copy() for name, column in small.columns().items()}
        with pytest.raises(MismatchError, match="replay/capacity: expected 1000, found 500"):
            store.restore_into({"replay": small.ring()}, 1)
        assert small.total == 0
        assert_rows(small.columns(), before)
        report = store.restore_into({"replay": small.ring(on_capacity="newest")}, 1)
        order = np.argsort([(row - 1200) % 500 for row in range(500)])
        assert report.components["replay"]["rows"] == 500
        assert "capacity 1000 → 500" in str(report)
        slots = (small.total + np.arange(500)) % 500
        assert_rows({n: c[slots] for n, c in small.columns().items()}, live.expected(1200, 1700))
        assert len(order) == 500
        large = PlainRing(2000)
        store.restore_into({"replay": large.ring(on_capacity="newest")}, 1)
        assert large.total == 1000
        assert_rows({n: c[:1000] for n, c in large.columns().items()}, live.expected(700, 1700))


def test_cold_start_is_told_with_what_depends_on_it(store_path: Path) -> None:
    live = PlainRing(50)
    live.add(60)
    counters = {"updates": 9000}
    with open_store(store_path) as store:
        store.commit(1, {"replay": live.ring()})
        other = PlainRing(50)
        ring = other.ring()
        report = store.resume_into({"replay": ring.cold({"updates": lambda: counters.update(updates=0)})}, 1)
        assert (other.total, counters["updates"]) == (0, 9000)
        assert report.components["replay"]["is_cold"] is True
        assert "50 rows left out; updates: depend on the rows and were not reset" in str(report)
        store.restore_into({"replay": ring.cold({"updates": lambda: counters.update(updates=0)}, reset=True)}, 1)
        assert counters["updates"] == 0
        other.log = list(live.log)
        other.add(4)
        store.commit(2, {"replay": ring})
        assert_rows(store.restore()["replay"].rows(60, 64), other.expected(60, 64))


def test_open_episode_is_cut_when_asked_for_and_told(store_path: Path) -> None:
    live = PlainRing(50)
    live.add(30)
    live.done[29] = False
    with open_store(store_path) as store:
        store.commit(1, {"replay": live.ring(episode_end="done")})
        other = PlainRing(50)
        ring = other.ring(episode_end="done", trust="counter")
        report = store.resume_into({"replay": ring}, 1)
        assert not other.done[29]
        assert "the open episode continues" in str(report)
        report = store.resume_into({"replay": ring.restoring(open_episode="truncate")}, 1)
        assert other.done[29]
        assert "the open episode was cut" in str(report)
        store.commit(2, {"replay": ring})
        assert bool(store.restore()["replay"].rows(29, 30)["done"][0])


@pytest.mark.parametrize("is_mutable", [False, True])
def test_open_episode_is_cut_in_a_column_whose_slices_are_copies(store_path: Path, is_mutable: bool) -> None:
    class Copies:
        """As a data set of HDF5."""

        def __init__(self, array: Any) -> None:
            self._array, self.shape, self.dtype = array, array.shape, array.dtype

        def __len__(self) -> int:
            return len(self._array)

        def __getitem__(self, rows: slice) -> Any:
            return self._array[rows].copy()

        def __setitem__(self, rows: slice, values: Any) -> None:
            self._array[rows] = values

    live = PlainRing(50)
    live.add(30)
    live.done[:] = False
    columns = {**live.columns(), **({} if is_mutable else {"done": Copies(live.done)})}
    mutable = ["done"] if is_mutable else []
    ring = Ring(Arrays(columns, live, total="total", mutable=mutable), episode_end="done")
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        live.done[:] = True
        store.resume_into({"replay": ring.restoring(open_episode="truncate")}, 1)
        assert np.flatnonzero(live.done[:30]).tolist() == [29]


def test_sampler_of_another_size_is_refused_with_nothing_touched(store_path: Path) -> None:
    live, priorities = PlainRing(100), np.random.default_rng(0).random(100)
    live.add(24)

    def prioritized(buffer: PlainRing, values: Any) -> Ring:
        return Ring(
            Arrays(buffer.columns(), buffer, total="total", mutable={"priorities": values}), on_capacity="newest"
        )

    with open_store(store_path) as store:
        store.commit(1, {"replay": prioritized(live, priorities)})
        fresh, same = PlainRing(100), np.zeros(100)
        store.restore_into({"replay": prioritized(fresh, same)}, 1)
        np.testing.assert_array_equal(same, priorities)
        other, fewer = PlainRing(50), np.zeros(50)
        with pytest.raises(MismatchError, match="replay/mutable/priorities"):
            store.restore_into({"replay": prioritized(other, fewer)}, 1)
        assert other.total == 0
        assert not fewer.any()
        assert not other.obs.any()


# --- next draws ---


def test_next_hundred_batches_after_a_resume_are_those_of_the_run(store_path: Path) -> None:
    live = PlainRing(128)
    live.add(300)
    rng = np.random.default_rng(3)

    def batches(buffer: PlainRing, generator: Any) -> list[Any]:
        count = min(buffer.total, buffer.capacity)
        return [buffer.obs[generator.integers(0, count, 16)].copy() for _ in range(100)]

    with open_store(store_path) as store:
        store.commit(1, {"replay": live.ring(), "rng": {"sampler": rng}})
        expected = batches(live, rng)
        other, other_rng = PlainRing(128), np.random.default_rng(99)
        store.resume_into({"replay": other.ring(), "rng": {"sampler": other_rng}})
        np.testing.assert_array_equal(batches(other, other_rng), expected)


# --- what is refused ---


def by_place(live: PlainRing) -> Arrays:
    return Arrays(live.columns(), live, position="position", full="full")


def sliced(live: PlainRing) -> Ring:
    live.add(1)
    return Ring(Sliced(live.done, capacity=10), episode_end="rows")


WIDE = torch.zeros(9, 4)


class OtherTensor:
    """A tensor of a library that casckpt does not know."""

    shape, dtype = (9,), torch.float32

    def __len__(self) -> int:
        return 9

    def __getitem__(self, rows: slice) -> Any:
        return torch.zeros(9)[rows]


def counted(columns: dict[str, Any], **options: Any) -> Arrays:
    return Arrays(columns, {"total": 0}, total="total", **options)


def test_ring_and_plain_state_are_not_restored_into_each_other(store_path: Path) -> None:
    live = PlainRing(50)
    live.add(5)
    with open_store(store_path) as store:
        store.commit(1, {"replay": live.ring(), "arrays": {"obs": live.obs}})
        with pytest.raises(MismatchError, match="expected a ring, found a dict"):
            store.restore_into({"replay": {"obs": live.obs}}, 1)
        with pytest.raises(MismatchError, match="expected no ring, found a Ring"):
            store.restore_into({"arrays": live.ring()}, 1)
        other = PlainRing(50, width=7)
        with pytest.raises(MismatchError, match="replay/columns/obs"):
            store.restore_into({"replay": other.ring()}, 1)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda live: Ring({"obs": live.obs}), InvalidInputError, "casckpt.replay.Arrays"),
        (lambda live: live.ring(trust="blind"), InvalidInputError, "expected one of digest, counter"),
        (lambda live: live.ring(keep_rows=0), InvalidInputError, "an integer from 1 on"),
        (lambda live: Ring(counted({"x": live.obs}, mutable={"p": 1}), keep_rows=5), InvalidInputError, "follow"),
        (lambda live: Ring(by_place(live), trust="counter"), InvalidInputError, "counts the rows"),
        (lambda live: Arrays(live.columns(), live), InvalidInputError, "name where the ring stands"),
        (lambda live: Arrays(live.columns(), live, total="count"), InvalidInputError, "without 'count'"),
        (lambda live: counted({"a": live.obs, "b": live.obs[:5]}), InvalidInputError, "one row per slot"),
        (lambda live: counted(live.columns(), mutable=["prio"]), InvalidInputError, "no such column"),
        (lambda live: live.ring().restoring(open_episode="truncate"), InvalidInputError, "episode_end"),
        (lambda live: live.ring(episode_end="ends"), InvalidInputError, "no column"),
        (lambda live: sliced(live).restoring(open_episode="truncate"), InvalidInputError, "cannot be assigned"),
        (lambda live: Ring(counted({"x": OtherTensor()})), UnsupportedStateError, "plain view"),
        (lambda live: Ring(counted({"x": torch.zeros(1, 4).expand(9, 4)})), InvalidInputError, "contiguous"),
        (lambda live: Ring(counted({"x": torch.zeros(9, 4, 3).mT})), InvalidInputError, "contiguous"),
        (lambda live: Ring(counted({"a": WIDE[:, :2], "b": WIDE[:, 2:]})), InvalidInputError, "contiguous"),
        (lambda live: Ring(counted({"x": np.array([None, 1])})), UnsupportedStateError, "x"),
        (lambda live: Sliced([], capacity=3), InvalidInputError, "empty buffer"),
    ],
)  # fmt: skip
def test_ring_that_could_not_be_kept_is_refused_when_it_is_made(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(PlainRing(10))


def test_ring_without_a_counter_is_followed_by_its_place(store_path: Path) -> None:
    live = PlainRing(40)
    ring = Ring(Arrays(live.columns(), live, position="position", full="full"))

    class Place:
        position, full = 0, False

    with open_store(store_path) as store:
        for step in range(1, 9):
            live.add(13)
            store.commit(step, {"replay": ring})
        view = store.restore()["replay"]
        assert (len(view), view.head) == (40, 104 % 40)
        assert_rows(view.rows(view.first, view.total), live.expected(64, 104))
        other, place = PlainRing(40), Place()
        store.restore_into({"replay": Ring(Arrays(other.columns(), place, position="position", full="full"))})
        assert (place.position, place.full) == (104 % 40, True)
        np.testing.assert_array_equal(other.obs, live.obs)


def test_position_counts_slots_around_the_end() -> None:
    position = Position(10, 3, 8, 103)
    assert position.tail == 5
    assert [position.slot(row) for row in (95, 99, 100, 102)] == [5, 9, 0, 2]
