"""Generations: whoever recovers a run last is the only one who commits to it."""

from __future__ import annotations

import errno
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.recovery import RecoveryCoordinator
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from casckpt.store.generations import list_generations, open_generation, own_generation
from casckpt.testing.failing import FailingFileSystem
from tests.conformance.independent_reader import read_store
from tests.unit.stores import open_store


def state(value: int) -> dict[str, Any]:
    return {"policy": [float(value)], "n": {"step": value}}


def test_old_learner_is_fenced_at_its_next_commit_and_told_by_whom(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as old, open_store(tmp_path / "store") as new:
        old.commit(1, state(1))
        new.resume(1)
        assert open_generation(new, new.snapshot(1), ["oom kill"]) == 1
        new.commit(2, state(2))
        with pytest.raises(casckpt.FencedError, match="generation 1 was opened by pid") as fenced:
            old.commit(2, state(20))
        assert (fenced.value.newer, fenced.value.generation) == (1, 0)
        assert old.restore(2) == state(2)
        with pytest.raises(casckpt.SaveFailedError) as failed:
            old.commit_async(3, state(3)).result()
        assert isinstance(failed.value.__cause__, casckpt.FencedError)
        old.resume("latest")
        with pytest.raises(casckpt.FencedError):
            old.commit(3, state(3))


def test_generation_opened_while_a_commit_is_under_way_fences_it_at_publish(tmp_path: Path) -> None:
    """The commit has passed every check and written its data; the number it wants is taken by the generation."""
    with open_store(tmp_path / "store") as old, open_store(tmp_path / "store") as new:
        old.commit(1, state(1))
        append = old._timeline.append

        def lose_the_race(*facts: Any, **options: Any) -> bool:
            old._timeline.append = append
            open_generation(new, new.snapshot(1))
            return bool(append(*facts, **options))

        old._timeline.append = lose_the_race
        with pytest.raises(casckpt.FencedError):
            old.commit(2, state(2))
        assert new.steps() == [1]


def test_who_recovers_again_commits_again(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as one, open_store(tmp_path / "store") as two:
        one.commit(1, state(1))
        for number, (winner, loser) in enumerate([(two, one), (one, two), (two, one)], 1):
            winner.resume("latest")
            assert open_generation(winner, winner.snapshot()) == number
            assert own_generation(winner) == number
            winner.commit(number + 1, state(number + 1))
            with pytest.raises(casckpt.FencedError):
                loser.commit(number + 1, state(0))
        assert one.restore(4) == state(4)


def test_handle_opened_after_a_recovery_belongs_to_it(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(1, state(1))
        open_generation(store, None)
    with open_store(tmp_path / "store") as store:
        assert own_generation(store) == 1
        store.commit(2, state(2))
        assert store.steps() == [1, 2]


def test_generation_of_one_run_fences_no_other(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", run="a") as a, open_store(tmp_path / "store", run="a2") as other:
        a.commit(1, state(1))
        open_generation(a, None)
        other.commit(1, state(1))
        assert (own_generation(a), own_generation(other)) == (1, 0)
        assert list_generations(other) == []


def test_recovery_that_was_overtaken_opens_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as one, open_store(tmp_path / "store") as two:
        open_generation(one, None, expected=0)
        with pytest.raises(casckpt.FencedError, match="expected 0"):
            open_generation(two, None, expected=0)
        assert [each.number for each in list_generations(two)] == [1]


def test_reasons_and_what_is_continued_are_kept(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        snapshot = store.commit(1, state(1))
        open_generation(store, None, ["new"])
        open_generation(store, snapshot, ["step 2 is not whole", "x" * 2000, "\ud800"])
        first, second = list_generations(store)
        assert (first.number, first.snapshot, first.reasons) == (1, None, ("new",))
        assert (second.number, second.snapshot) == (2, snapshot.id)
        assert second.reasons == ("step 2 is not whole", "x" * 999 + "…", "'\\ud800'")
        assert "generation 2 of main: from " + snapshot.id[:12] in str(second)
        assert second.to_dict()["pid"] == second.pid


def test_generations_outlive_the_index(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(1, state(1))
        open_generation(store, None)
        open_generation(store, None)
    shutil.rmtree(tmp_path / "store" / "index")
    with open_store(tmp_path / "store") as store:
        assert [each.number for each in list_generations(store)] == [1, 2]
        assert own_generation(store) == 2


def test_a_reader_written_from_the_document_understands_generations(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(1, state(1))
        open_generation(store, store.snapshot(1), ["why"])
        store.commit(2, state(2))
        assert "generations" in store.document.features.write
    assert read_store(tmp_path / "store").generations == {"main": 1}


def test_read_only_handle_opens_no_generation(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(1, state(1))
    with open_store(tmp_path / "store", read_only=True) as store, pytest.raises(casckpt.ReadOnlyError):
        open_generation(store, None)


def test_components_added_later_by_an_old_learner_are_fenced(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as old, open_store(tmp_path / "store") as new:
        old.commit(1, state(1))
        open_generation(new, new.snapshot(1))
        with pytest.raises(casckpt.SaveFailedError) as failed:
            old.supersede_async(1, {"replay": [1.0]}).result()
        assert isinstance(failed.value.__cause__, casckpt.FencedError)
        assert set(new.restore(1)) == {"policy", "n"}
        assert own_generation(new) == 1
        open_generation(old, old.snapshot(1))
        old.supersede_async(1, {"replay": [1.0]}).result()
        assert set(old.restore(1)) == {"policy", "n", "replay"}


def test_every_failing_operation_opens_a_generation_whole_or_not_at_all(tmp_path: Path) -> None:
    """What was opened is seen by others; what was not fences nobody, and can be opened at the next try."""
    opened = 0
    for at in itertools.count(1):
        path = tmp_path / str(at)
        with open_store(path) as store:
            store.commit(1, state(1))
        disk = FailingFileSystem(LocalFileSystem(), fail_at=at, error=errno.EIO)
        with open_store(path, create=False, system=System(file_system=disk)) as store, open_store(path) as old:
            try:
                opened = open_generation(store, None, ["why"])
            except casckpt.StorageError:
                opened = 0
            seen = [each.number for each in list_generations(old)]
            assert seen in ([1], [] if not opened else [1])
            if seen:
                with pytest.raises(casckpt.FencedError):
                    old.commit(2, state(2))
            else:
                old.commit(2, state(2))
        if not disk.was_hit:
            break
        with open_store(path) as store:
            assert open_generation(store, None) == len(seen) + 1
    assert opened == 1
    assert at > 5


@pytest.mark.parametrize("hours", [-9, 9])
def test_order_of_the_timeline_decides_however_the_clock_was_set(tmp_path: Path, hours: int) -> None:
    """Each writer's clock leaps by hours between its entries: newest, fencing and recovery follow the numbers alone."""
    now_ns = [10**18]
    system = System(time_ns=lambda: now_ns[0])
    with open_store(tmp_path / "store", system=system) as old, open_store(tmp_path / "store", system=system) as new:
        for step in (1, 2, 3):
            old.commit(step, state(step))
            now_ns[0] += hours * 3600 * 10**9
        live = state(0)
        assert RecoveryCoordinator(new).recover(live).step == 3
        assert live == state(3)
        now_ns[0] -= 40 * hours * 3600 * 10**9
        new.commit(4, state(4))
        with pytest.raises(casckpt.FencedError):
            old.commit(4, state(40))
        assert new.snapshot("latest").step == 4
        assert [each.number for each in list_generations(new)] == [1]
