"""Old timeline entries sealed into epochs: fewer files, no inlined garbage, and nothing of the history lost (G15)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import casckpt_gc
import pytest
from casckpt_gc import Retention

import casckpt
from casckpt.errors import CorruptionError, IncompleteError, UnsupportedFormatError
from casckpt.format import document
from casckpt.ids import ObjectId, SnapshotId
from casckpt.recovery import bisect_check
from casckpt.storage.process import System
from casckpt.store.dissect import dissect_entry
from casckpt.store.lines import compare_lines
from casckpt.testing.trees import difference
from tests.conformance.independent_reader import read_store
from tests.gc.collecting import FullDisk, check_steps, collect, commit, files, noise, size
from tests.gc.sealing import PER_EPOCH, RETENTION, make, short_epochs, tree, trees
from tests.unit.stores import UnsyncedFileSystem, open_store

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # a stale index is reported so


@pytest.fixture(autouse=True)
def epochs(request: pytest.FixtureRequest) -> Iterator[None]:
    with contextlib.nullcontext() if "hundred" in request.node.name else short_epochs():
        yield


def shared_objects(store: Any) -> dict[str, ObjectId]:
    """What every step has in common with the first, its chunks aside."""
    snapshot = store.snapshot(1)
    manifest = ObjectId(bytes.fromhex(snapshot.components["policy"].manifest))
    structure = ObjectId(store._catalog.manifest(manifest).structure)
    context = store._catalog.load(SnapshotId(bytes.fromhex(snapshot.id))).context
    return {"manifest": manifest, "structure": structure, "context": ObjectId(context)}


@pytest.fixture
def sealed(store_path: Path) -> Path:
    """Ten steps, of which 9 and 10 stay; entries 1 to 7 are sealed, and all of it is collected."""
    make(store_path)
    with open_store(store_path, create=False) as store:
        collect(store, RETENTION)
    return store_path


def test_sealed_entries_leave_one_file_per_epoch_and_no_inlined_garbage(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, *range(1, 11), make=tree)
        before = size(store_path, "timeline")
        plan = casckpt_gc.plan(store, RETENTION)
        own = [f"timeline/{0:014d}/{seq:020d}" for seq in range(1, 12)]
        assert (plan.sealed_count, plan.sealed_bytes) == (
            7,
            sum((store_path / each).stat().st_size for each in own[:7]),
        )
        report = plan.execute(grace_s=0.0)
        assert (report.sealed_count, report.freed_file_count) == (12, 11)  # the retirement filled a third epoch
        assert report.freed_bytes > plan.sealed_bytes
        assert size(store_path, "timeline") < before
    names = [f"timeline/{0:014d}/{seq:020d}" for seq in (0, 12)]
    assert files(store_path, "timeline") == [*names, *(f"timeline/epochs/{number:018d}" for number in range(3))]
    check_steps(store_path, trees(9, 10))
    assert [each.step for each in read_store(store_path).snapshots] == list(range(1, 11))


def test_what_is_sealed_in_a_copy_under_way_is_seen_before_any_file_of_an_entry_is_there(
    tmp_path: Path, sealed: Path
) -> None:
    """Opened when it held the first entry alone; of the epochs the second came first. No number of it is used again."""
    copy = tmp_path / "copy"
    shutil.copytree(sealed, copy, ignore=shutil.ignore_patterns("index", "epochs", f"{12:020d}"))
    with open_store(copy, create=False) as store:
        assert store._keeper.applied().seq == 0
    epoch = copy / f"timeline/epochs/{1:018d}"
    epoch.parent.mkdir()
    shutil.copy(sealed / f"timeline/epochs/{1:018d}", epoch)
    with open_store(copy, create=False) as store:
        assert store._keeper.applied().gaps == list(range(1, PER_EPOCH))
        assert store.commit(100, tree(100)).seq == 2 * PER_EPOCH


def test_history_of_sealed_steps_is_listed_and_what_is_gone_is_told(sealed: Path) -> None:
    with open_store(sealed, create=False) as store:
        listed = {each.step: each for each in store.timeline(all_runs=True)}
        assert sorted(listed) == [9, 10]
        first = read_store(sealed).snapshots[0]
        retired = store.snapshot(first.id.hex())
        assert (retired.step, retired.is_retired) == (1, True)
        with pytest.raises(casckpt.CasckptError) as caught:
            store.restore(first.id.hex(), only=["policy"])
        assert isinstance(caught.value, IncompleteError | CorruptionError | casckpt.NotFoundError)
        assert store.verify(read_data=True).ok
        collect(store, RETENTION)
        assert casckpt_gc.plan(store, RETENTION).sealed_count == 0


def test_a_sealed_entry_can_be_dumped(sealed: Path) -> None:
    found = dissect_entry(str(sealed), 5)
    assert found.is_ok and found.where.endswith(f"epochs/{1:018d}")
    assert found.fields["body"]["body"]["step"] == 5


def test_a_sealed_store_goes_on(sealed: Path) -> None:
    with open_store(sealed, create=False) as store:
        commit(store, 11, 12, 13, make=tree)
        commit(store, 14, make=lambda _: tree(2))  # what was let go comes back
        collect(store, Retention(latest=3))
    with open_store(sealed, create=False, read_only=True) as store:
        assert difference(tree(13), store.restore(13)) is None
    check_steps(sealed, {**trees(12, 13), 14: tree(2)})


def test_handle_that_saw_the_objects_stores_again_what_was_sealed_away(store_path: Path) -> None:
    with open_store(store_path) as learner, open_store(store_path, run="other") as keeper:
        commit(learner, *range(1, 11), make=tree)
        keeper.run = "main"
        collect(keeper, RETENTION)
        learner.commit(11, tree(2))
        assert difference(tree(2), learner.restore(11)) is None
    check_steps(store_path, {**trees(9, 10), 11: tree(2)})


def test_opening_does_not_look_at_epochs_however_many_there_are(sealed: Path) -> None:
    def looked() -> list[str]:
        disk = UnsyncedFileSystem()
        seen: list[str] = []

        def note(operation: Any, act: Any) -> Any:
            seen.append(f"{operation.name} {operation.path.rpartition('/timeline')[2]}")
            return act()

        disk.perform = note  # type: ignore[method-assign]
        with open_store(sealed, create=False, system=System(file_system=disk)) as store:
            assert store.steps()[-1] == store.step
        return [each for each in seen if "/epochs" in each]

    before = looked()
    with open_store(sealed, create=False) as store:
        for start in range(11, 51, 10):
            commit(store, *range(start, start + 10), make=tree)
            collect(store, RETENTION)
    assert len(files(sealed, "timeline/epochs")) > 10
    assert not any(each.startswith(("list", "open", "read")) for each in before)
    assert len(looked()) == len(before)


@pytest.mark.parametrize("applied", [3, 9])
def test_index_from_before_the_seal_is_brought_up_to_date(store_path: Path, tmp_path: Path, applied: int) -> None:
    """That of another machine: it stopped among the sealed entries, or after them, and their files are gone."""
    with open_store(store_path) as store:
        commit(store, *range(1, applied + 1), make=tree)
    shutil.copytree(store_path / "index", tmp_path / "index")
    with open_store(store_path, create=False) as store:
        store.resume()
        commit(store, *range(applied + 1, 12), make=tree)
        collect(store, RETENTION)
    shutil.rmtree(store_path / "index")
    shutil.copytree(tmp_path / "index", store_path / "index")
    check_steps(store_path, trees(10, 11))


def test_tags_thinned_and_inherited_components_stay_readable(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2, make=tree)
        store.tag("kept", 1)
        store.commit(3, {"counters": {"step": 3}}, inherit="*")
        commit(store, *range(4, 11), make=tree)
        collect(store, Retention(latest=1, every_steps=5), casckpt_gc.Thinning(["policy"], keep_latest=1))
        assert difference(tree(1), store.restore("kept")) is None or store.snapshot("kept").thinned == ("policy",)
        report = store.verify(read_data=True)
        assert report.ok, str(report)
        assert store.restore(10)["counters"] == {"step": 10}
    read_store(store_path)


def test_bisect_searches_sealed_steps(store_path: Path) -> None:
    """By a check that restores them, and against a line that left theirs."""
    with open_store(store_path) as store:
        commit(store, *range(1, 13), make=tree)
        store.resume(4)
        commit(store, 5, 6, make=tree)
        commit(store, *range(7, 13), make=lambda step: tree(step + 10))
        branch = store.branch
        collect(store)
        assert len(files(store_path, "timeline/epochs")) == 5
        tried = []

        def check(snapshot: casckpt.Snapshot) -> str:
            tried.append(snapshot.step)
            return "passes" if store.restore(snapshot.id)["counters"]["step"] < 7 else "fails"

        found = bisect_check(store, check, bad="main")
        assert found.first_bad is not None and found.last_good is not None
        assert (found.last_good.step, found.first_bad.step) == (6, 7) and len(tried) < 8
        divergence = compare_lines(store, store.snapshot("main"), store.snapshot(branch)).divergence
        assert divergence is not None and (divergence.step, divergence.components) == (7, ("counters", "policy"))


@pytest.mark.parametrize("kind", ["manifest", "structure", "context"])
def test_good_record_in_an_entry_is_kept_where_that_in_a_pack_is_bad(store_path: Path, kind: str) -> None:
    """What a commit stored again because a patrol had found damage must not be sealed away."""
    weights = {"policy": {"w": noise(1, 30_000)}}
    with open_store(store_path) as store:
        store.commit(1, {"counters": {"step": 1}, **weights}, config={"lr": 1e-3})
        ((place,),) = store._keeper.reader.locate([shared_objects(store)[kind]])
        assert not place.is_inline
        (pack,) = store_path.glob("packs/*/*")
        data = bytearray(pack.read_bytes())
        data[place.offset + place.header_size] ^= 1
        pack.write_bytes(data)
        assert len(casckpt_gc.patrol(store).findings) == 1
        steps = range(2, 2 + 2 * PER_EPOCH)
        commit(store, *steps, make=lambda step: {"counters": {"step": step}, **weights})
        assert collect(store).sealed_count > 0
    shutil.rmtree(store_path / "index")
    with open_store(store_path, create=False) as store:
        for step in steps:
            assert difference({"counters": {"step": step}, **weights}, store.restore(step)) is None
        assert store.context(steps[-1]).config == {"lr": 1e-3}


# --- the number is taken ---


def test_writer_whose_number_was_sealed_and_freed_loses_the_race(store_path: Path) -> None:
    """It looked before, and links after: the file's name is free again, the number is not."""
    with open_store(store_path) as late, open_store(store_path, run="other") as quick:
        late.commit(1, tree(1))
        quick.commit(1, tree(1))
        append = late._timeline.append

        def long_after(seq: int, *facts: Any, **options: Any) -> bool:
            late._timeline.append = append
            commit(quick, *range(2, 9), make=tree)
            collect(quick, Retention(latest=2))
            assert not Path(late._timeline.path(seq)).exists()
            found = append(seq, *facts, **options)
            assert not found and not Path(late._timeline.path(seq)).exists()
            return bool(found)

        late._timeline.append = long_after
        late.commit(2, tree(2))
        assert difference(tree(2), late.restore(2)) is None
    check_steps(store_path, trees(1, 2))
    check_steps(store_path, trees(7, 8), run="other")


def test_writer_whose_own_entry_was_sealed_before_it_looked_has_won(store_path: Path) -> None:
    with open_store(store_path) as late, open_store(store_path, run="other") as quick:
        quick.commit(1, tree(1))
        stands = late._timeline._stands

        def long_after(*facts: Any) -> bool:
            late._timeline._stands = stands
            commit(quick, *range(2, 9), make=tree)
            collect(quick, Retention(latest=2))
            return bool(stands(*facts))

        late._timeline._stands = long_after
        late.commit(1, tree(1))
        late.commit(2, tree(2))
    check_steps(store_path, trees(1, 2))


def test_file_under_a_sealed_number_says_nothing_and_is_removed(sealed: Path) -> None:
    stray = sealed / f"timeline/{0:014d}/{5:020d}"
    shutil.copy(sealed / f"timeline/{0:014d}/{12:020d}", stray)
    check_steps(sealed, trees(9, 10))
    with open_store(sealed, create=False) as store:
        collect(store)
    assert not stray.exists()
    check_steps(sealed, trees(9, 10))


# --- faults ---


def test_full_disk_seals_what_needs_no_copies_with_the_reserve(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, *range(1, 11), make=tree)
        collect(store, compaction=None)  # puts the reserve there
    with open_store(store_path, create=False, system=System(file_system=FullDisk(store_path))) as store:
        report = collect(store, Retention(latest=1, every_steps=20))
    assert report.retired_count == 8
    check_steps(store_path, trees(1, 10))


# --- damage, versions ---


def test_damaged_image_costs_its_own_snapshot_and_is_named(sealed: Path) -> None:
    with open_store(sealed, create=False) as store:
        path, row = sealed / f"timeline/epochs/{2:018d}", store._timeline.epochs._row(9)
    assert row is not None
    data = bytearray(path.read_bytes())
    data[row.offset + 80] ^= 1  # in the body of entry 9
    path.write_bytes(data)
    shutil.rmtree(sealed / "index")
    with open_store(sealed, create=False) as store:
        assert store.steps() == [10]
        assert difference(tree(10), store.restore(10)) is None
        problems = [each.message for each in store.verify().problems]
        assert any("timeline entry 9" in each for each in problems) and any("epoch 2" in each for each in problems)
        with pytest.raises(CorruptionError):
            collect(store, RETENTION)


def test_missing_epoch_is_named_and_nothing_is_collected(sealed: Path) -> None:
    (sealed / f"timeline/epochs/{1:018d}").unlink()
    shutil.rmtree(sealed / "index")
    with open_store(sealed, create=False) as store:
        assert difference(tree(10), store.restore(10)) is None
        assert any("entry 5 is missing" in each.message for each in store.verify().problems)
        with pytest.raises(IncompleteError):
            collect(store, RETENTION)


@pytest.mark.parametrize("is_missing", [False, True])
def test_epoch_is_healed_from_another_copy(sealed: Path, tmp_path: Path, is_missing: bool) -> None:
    shutil.copytree(sealed, tmp_path / "copy")
    bad = sealed / f"timeline/epochs/{1:018d}"
    whole = bad.read_bytes()
    bad.unlink()
    if not is_missing:
        bad.write_bytes(whole[:70] + b"x" + whole[71:])
    with open_store(sealed, create=False) as store, open_store(tmp_path / "copy", create=False) as copy:
        assert casckpt_gc.repair(store).lost_epochs == (1,)
        assert casckpt_gc.repair(store, copy).epochs == (1,)
        assert not is_missing or not bad.exists()
        assert casckpt_gc.repair(store, copy, execute=True).is_done
    assert bad.read_bytes() == whole
    assert files(sealed, "quarantine") == ([] if is_missing else ["quarantine/epoch-1"])
    check_steps(sealed, trees(9, 10))


def test_release_that_does_not_know_seals_refuses_the_store(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "KNOWN_FEATURES", document.KNOWN_FEATURES - {"sealed"})
    with pytest.raises(UnsupportedFormatError, match="sealed"):
        open_store(sealed, create=False)


# --- many ---


@pytest.mark.full
def test_a_thousand_tiny_commits_leave_few_files_in_epochs_of_a_hundred(store_path: Path) -> None:
    """The cost of ten thousand is ten times this (G15)."""
    rules = Retention(latest=5, every_steps=100)
    with open_store(store_path) as store:
        for start in range(1, 1001, 250):
            commit(store, *range(start, start + 250), make=tree)
            collect(store, rules)
        kept = store.steps()
        assert len(files(store_path, "timeline")) <= 1000 // 100 + 2 * 100
        assert len(files(store_path, "packs")) <= 16
    check_steps(store_path, trees(*kept))
