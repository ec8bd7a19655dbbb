"""(S09, S10, S33, S34, S35, S38, S39, S40) Where a handle stands, what "latest" is, and how lines and runs part."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import casckpt
from casckpt.errors import (
    AlreadyExistsError,
    ConflictError,
    IncompleteError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    StepOrderError,
    StorageError,
    StoreWarning,
)
from casckpt.storage.fs import typed_error
from casckpt.storage.process import System
from casckpt.testing.wrapping import Operation
from tests.unit.stores import UnsyncedFileSystem, open_store

T = TypeVar("T")


@pytest.fixture
def store(store_path: Path) -> Iterator[Any]:
    with open_store(store_path) as opened:
        yield opened


def grow(store: Any, *steps: int) -> None:
    for step in steps:
        store.commit(step, {"counter": step})


# --- order of steps ---


def test_earlier_step_is_an_error_that_says_how_to_branch(store: Any) -> None:
    grow(store, 100, 900)
    with pytest.raises(StepOrderError, match=r"step 100 does not come after 900.*resume\(100\)") as caught:
        store.commit(100, {"counter": 1})
    assert caught.value.facts == {"step": 100, "parent_step": 900}
    assert store.steps() == [100, 900]


def test_same_step_with_equal_state_is_the_same_snapshot_and_adds_its_metrics(store: Any) -> None:
    first = store.commit(1, {"a": np.arange(5), "b": 1}, metrics={"x": 1, "y": 1}, labels={"k": "1"})
    entries = store.stats().entry_count
    again = store.commit(1, {"b": 1, "a": np.arange(5)})
    assert (again.id, store.stats().entry_count) == (first.id, entries)
    noted = store.commit(1, {"a": np.arange(5), "b": 1}, metrics={"y": 2, "z": 3}, labels={"l": "2"})
    assert noted.id == first.id
    assert store.snapshot(1).metrics == {"x": 1, "y": 2, "z": 3}
    assert store.snapshot(1).labels == {"k": "1", "l": "2"}
    assert store.steps() == [1]


@pytest.mark.parametrize("state", [{"a": 2, "b": 1}, {"a": 1.0, "b": 1}, {"a": 1, "b": 1, "c": 1}])
def test_same_step_with_another_state_names_what_differs(store: Any, state: dict[str, Any]) -> None:
    store.commit(1, {"a": 1, "b": 1})
    with pytest.raises(StepOrderError, match="later step") as caught:
        store.commit(1, state)
    assert caught.value.facts["changed"] in (["a"], ["c"])


def test_same_step_from_a_new_handle_is_the_same_snapshot(store: Any) -> None:
    first = store.commit(1, {"a": np.arange(5)})
    with open_store(store.path) as other:
        assert other.commit(1, {"a": np.arange(5)}).id == first.id


# --- restore moves nothing ---


def test_old_step_restored_in_the_middle_of_training_moves_nothing(store: Any) -> None:
    grow(store, 500, 900)
    target = {"counter": torch.zeros(1)}
    assert store.restore(500) == {"counter": 500}
    with pytest.raises(MismatchError):
        store.restore_into({"counter": target}, 500)
    store.diff(500, 900), store.snapshot(500), list(store.timeline()), store.verify(), store.stats()
    assert (store.step, store.branch) == (900, "main")
    last = store.commit(901, {"counter": 901})
    assert (last.parent, last.branch) == (store.snapshot(900).id, "main")


def test_two_handles_restore_different_steps_side_by_side(store: Any) -> None:
    grow(store, 1, 2)
    with open_store(store.path, read_only=True) as evaluation:
        assert (evaluation.restore(1), store.restore(2)) == ({"counter": 1}, {"counter": 2})
        grow(store, 3)
        assert evaluation.restore() == {"counter": 3}


# --- resume ---


def test_resume_at_the_head_continues_the_branch(store: Any) -> None:
    grow(store, 1, 2)
    with open_store(store.path) as again:
        assert again.resume() == {"counter": 2}
        assert again.commit(3, {"counter": 3}).branch == "main"
    assert [branch.name for branch in store.branches()] == ["main"]


def test_resume_before_the_head_opens_a_branch_and_the_old_line_stays(store: Any) -> None:
    grow(store, 1, 2, 3)
    old = store.snapshot(3)
    assert store.resume(2) == {"counter": 2}
    assert (store.branch, store.step) == ("main-2", 2)
    assert [branch.name for branch in store.branches()] == ["main"]  # nothing is written before the commit
    assert store.steps() == [1, 2]
    new = store.commit(3, {"counter": 33})
    assert (new.branch, new.parent) == ("main-2", store.snapshot(2).id)
    assert store.restore(3) == {"counter": 33}
    assert store.restore("main@3") == store.restore("main") == store.restore(old.id) == {"counter": 3}
    assert store.restore("main-2@3") == {"counter": 33}
    assert store.restore("main-2@1") == {"counter": 1}  # an ancestor
    with pytest.raises(NotFoundError):
        store.restore("main@33")
    branches = {branch.name: branch for branch in store.branches()}
    assert branches["main-2"].fork == store.snapshot(2).id
    assert branches["main-2"].is_current
    assert not branches["main"].is_current
    assert [snapshot.step for snapshot in store.timeline("main")] == [1, 2, 3]


def test_new_handle_stands_on_the_branch_written_last(store: Any) -> None:
    grow(store, 1, 2)
    store.resume(1, branch="experiment")
    store.commit(5, {"counter": 5})
    with open_store(store.path) as again:
        assert (again.branch, again.step) == ("experiment", 5)
        assert again.steps() == [1, 5]
        again.resume("main")
        assert (again.branch, again.step) == ("main", 2)
        again.commit(3, {"counter": 3})
    with open_store(store.path) as again:
        assert again.branch == "main"


def test_steps_after_the_fork_are_not_of_the_new_line(store: Any) -> None:
    grow(store, 1, 2, 3)
    store.resume(1)
    store.commit(10, {"counter": 10})
    for step in (2, 3):
        with pytest.raises(NotFoundError, match="no step"):
            store.restore(step)
    assert store.steps() == [1, 10]


def test_branch_of_a_branch_sees_both_ancestors(store: Any) -> None:
    grow(store, 1, 2, 3)
    store.resume(2, branch="b")
    grow(store, 4, 5)
    store.resume(4, branch="c")
    grow(store, 6)
    assert store.steps() == [1, 2, 4, 6]
    assert store.snapshot(1).branch == "main"
    assert store.timeline()[-1].step == 6
    assert [snapshot.step for snapshot in store.timeline()[1:3]] == [2, 4]
    assert store.timeline()[-2].step == 4
    with pytest.raises(IndexError):
        store.timeline()[9]


def test_branch_name_is_free_or_another_is_taken(store: Any) -> None:
    grow(store, 1, 2, 3)
    for expected in ("main-1", "main-1-2", "main-1-3"):
        store.resume("main@1")
        assert store.commit(9, {"counter": expected}).branch == expected
    store.tag("main-2", 1)
    store.resume("main@2")
    assert store.commit(9, {"counter": 0}).branch == "main-2-2"  # a tag has the name
    store.resume("main@2", branch="mine")
    store.tag("mine", 1)
    assert store.commit(9, {"counter": 0}).branch == "mine-2"
    for taken in ("main", "main-1", "main-2"):
        with pytest.raises(AlreadyExistsError, match=taken):
            store.resume("main@1", branch=taken)


def test_branches_opened_from_branches_for_ever_keep_names_that_keys_can_carry(store: Any) -> None:
    grow(store, 10**9, 10**9 + 1)
    for number in range(40):
        store.resume(10**9 + number)
        store.commit(10**9 + number + 1, {"counter": -number})
        store.commit(10**9 + number + 2, {"counter": -number})
    names = [branch.name for branch in store.branches()]
    assert len(names) == len(set(names)) == 41
    assert max(map(len, names)) <= 200
    assert store.restore() == {"counter": -39}
    assert len(store.steps()) == 42


def test_resume_into_needs_every_component_unless_told_otherwise(store: Any) -> None:
    store.commit(1, {"policy": torch.ones(2), "optimizer": torch.ones(3)})
    policy = torch.zeros(2)
    with pytest.raises(MismatchError, match="optimizer"):
        store.resume_into({"policy": policy})
    assert policy.tolist() == [0, 0]
    report = store.resume_into({"policy": policy}, strict=False)
    assert (policy.tolist(), report.not_restored, report.step, report.is_fresh) == ([1, 1], ("optimizer",), 1, False)
    assert "not restored: optimizer" in str(report)
    with pytest.raises(MismatchError, match="no component"):
        store.resume_into({"policy": policy, "optimizer": torch.zeros(3), "value": torch.zeros(1)})


def test_failed_resume_leaves_the_handle_where_it_stands(store: Any) -> None:
    grow(store, 1, 2)
    with pytest.raises(NotFoundError):
        store.resume(7)
    with pytest.raises(MismatchError):
        store.resume_into({"counter": {"x": torch.zeros(3)}}, 1)
    assert (store.branch, store.step) == ("main", 2)


# --- a fresh start ---


def test_only_a_new_run_is_fresh(store: Any) -> None:
    target = {"counter": torch.zeros(1)}
    report = store.resume_into(target)
    assert (report.is_fresh, report.snapshot, report.step) == (True, None, None)
    assert "fresh start" in str(report)
    assert store.resume() is None
    with pytest.raises(NotFoundError):
        store.restore()
    store.commit(1, target)
    assert not store.resume_into({"counter": torch.zeros(1)}).is_fresh
    with open_store(store.path, run="second") as other:
        assert other.resume() is None  # this run is new, whatever others did


def test_run_whose_snapshots_are_all_retired_is_not_fresh(store: Any) -> None:
    grow(store, 1)
    store.retire(1)
    with pytest.raises(NotFoundError):
        store.resume_into({"counter": torch.zeros(1)})


def test_wrong_path_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    for options in ({}, {"read_only": True}):
        with pytest.raises(NotFoundError, match="create=True"):
            casckpt.open(tmp_path / "typo", **options)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidInputError, match="contradict"):
        casckpt.open(tmp_path / "typo", create=True, read_only=True)


def test_store_is_not_made_among_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(AlreadyExistsError, match=r"notes.txt"):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_create_opens_what_is_there(store: Any) -> None:
    grow(store, 1)
    with open_store(store.path, create=True) as again:
        assert again.store_id == store.store_id
        assert again.steps() == [1]


# --- two handles ---


def test_second_learner_on_a_branch_gets_a_conflict_that_names_the_first(store: Any) -> None:
    grow(store, 1)
    with open_store(store.path) as second:
        grow(store, 2)
        with pytest.raises(ConflictError, match=r"head is step 2.*resume\(\)") as caught:
            second.commit(2, {"counter": -2})
        facts = caught.value.facts
        assert (facts["pid"], facts["step"], facts["branch"]) == (os.getpid(), 2, "main")
        assert facts["host"]
        assert second.steps() == [1, 2]
        assert second.restore() == {"counter": 2}
        second.resume()
        assert second.commit(3, {"counter": 3}).parent == store.snapshot(2).id
    with pytest.raises(ConflictError):
        store.commit(3, {"counter": -3})


def test_two_learners_who_both_begin_a_run_conflict(store: Any) -> None:
    with open_store(store.path) as second:
        grow(store, 1)
        with pytest.raises(ConflictError, match="stands at the beginning"):
            second.commit(5, {"counter": 5})
    assert store.steps() == [1]


def test_two_handles_that_branch_at_one_step_get_branches_of_their_own(store: Any) -> None:
    grow(store, 1, 2)
    with open_store(store.path) as second:
        store.resume(1)
        second.resume(1)
        assert store.commit(5, {"counter": 5}).branch == "main-1"
        assert second.commit(5, {"counter": 6}).branch == "main-1-2"
        assert (store.restore(5), second.restore(5)) == ({"counter": 5}, {"counter": 6})


def test_tags_and_notes_of_another_handle_do_not_conflict(store: Any) -> None:
    grow(store, 1)
    with open_store(store.path) as second:
        second.annotate(1, metrics={"x": 1})
        second.tag("good", 1)
        second.retire(1)
    grow(store, 2)
    assert store.steps() == [2]


# --- runs ---


def test_runs_share_content_and_nothing_else(store: Any) -> None:
    weights = np.random.default_rng(0).random(50_000)
    sizes = []
    for seed in range(5):
        with open_store(store.path, run=f"seed-{seed}") as run:
            sizes.append(run.commit(0, {"policy": weights, "counter": seed}).new_bytes)
            for step in range(1, 20):
                run.commit(step, {"policy": weights, "counter": seed * 100 + step}, metrics={"return": step + seed})
    assert sizes[0] > weights.nbytes
    assert max(sizes[1:]) < 100
    assert sorted(store.runs()) == [f"seed-{seed}" for seed in range(5)]
    for seed in range(5):
        with open_store(store.path, run=f"seed-{seed}", read_only=True) as run:
            assert run.steps() == list(range(20))
            assert run.restore(only=["counter"]) == {"counter": seed * 100 + 19 if seed else 19}
            assert run.snapshot(7).metrics == {"return": 7 + seed}
            assert run.tags() == {}
    assert store.steps() == []
    assert len(store.timeline(all_runs=True)) == 100


def test_tag_of_one_run_is_free_in_another(store: Any) -> None:
    grow(store, 1)
    store.tag("best", 1)
    with open_store(store.path, run="second") as other:
        grow(other, 1)
        other.tag("best", 1)
        assert other.snapshot("best").run == "second"
    assert store.snapshot("best").run == "main"


def test_snapshot_of_another_run_can_be_continued(store: Any) -> None:
    """A member of a population goes on from another one's weights."""
    grow(store, 1, 2)
    best = store.snapshot(2)
    with open_store(store.path, run="second") as other:
        grow(other, 1)
        assert other.resume(best.id) == {"counter": 2}
        child = other.commit(3, {"counter": 3})
        assert (child.run, child.parent, child.branch) == ("second", best.id, "main-2")
        assert other.snapshot("main").step == 1
        assert other.restore(3) == {"counter": 3}
    assert store.steps() == [1, 2]


# --- latest, mixed, necessity ---


def test_light_state_on_older_weights_is_restored_only_when_asked_for(store: Any) -> None:
    store.commit(700, {"policy": 700, "counter": 700})
    light = store.commit(730, {"counter": 730}, inherit=["policy"])
    assert not light.is_consistent
    with pytest.warns(StoreWarning, match=r"'latest' is step 700; passed over: step 730 .*mixed"):
        assert store.restore() == {"policy": 700, "counter": 700}
    assert store.restore(allow_mixed=True) == {"policy": 700, "counter": 730}
    with pytest.raises(InvalidInputError, match="allow_mixed=True"):
        store.restore(730)
    with pytest.warns(StoreWarning, match="mixed"):
        state = store.resume()
    assert state == {"policy": 700, "counter": 700}
    assert store.commit(740, {"policy": 740, "counter": 740}).branch == "main-700"
    assert store.resume("main", allow_mixed=True) == {"policy": 700, "counter": 730}
    assert store.commit(741, {"policy": 741, "counter": 741}).branch == "main"


def test_only_exact_components_make_a_snapshot_mixed(store: Any) -> None:
    store.commit(1, {"policy": 1, "replay": 1, "cache": 1}, necessity={"replay": "droppable", "cache": "reloadable"})
    second = store.commit(2, {"policy": 2}, inherit=["replay", "cache"])
    assert second.is_consistent
    assert {name: each.necessity for name, each in second.components.items()} == {
        "policy": "exact", "replay": "droppable", "cache": "reloadable",
    }  # fmt: skip
    assert store.restore() == {"cache": 1, "policy": 2, "replay": 1}
    third = store.commit(3, {"policy": 3}, inherit=["replay", "cache"], necessity={"replay": "exact"})
    assert third.components["replay"].necessity == "exact"
    assert not third.is_consistent


def test_run_with_mixed_snapshots_alone_says_so(store: Any) -> None:
    store.commit(1, {"policy": 1, "counter": 1})
    store.commit(2, {"counter": 2}, inherit=["policy"])
    store.retire(1)
    with pytest.raises(IncompleteError, match=r"step 2 .*mixed"):
        store.restore()


# --- tags, notes, retirement ---


def test_metrics_found_later_are_seen_everywhere(store: Any) -> None:
    before = store.commit(500, {"counter": 500}, metrics={"loss": 1.0})
    grow(store, 510, 520)
    after = store.annotate(500, metrics={"return": 17.5, "loss": 0.9}, labels={"judge": "late"})
    assert after.id == before.id
    for found in (
        store.snapshot(500),
        store.timeline()[0],
        store.timeline(all_runs=True)[0],
        store.snapshot(before.id),
    ):
        assert found.metrics == {"loss": 0.9, "return": 17.5}
        assert found.labels == {"judge": "late"}
    with open_store(store.path, read_only=True) as other:
        assert other.snapshot(500).metrics["return"] == 17.5


def test_empty_annotation_writes_nothing(store: Any) -> None:
    grow(store, 1)
    entries = store.stats().entry_count
    store.annotate(1)
    store.annotate(1, metrics={}, labels={})
    assert store.stats().entry_count == entries


def test_tag_names_a_snapshot_until_it_is_taken_away(store: Any) -> None:
    grow(store, 1, 2)
    store.tag("good", 1)
    assert store.restore("good") == {"counter": 1}
    for name, ref in (("good", 2), ("good", 1), ("main", 1)):
        with pytest.raises(AlreadyExistsError, match=name):
            store.tag(name, ref)
    store.untag("good")
    with pytest.raises(NotFoundError):
        store.restore("good")
    with pytest.raises(NotFoundError, match="no tag"):
        store.untag("good")
    store.tag("good", 2)
    assert store.tags() == {"good": store.snapshot(2).id}


def test_retired_snapshot_is_in_no_list_and_its_id_still_restores(store: Any) -> None:
    grow(store, 1, 2, 3)
    third = store.retire(3)
    assert third.is_retired
    assert store.steps() == [1, 2]
    assert [snapshot.step for snapshot in store.timeline()] == [1, 2]
    assert store.timeline()[-1].step == 2
    assert [snapshot.step for snapshot in store.timeline(all_runs=True)] == [1, 2]
    assert store.restore() == {"counter": 2}
    assert store.restore(third.id) == store.restore(3) == {"counter": 3}
    assert store.retire(3).is_retired  # again: nothing to do
    assert store.commit(4, {"counter": 4}).parent == third.id


# --- attempts whose outcome was not learned ---


class LosesReplies(UnsyncedFileSystem):
    """Fails the folder sync after the next link: the entry is there, and nobody is told."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._is_linked = False

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        if operation.name == "link" and self.error is not None:
            self._is_linked = True
        if operation.name == "sync_folder" and self._is_linked and self.error is not None:
            error, self.error, self._is_linked = self.error, None, False
            raise error
        return super().perform(operation, act)


@pytest.mark.parametrize(
    "error",
    [typed_error(OSError(errno.EIO, "lost"), "fsync folder", "timeline"), KeyboardInterrupt()],
    ids=["EIO", "SIGINT"],
)
def test_commit_interrupted_after_its_link_is_adopted_by_the_next_call(store_path: Path, error: BaseException) -> None:
    disk = LosesReplies()
    with open_store(store_path, system=System(file_system=disk)) as store:
        grow(store, 1)
        disk.error = error
        with pytest.raises(type(error)):
            store.commit(2, {"counter": 2})
        again = store.commit(2, {"counter": 2})  # the same once more: no conflict with itself
        assert store.steps() == [1, 2]
        assert again.id == store.snapshot(2).id
        disk.error = error
        with pytest.raises(type(error)):
            store.commit(3, {"counter": 3})
        assert store.commit(4, {"counter": 4}).parent == store.snapshot(3).id


def test_failed_commit_leaves_no_temporary_file_and_no_trace(store_path: Path) -> None:
    class Refusing(UnsyncedFileSystem):
        refused = ""

        def perform(self, operation: Operation, act: Callable[[], T]) -> T:
            if operation.name == self.refused:
                raise typed_error(OSError(errno.EIO, "refused"), operation.name, operation.path)
            return super().perform(operation, act)

    disk = Refusing()
    with open_store(store_path, system=System(file_system=disk)) as store:
        grow(store, 1)
        for name in ("create", "write", "rename", "link", "preallocate"):
            disk.refused = name
            with pytest.raises(StorageError):
                store.commit(2, {"counter": 2, "policy": np.random.default_rng(1).random(100_000)})
            disk.refused = ""
            assert list((store_path / "tmp").iterdir()) == []
            assert store.steps() == [1]
        assert store.commit(2, {"counter": 2}).step == 2


# --- copies ---


@pytest.mark.parametrize("keep_index", [True, False])
def test_copied_store_is_a_store(store: Any, tmp_path: Path, keep_index: bool) -> None:
    grow(store, 1, 2)
    store.commit(3, {"counter": 3, "policy": np.random.default_rng(1).random(50_000)})
    store.close()
    copy = tmp_path / "another place"
    shutil.copytree(store.path, copy, ignore=None if keep_index else shutil.ignore_patterns("index"))
    with open_store(copy, create=False) as copied:
        assert copied.store_id == store.store_id
        assert copied.verify(read_data=True).ok
        assert copied.restore(2) == {"counter": 2}
        assert copied.commit(4, {"counter": 4}, drop=["policy"]).seq == 4
    with open_store(store.path) as original:
        assert original.steps() == [1, 2, 3]


def test_moved_store_opens_where_it_is_now(store: Any, tmp_path: Path) -> None:
    grow(store, 1)
    store.close()
    shutil.move(store.path, tmp_path / "moved")
    with open_store(tmp_path / "moved", create=False) as moved:
        assert moved.restore() == {"counter": 1}
        assert moved.commit(2, {"counter": 2}).seq == 2


def test_folder_taken_away_under_an_open_store_is_a_typed_error(store: Any) -> None:
    grow(store, 1)
    shutil.rmtree(store.path)
    with pytest.raises(casckpt.CasckptError):
        store.commit(2, {"counter": 2, "policy": np.random.default_rng(1).random(50_000)})
    with pytest.raises(casckpt.CasckptError):
        store.commit(2, {"counter": 2})


# --- threads ---


def test_threads_of_one_handle_commit_in_turn(store: Any) -> None:
    lock, step, errors = threading.Lock(), iter(range(1000)), []

    def train() -> None:
        for _ in range(10):
            try:
                with lock:
                    number = next(step)
                    store.commit(number, {"counter": number})
                store.restore("latest")
            except Exception as error:  # noqa: BLE001 - shown below, whatever it is
                errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.steps() == list(range(40))
