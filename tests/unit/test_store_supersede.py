"""Components that come later than their snapshot: what steps, tags, heads and annotations mean before and after."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import ConflictError, SaveFailedError, StepOrderError, StorageError
from casckpt.format.entry import Annotate, Tag
from casckpt.ids import SnapshotId
from casckpt.testing.invariants import index_counts
from tests.conformance import independent_reader as reader
from tests.unit.stores import open_store


@pytest.fixture
def store(store_path: Path) -> Iterator[Any]:
    with open_store(store_path) as opened:
        yield opened


def steps_of(snapshot: Any) -> dict[str, int]:
    return {name: each.step for name, each in snapshot.components.items()}


def test_later_component_stands_in_the_snapshot_of_its_step(store: Any, store_path: Path) -> None:
    store.commit(1, {"policy": 1, "replay": 1}, metrics={"return": 1.0})
    old = store.commit(2, {"policy": 2}, inherit="*", metrics={"return": 2.0}, labels={"who": "first"})
    new = store.supersede_async(2, {"replay": 2}, metrics={"rows": 7}).result()
    assert (new.step, new.branch, new.parent) == (2, "main", old.parent)
    assert steps_of(new) == {"policy": 2, "replay": 2} and new.is_consistent
    assert (new.metrics, new.labels) == ({"return": 2.0, "rows": 7}, {"who": "first"})
    assert store.steps() == [1, 2]
    assert store.restore() == {"policy": 2, "replay": 2}
    assert store.restore(old.id, allow_mixed=True) == {"policy": 2, "replay": 1}
    assert store.snapshot(old.id).is_retired
    assert store.document.features.read == ["superseded"] == store.document.features.write
    assert store.commit(3, {"policy": 3}, inherit="*").parent == new.id


def test_branch_that_moved_on_keeps_its_head_and_inherits_what_was_added(store: Any) -> None:
    store.commit(1, {"policy": 1, "replay": 1})
    store.commit(2, {"policy": 2}, inherit="*")
    with store._turns.take("a test"):  # nothing is published before the end of the block
        later = store.supersede_async(2, {"replay": 2})
        position = store._committer.position
        store._commit(store._drafter.draft(3, {"policy": 3}, store._committer.context(), _rest()))
    assert later.result().step == 2 and position.step == 2
    assert store.snapshot("main").step == 3
    assert steps_of(store.snapshot(3)) == {"policy": 3, "replay": 1}
    assert steps_of(store.commit(4, {"policy": 4}, inherit="*")) == {"policy": 4, "replay": 2}
    assert [steps_of(each)["replay"] for each in store.timeline()] == [1, 2, 1, 2]


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_what_joins_one_step_in_two_parts_is_all_there(store: Any, is_waited_for: bool) -> None:
    with store._turns.take("a test"):  # both are under way before anything of the first is published
        base = store.commit_async(1, {"policy": 1}) if not is_waited_for else store.commit(1, {"policy": 1})
        first, second = store.supersede_async(1, {"replay": 1}), store.supersede_async(1, {"critic": 1})
    assert steps_of(first.result()) == {"policy": 1, "replay": 1}
    assert steps_of(second.result()) == {"policy": 1, "replay": 1, "critic": 1}
    assert base is not None and store.restore() == {"policy": 1, "replay": 1, "critic": 1}


def _rest() -> Any:
    from casckpt.store.draft import REST, Options

    return Options(None, None, None, None, REST, (), None, None, False)


def test_tags_and_annotations_go_over_also_those_that_name_the_old_one_later(store: Any, store_path: Path) -> None:
    store.commit(1, {"policy": 1, "replay": 1})
    old = store.commit(2, {"policy": 2}, inherit="*")
    store.tag("before", 2)
    store.annotate(2, metrics={"eval": 1.0, "kept": 1})
    new = store.supersede_async(2, {"replay": 2}).result()
    old_id = SnapshotId(bytes.fromhex(old.id))  # as another process may write that has not seen the entry yet
    store._append(Annotate(old_id, {"eval": 2.0}, {"late": "yes"}))
    store._append(Tag("main", "after", old_id))
    assert store.tags() == {"before": new.id, "after": new.id}
    assert (store.snapshot(2).metrics, store.snapshot(2).labels) == ({"eval": 2.0, "kept": 1}, {"late": "yes"})
    found = {each.id.hex(): each for each in reader.read_store(store_path).snapshots}
    assert (found[new.id].metrics, found[new.id].labels) == ({"eval": 2.0, "kept": 1}, {"late": "yes"})
    assert {name: each.hex() for (_, name), each in reader.read_store(store_path).tags.items()} == store.tags()
    assert found[old.id].is_retired and not found[new.id].is_retired


def test_index_made_again_says_the_same(store_path: Path) -> None:
    with open_store(store_path) as store:
        store.commit(1, {"policy": 1, "replay": bytes(200_000)})
        store.commit(2, {"policy": 2}, inherit="*")
        store.supersede_async(2, {"replay": bytes(range(256)) * 1000}).result()
        store.commit(3, {"policy": 3}, inherit="*")
        expected = [each.to_dict() for each in store.timeline(all_runs=True)]
        counts = index_counts(store)
    shutil.rmtree(store_path / "index")
    with open_store(store_path) as store:
        assert [each.to_dict() for each in store.timeline(all_runs=True)] == expected
        assert index_counts(store) == counts
        assert store.verify().ok


def test_only_the_step_where_the_handle_stands_can_be_added_to(store: Any) -> None:
    with pytest.raises(StepOrderError, match="step 1 is not the last one"):
        store.supersede_async(1, {"replay": 1})
    store.commit(1, {"policy": 1})
    store.commit(2, {"policy": 2})
    with pytest.raises(StepOrderError, match="step 1 is not the last one"):
        store.supersede_async(1, {"replay": 1})
    store.resume(1)
    with pytest.raises(StepOrderError, match="step 1 is not the last one"):
        store.supersede_async(1, {"replay": 1})  # it belongs to the line that was left
    assert store.document.features.read == []


def test_retired_step_gets_nothing_added(store: Any) -> None:
    store.commit(1, {"policy": 1})
    store.commit(2, {"policy": 2})
    store.retire(2)
    with pytest.raises(SaveFailedError, match="retired or superseded") as caught:
        store.supersede_async(2, {"policy": 2, "replay": 2}).result()
    assert isinstance(caught.value.__cause__, ConflictError)
    assert store.steps() == [1]


def test_what_joins_a_snapshot_that_failed_fails_with_it_and_is_told_once(store: Any) -> None:
    store.commit(1, {"policy": 1})
    with store._turns.take("test"):  # neither begins before both are there
        first = store.commit_async(2, {"policy": 2}, inherit=["nothing like it"])
        later = store.supersede_async(2, {"replay": 2})
    assert later.exception() is first.exception()
    store.wait()
    assert store.steps() == [1]


def test_nothing_new_is_no_new_snapshot(store: Any) -> None:
    snapshot = store.commit(1, {"policy": 1})
    counts = index_counts(store)
    again = store.supersede_async(1, {"policy": 1}, metrics={"rows": 7}).result()
    assert (again.id, again.metrics) == (snapshot.id, {"rows": 7})
    assert store.steps() == [1] and not store.snapshot(1).is_retired
    assert index_counts(store) == counts


@pytest.mark.parametrize("is_published", [True, False])
def test_what_failed_at_its_entry_can_be_added_again(
    store: Any, monkeypatch: pytest.MonkeyPatch, is_published: bool
) -> None:
    """Whether the entry stands, as when only its folder could not be synced, or does not."""
    store.commit(1, {"policy": 1, "replay": 1})
    store.commit(2, {"policy": 2}, inherit="*")
    append = store._timeline.append

    def fail(seq: int, encoded: bytes, **options: Any) -> bool:
        if is_published:
            append(seq, encoded, **options)
        raise StorageError("sync failed")

    with monkeypatch.context() as broken:
        broken.setattr(store._timeline, "append", fail)
        assert isinstance(store.supersede_async(2, {"replay": 2}).exception(), StorageError)
    assert steps_of(store.supersede_async(2, {"replay": 2}, metrics={"rows": 7}).result()) == {"policy": 2, "replay": 2}
    assert store.commit(3, {"policy": 3}, inherit="*").parent == store.snapshot(2).id
    counts = index_counts(store)
    store._keeper.rebuild()
    assert index_counts(store) == counts


def test_components_join_a_commit_that_was_published_although_it_failed(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder could not be synced after the entry had appeared: the commit raises, and the step is there."""
    store.commit(1, {"policy": 1, "replay": 1})
    file_system = store._system.file_system
    sync_folder = file_system.sync_folder

    def fail(path: str) -> None:
        if "/timeline/" in path:
            raise StorageError(f"{path}: sync failed")
        sync_folder(path)

    with monkeypatch.context() as broken:
        broken.setattr(type(file_system), "sync_folder", lambda _, path: fail(path))
        with pytest.raises(StorageError, match="sync failed"):
            store.commit(2, {"policy": 2}, inherit="*")
    assert store.steps() == [1, 2]
    assert steps_of(store.supersede_async(2, {"replay": 2}).result()) == {"policy": 2, "replay": 2}
