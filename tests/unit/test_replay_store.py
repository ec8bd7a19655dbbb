"""Rings among everything else that a store does: saves in the background, writers beside them, damage, diffs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import casckpt
from casckpt.errors import ConcurrentMutationError, SaveFailedError
from casckpt.replay import Arrays, Ring
from casckpt.testing.anatomy import dissect
from casckpt.testing.invariants import index_counts
from tests.unit.rings import PlainRing, assert_rows
from tests.unit.stores import open_store

# --- in the background, beside writers ---


def test_background_saves_take_new_rows_alone_and_follow_each_other(store_path: Path) -> None:
    live = PlainRing(200)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        handles = []
        for step in range(1, 8):
            live.add(60)
            handles.append(store.commit_async(step, {"replay": ring}))
        assert [handle.result().step for handle in handles] == list(range(1, 8))
        for step in range(1, 8):
            total = 60 * step
            first = max(0, total - 200)
            assert_rows(store.restore(step)["replay"].rows(first, total), live.expected(first, total))


def test_save_that_followed_a_failed_one_fails_and_the_next_is_whole(store_path: Path, monkeypatch: Any) -> None:
    live = PlainRing(200)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        live.add(50)
        store.commit(1, {"replay": ring})
        gate = threading.Event()
        inner = store._committer.commit

        def fail_once(draft: Any) -> Any:
            gate.wait(200)
            monkeypatch.undo()
            raise casckpt.StorageError("the disk is gone", errno=5)

        monkeypatch.setattr(store._committer, "commit", fail_once)
        live.add(50)
        first = store.commit_async(2, {"replay": ring})
        live.add(50)
        second = store.commit_async(3, {"replay": ring})
        gate.set()
        with pytest.raises(SaveFailedError):
            first.result()
        with pytest.raises(SaveFailedError, match="that one is not in the store"):
            second.result()
        assert store._committer.commit == inner
        live.add(20)
        store.commit_async(4, {"replay": ring}).result()
        assert_rows(store.restore(4)["replay"].rows(0, 170), live.expected(0, 170))


def test_commit_that_fails_leaves_the_ring_as_it_was_stored(store_path: Path, monkeypatch: Any) -> None:
    live = PlainRing(200, width=4096)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        live.add(150)
        store.commit(1, {"replay": ring})
        monkeypatch.setattr(store._committer, "_publish", lambda *_: (_ for _ in ()).throw(OSError("no")))
        live.add(10)
        with pytest.raises(OSError, match="no"):
            store.commit(2, {"replay": ring})
        monkeypatch.undo()
        live.add(10)
        assert store.commit(3, {"replay": ring}).new_bytes < 30 * 4200
        assert_rows(store.restore(3)["replay"].rows(0, 170), live.expected(0, 170))


def test_rows_that_come_during_a_commit_belong_to_the_next(store_path: Path) -> None:
    live = PlainRing(1000)
    live.add(400)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        inner = store._committer._components.add

        def add_meanwhile(*arguments: Any) -> Any:
            live.add(25)
            return inner(*arguments)

        store._committer._components.add = add_meanwhile
        store.commit(1, {"replay": ring})
        del store._committer._components.add
        assert_rows(store.restore(1)["replay"].rows(0, 400), live.expected(0, 400))
        store.commit(2, {"replay": ring})
        assert_rows(store.restore(2)["replay"].rows(0, 425), live.expected(0, 425))


def test_writer_that_overwrites_what_is_read_is_noticed_and_the_commit_tried_again(store_path: Path) -> None:
    live = PlainRing(100)
    live.add(150)
    ring = live.ring()
    with open_store(store_path) as store:
        inner = store._committer._components.add
        turns = []

        def overwrite(*arguments: Any) -> Any:
            added = inner(*arguments)
            if len(turns) < 2:
                live.add(5)
            turns.append(live.total)
            return added

        store._committer._components.add = overwrite
        store.commit(1, {"replay": ring})
        assert turns == [155, 160, 160]
        assert_rows(store.restore(1)["replay"].rows(60, 160), live.expected(60, 160))
        turns.clear()
        store._committer._components.add = lambda *arguments: (live.add(5), inner(*arguments))[1]
        with pytest.raises(ConcurrentMutationError, match="replay"):
            store.commit(2, {"replay": ring})


def test_writer_thread_never_tears_a_commit(store_path: Path) -> None:
    live = PlainRing(5000)
    live.add(1000)
    ring = live.ring(trust="counter")
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set() and live.total < 4500:
            live.add(1)

    thread = threading.Thread(target=write)
    with open_store(store_path) as store:
        thread.start()
        for step in range(1, 9):
            (store.commit if step % 2 else store.commit_async)(step, {"replay": ring})
        stop.set()
        thread.join()
        store.wait()
        for step in range(1, 9):
            view = store.restore(step)["replay"]
            assert_rows(view.rows(0, view.total), live.expected(0, view.total))


def test_row_that_a_writer_overwrites_just_now_is_read_and_not_told_as_a_breach(
    store_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    live = PlainRing(10)
    live.add(10)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        live.obs[0] ^= 1  # row 10 comes here, and is not counted yet
        store.commit(2, {"replay": ring})
        assert not recwarn.list
        np.testing.assert_array_equal(store.restore(2)["replay"].column("obs"), live.obs)


# --- the store around it ---


def test_rows_that_are_missing_are_named_and_other_rows_are_read(store_path: Path) -> None:
    live = PlainRing(2000, width=2000)
    ring = live.ring()
    with open_store(store_path) as store:
        packs: list[Path] = []
        for step in range(1, 4):
            live.add(100)
            store.commit(step, {"replay": ring})
            packs += [path for path in store_path.glob("packs/*/*") if path not in packs]
    packs[1].unlink()
    with open_store(store_path) as store:
        view = store.restore(3)["replay"]
        with pytest.raises(casckpt.IncompleteError, match="replay', rows 100 to 200: "):
            view.rows(50, 150)
        for start in (0, 200):
            assert_rows(view.rows(start, start + 100), live.expected(start, start + 100))
        with pytest.raises(casckpt.IncompleteError, match="rows 100 to 200"):
            store.restore_into({"replay": PlainRing(2000, width=2000).ring()}, 3)


@pytest.mark.full
def test_many_small_commits_are_listed_in_few_parts(store_path: Path) -> None:
    live = PlainRing(3000, width=4)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        for step in range(1, 201):
            live.add(3)
            store.commit(step, {"replay": ring})
        parts = store._catalog.manifest(bytes.fromhex(store.snapshot().components["replay"].manifest)).parts
        assert len(parts) < 70
        assert sum(part.row_count for part in parts) == 600
        assert_rows(store.restore()["replay"].rows(0, 600), live.expected(0, 600))
        assert store.verify().ok
        for step in range(1, 200):
            store.retire(step)
        counts = index_counts(store)
    assert {bytes(key): count for key, count in dissect(str(store_path)).counts().items()} == counts


def test_index_made_again_knows_the_rows(store_path: Path) -> None:
    live = PlainRing(60)
    ring = live.ring()
    with open_store(store_path) as store:
        for step in range(1, 30):
            live.add(7)
            store.commit(step, {"replay": ring})
        before = index_counts(store)
        store._keeper.rebuild()
        assert index_counts(store) == before
        assert_rows(store.restore()["replay"].rows(143, 203), live.expected(143, 203))


def test_damage_of_rows_is_named_and_other_rows_are_read(store_path: Path) -> None:
    live = PlainRing(2000, width=2000)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        live.add(100)
        store.commit(1, {"replay": ring})
        live.add(100)
        snapshot = store.commit(2, {"replay": ring})
        source = store.restore(2)["replay"]._source
        stored = source._load(source._nodes[0])
        place = stored.places[-1][0]
        pack = next(store_path.glob("packs/*/*" + store._keeper.reader.pack_id(place.pack_no).hex()))
        data = bytearray(pack.read_bytes())
        data[place.offset + place.header_size + 5] ^= 1
        pack.write_bytes(data)
        with pytest.raises(casckpt.CorruptionError, match=r"replay', rows 0 to 100 \(replay/obs\)"):
            store.restore(2)["replay"].rows(0, 100)
        assert_rows(store.restore(2)["replay"].rows(100, 200), live.expected(100, 200))
        other = PlainRing(2000, width=2000)
        with pytest.raises(casckpt.CorruptionError):
            store.restore_into({"replay": other.ring()}, 2)
        assert other.total == 0
        assert not other.obs.any()
        report = store.verify()
        assert {user[2] for problem in report.problems for user in problem.snapshots} == {1, snapshot.step}


def test_rows_lost_with_a_pack_are_stored_again(store_path: Path) -> None:
    live = PlainRing(2000, width=2000)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        live.add(100)
        store.commit(1, {"replay": ring})
        for pack in store_path.glob("packs/*/*"):
            pack.unlink()
        live.add(10)
        store.commit(2, {"replay": ring})
        assert_rows(store.restore(2)["replay"].rows(0, 110), live.expected(0, 110))


def test_diff_names_the_ring_that_moved_and_not_the_one_that_did_not(store_path: Path) -> None:
    live, still = PlainRing(50), PlainRing(50, seed=1)
    live.add(30)
    still.add(30)
    rings = {"replay": live.ring(), "still": still.ring()}
    with open_store(store_path) as store:
        store.commit(1, rings)
        live.add(1)
        store.commit(2, rings)
        changes = {component.name: component.change for component in store.diff(1, 2).components}
        assert changes == {"replay": "changed", "still": "equal"}
        (ring, _) = store.diff(1, 2).components
        rows = next(leaf for leaf in ring.leaves if leaf.path == "replay/rows")
        assert (rows.changed_count, rows.before, rows.after) == (1, "rows 0 to 30", "rows 0 to 31")
        live.obs[4] ^= 1
        store.commit(3, rings)
        assert [leaf.path for leaf in store.diff(2, 3).components[0].leaves] == ["replay/rows"]


def test_light_commit_inherits_a_ring(store_path: Path) -> None:
    live = PlainRing(50)
    live.add(30)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring, "n": {"x": 1}})
        store.commit(2, {"n": {"x": 2}}, inherit=["replay"])
        live.add(30)
        store.commit(3, {"replay": ring, "n": {"x": 3}})
        assert_rows(store.restore(2, allow_mixed=True)["replay"].rows(0, 30), live.expected(0, 30))
        assert_rows(store.restore(3)["replay"].rows(10, 60), live.expected(10, 60))


@pytest.mark.parametrize("new_row_count", [0, 5])
def test_ring_that_joins_light_commits_later_continues_the_rows_of_each(store_path: Path, new_row_count: int) -> None:
    live = PlainRing(50)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        expected = {}
        for step in (1, 3, 5):
            live.add(20)
            store.commit(step, {"replay": ring, "n": {"x": step}})
            store.commit(step + 1, {"n": {"x": step + 1}}, inherit=["replay"])
            expected[step] = live.expected(max(0, live.total - 50), live.total)
            live.add(new_row_count)
            store.supersede_async(step + 1, {"replay": ring}).result()
            expected[step + 1] = live.expected(max(0, live.total - 50), live.total)
        for step, rows in expected.items():
            assert_rows(store.restore(step)["replay"].last(50), rows)


@pytest.mark.few(1)
@pytest.mark.parametrize("new_row_count", [20, 60])
def test_ring_saved_while_it_still_joins_an_earlier_step_has_all_rows(store_path: Path, new_row_count: int) -> None:
    live = PlainRing(50)
    ring = live.ring(trust="counter")
    expected = {}
    with open_store(store_path) as store:
        live.add(20)
        store.commit(1, {"replay": ring, "n": {"x": 1}})
        for step in range(2, 12, 2):
            live.add(new_row_count)
            store.commit_async(step, {"n": {"x": step}}, inherit=["replay"])
            expected[step] = live.expected(max(0, live.total - 50), live.total)
            store.supersede_async(step, {"replay": ring})
            live.add(new_row_count)
            expected[step + 1] = live.expected(max(0, live.total - 50), live.total)
            store.commit_async(step + 1, {"replay": ring, "n": {"x": step + 1}})
        store.wait()
        for step, rows in expected.items():
            assert_rows(store.restore(step)["replay"].last(50), rows)


def test_ring_that_joins_a_step_committed_before_it_joined_the_one_before_costs_its_new_rows(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = PlainRing(50, width=4096)
    ring = live.ring(trust="counter")
    expected, handles, gate = {}, [], threading.Event()
    with open_store(store_path) as store:
        joining = store._saver._superseder
        inner = joining.commit
        monkeypatch.setattr(joining, "commit", lambda draft: (gate.wait(200), inner(draft))[1])
        store.commit(1, {"n": {"x": 1}})
        for step in (2, 3, 4):
            live.add(20)
            store.commit_async(step, {"n": {"x": step}}, inherit="*").result()
            if step > 2:
                gate.set()  # what joins the step before does so when this step is there
            handles.append(store.supersede_async(step, {"replay": ring}, necessity={"replay": "droppable"}))
            expected[step] = live.expected(max(0, live.total - 50), live.total)
            gate.clear()
        gate.set()
        for handle in handles:
            snapshot = handle.result()
            assert snapshot.components["replay"].new_bytes < 21 * 4200
            assert snapshot.components["replay"].necessity == "droppable"
            assert_rows(store.restore(snapshot.step)["replay"].last(50), expected[snapshot.step])
        store.commit(5, {"replay": ring, "n": {"x": 5}})
        assert store.verify().ok


def test_rows_after_a_changed_one_cost_what_is_new_again(store_path: Path) -> None:
    """The segment that was stored anew, for a change in its half overwritten twin, is known from then on."""
    live = PlainRing(2000)
    ring = live.ring()
    row_size = 24 + 8 + 1
    with open_store(store_path) as store:
        live.add(2000)
        store.commit(1, {"replay": ring})
        live.add(20)
        live.obs[1000] ^= 1
        store.commit(2, {"replay": ring})
        for step in range(3, 8):
            live.add(20)
            assert store.commit(step, {"replay": ring}).new_bytes < 2 * 20 * row_size


_WORDS = np.arange(400, dtype=np.int32).reshape(100, 4)
_COLUMNS = {
    "two": {"a": _WORDS, "b": _WORDS + 1},
    "in another order": {"b": _WORDS + 1, "a": _WORDS},
    "with each other's name": {"b": _WORDS, "a": _WORDS + 1},
    "with other names": {"a": _WORDS, "c": _WORDS + 1},
    "of another dtype": {"a": _WORDS, "b": (_WORDS + 1).view(np.uint32)},
    "of another shape": {"a": _WORDS, "b": (_WORDS + 1).reshape(100, 2, 2)},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", _COLUMNS)
@pytest.mark.parametrize("new_row_count", [0, 30])
def test_columns_that_became_others_of_the_same_bytes_are_stored_as_they_are(
    store_path: Path, kind: str, new_row_count: int
) -> None:
    place = {"total": 100}
    with open_store(store_path) as store:
        store.commit(1, {"replay": Ring(Arrays(_COLUMNS["two"], place, total="total"))})
        place["total"] += new_row_count
        store.commit(2, {"replay": Ring(Arrays(_COLUMNS[kind], place, total="total"))})
        rows = np.arange(new_row_count, 100 + new_row_count) % 100
        expected = {name: column[rows] for name, column in _COLUMNS[kind].items()}
        found = store.restore(2)["replay"].last(100)
        assert_rows(found, expected)
        assert {name: each.dtype for name, each in found.items()} == {name: c.dtype for name, c in expected.items()}
