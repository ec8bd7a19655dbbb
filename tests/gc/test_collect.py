"""Collections of quiet stores: what stays, what goes, what a plan says, and what it refuses (cases G01 to G20)."""

from __future__ import annotations

import dataclasses
import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import casckpt_gc
import numpy as np
import pytest
from casckpt_gc import Best, Compaction, Retention, Thinning

import casckpt
from casckpt.errors import CorruptionError, IncompleteError, InvalidInputError, NotFoundError
from casckpt.ids import ObjectId, SnapshotId
from casckpt.index.tables import decode_object, decode_pack_row, number_key
from casckpt.objects.packs import pack_path
from casckpt.storage.process import System
from casckpt.store.wholeness import WholenessCheck
from casckpt.testing.invariants import index_counts
from casckpt.testing.trees import difference
from tests.gc.collecting import FullDisk, check_steps, collect, commit, files, noise, size, tree, trees
from tests.unit.stores import UnsyncedFileSystem, open_store

pytestmark = pytest.mark.filterwarnings("error")


def test_what_retention_lets_go_is_gone_and_the_rest_is_exact(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, *range(1, 9))
        before = size(store_path, "packs")
        report = collect(store, Retention(latest=2))
        assert report.retired_count == 6
        assert before - size(store_path, "packs") > 0.7 * before
        assert report.freed_bytes - report.rewritten_bytes >= before - size(store_path, "packs")
    check_steps(store_path, trees([7, 8]))
    assert not files(store_path, "trash", "tmp", "leases")


def test_a_plan_frees_what_it_says_and_changes_nothing_before(store_path: Path) -> None:
    """G09."""
    with open_store(store_path) as store:
        commit(store, *range(1, 9))
        before = {name: os.path.getsize(store_path / name) for name in files(store_path, "packs", "timeline", "trash")}
        plan = casckpt_gc.plan(store, Retention(latest=2), Thinning(["optimizer"]))
        after = {name: os.path.getsize(store_path / name) for name in files(store_path, "packs", "timeline", "trash")}
        assert after == before
        assert [fate.step for fate in plan.retired] == [1, 2, 3, 4, 5, 6]
        assert [(fate.step, fate.withdrawn) for fate in plan.thinned] == [(7, ("optimizer",))]
        report = plan.execute(grace_s=0.0)
        gone = before.keys() - set(files(store_path, "packs", "timeline"))
        assert report.freed_bytes == plan.freed_bytes == sum(before[name] for name in gone) > 500_000
        assert report.rewritten_bytes == plan.rewritten_bytes > 0
        assert (report.retired_count, report.thinned_count) == (6, 1)
        with pytest.raises(InvalidInputError, match="executed before"):
            plan.execute(grace_s=0.0)
        text = str(plan)
        assert "steps 1, 2, 3, 4, 5, 6" in text and "frees" in text and "main/main" in text
        assert plan.to_dict()["retired_count"] == 6


def test_retention_is_computed_from_the_store_by_a_new_process(store_path: Path) -> None:
    """G02."""
    for step in (1, 2, 3):
        with open_store(store_path) as store:
            commit(store, step)
            collect(store, Retention(latest=1))
    check_steps(store_path, trees([3]))


def test_only_the_branch_that_was_named_is_touched_and_shared_objects_survive(store_path: Path) -> None:
    """G03."""
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
        store.resume(2, branch="other")
        store.commit(4, {**tree(4), "policy": tree(2)["policy"]})
        collect(store, Retention(latest=1), branch="main")
        with open_store(store_path, run="second") as second:
            second.commit(1, tree(1))
            collect(second, Retention(latest=1))
        with pytest.raises(NotFoundError, match="nowhere"):
            casckpt_gc.plan(store, Retention(), branch="nowhere")
    check_steps(store_path, {3: tree(3), 4: {**tree(4), "policy": tree(2)["policy"]}})
    check_steps(store_path, trees([1]), run="second")


def test_best_is_taken_from_stored_metrics_also_those_that_came_later(store_path: Path) -> None:
    """G04, G05."""
    with open_store(store_path) as store:
        for step, value in ((1, 9.0), (2, float("nan")), (3, 1.0), (4, 2.0)):
            store.commit(step, tree(step), metrics={"return": value})
        store.annotate(3, metrics={"return": 99.0})
    with open_store(store_path) as store:
        collect(store, Retention(latest=1, best=Best("return", count=2)))
    check_steps(store_path, trees([1, 3, 4]))


def test_tagged_step_stays_and_goes_when_the_tag_is_taken_away(store_path: Path) -> None:
    """G13."""
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
        store.tag("good", 1)
        collect(store, Retention(latest=1))
        assert store.steps() == [1, 3]
        store.retire("good")  # by hand; the tag still keeps its data
        collect(store)
        assert store.restore("good")["counters"] == {"step": 1}
        store.untag("good")
        collect(store)
    check_steps(store_path, trees([3]))


def test_retired_snapshot_cannot_be_tagged_and_says_when_its_data_is_gone(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
        gone = store.retire(2)
        with pytest.raises(InvalidInputError, match="retired"):
            store.tag("late", gone.id)
        collect(store)
        with pytest.raises(NotFoundError, match=r"was retired, and a collector has taken data of it.*casckpt log"):
            store.restore(gone.id)
        assert store.snapshot(gone.id).is_retired


def test_thinned_snapshot_gives_what_is_left_and_names_what_is_not(store_path: Path) -> None:
    """G16."""
    with open_store(store_path) as store:
        commit(store, *range(1, 6))
        before = size(store_path, "packs")
        collect(store, None, Thinning(["optimizer"], keep_latest=2), compaction=Compaction(needed_share_max=0.9))
        assert before - size(store_path, "packs") > 2 * 4 * SIZE_OF_MOMENTS // 3
        assert [each.thinned for each in store.timeline()] == [("optimizer",)] * 3 + [()] * 2
        with pytest.raises(NotFoundError, match=r"'optimizer'.*withdrawn on purpose.*only=\['counters'"):
            store.restore(2)
        with pytest.raises(NotFoundError, match="withdrawn"):
            store.restore_into({"optimizer": {"m": np.zeros(20_000, np.float32)}}, 2)
        policy = {"w": np.zeros(20_000, np.float32)}
        store.restore_into({"policy": policy}, 2)
        assert np.array_equal(policy["w"], tree(2)["policy"]["w"])
        store.resume(3, only=["policy"])
        with pytest.raises(InvalidInputError, match=r"inherit=\['optimizer'\].*thinned"):
            store.commit(9, {"policy": policy}, inherit=["optimizer", "counters", "frozen"])
    left = {step: {name: value for name, value in tree(step).items() if name != "optimizer"} for step in (1, 2, 3)}
    check_steps(store_path, {**left, **trees([4, 5])})


SIZE_OF_MOMENTS = 20_000


def test_latest_is_never_a_thinned_snapshot(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2)
        collect(store, None, Thinning(["optimizer"]))
        store.retire(2)
        with pytest.raises(IncompleteError, match="thinned"):
            store.restore()


def test_the_same_content_is_stored_again_after_it_was_collected(store_path: Path) -> None:
    """G06: the index never claims what is gone, in this handle or another."""
    with open_store(store_path) as store, open_store(store_path, run="other") as other:
        commit(store, 1, 2)
        commit(other, 1)
        store.retire(1)
        other.retire(1)
        collect(store)
        store.commit(3, tree(1))  # this handle has seen the collection …
        other.commit(2, tree(1))  # … this one stands at a snapshot whose data is gone
        assert other.timeline()[-1].new_bytes == 0
    check_steps(store_path, {2: tree(2), 3: tree(1)})
    check_steps(store_path, {2: tree(1)}, run="other")


def test_handle_that_compares_with_a_collected_parent_stores_everything_again(store_path: Path) -> None:
    with open_store(store_path) as store, open_store(store_path, run="other") as other:
        commit(store, 50)  # has what never changes
        commit(other, 1)
        other.retire(1)
        with open_store(store_path, run="third") as collector:
            collector.commit(1, tree(60))
            report = collect(collector)
        assert report.condemned_count == 1
        snapshot = other.commit(2, tree(1))
        assert snapshot.new_bytes > 0.9 * (snapshot.logical_bytes - 80_000)
    check_steps(store_path, {2: tree(1)}, run="other")


def test_nothing_is_read_or_written_when_nothing_is_garbage(store_path: Path) -> None:
    """G08: a plan of a store with many chunks and none dead looks at no manifest and at no object."""
    counted: list[str] = []

    class Counting(UnsyncedFileSystem):
        def perform(self, operation: Any, act: Any) -> Any:
            if operation.name in ("open", "read", "create", "write"):
                counted.append(str(operation))
            return super().perform(operation, act)

    with open_store(store_path, chunk_size=4096, system=System(file_system=Counting())) as store:
        for step, chunks in ((1, 100), (2, 500)):
            store.commit(step, {"big": {"x": noise(step, 1024 * chunks)}})
        counted.clear()
        plan = casckpt_gc.plan(store, Retention(latest=5))
        assert plan.is_empty and plan.live_bytes == 0
        many = len(counted)
        store.retire(1)
        counted.clear()
        report = plan.execute(grace_s=0.0)
        assert report.condemned_count == 1
    assert many < 20


def test_a_few_dead_chunks_in_a_large_pack_are_left_alone(store_path: Path) -> None:
    with open_store(store_path, chunk_size=4096) as store:
        big = noise(1, 1024 * 100)
        store.commit(1, {"big": {"x": big}})
        big = big.copy()
        big[:2048] += 1
        store.commit(2, {"big": {"x": big}})
        plan = casckpt_gc.plan(store, Retention(latest=1))
        report = plan.execute(grace_s=0.0)
        assert (report.condemned_count, report.freed_bytes) == (0, 0)
    check_steps(store_path, {2: {"big": {"x": big}}})


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_wall_clock_that_jumps_decides_nothing(store_path: Path, jump_s: int) -> None:
    """G11."""
    now = [1_700_000_000.0]
    system = System(file_system=UnsyncedFileSystem(), time_ns=lambda: int(now[0] * 1e9))
    with open_store(store_path, system=system) as store:
        for step in range(1, 6):
            commit(store, step)
            now[0] += jump_s
        collect(store, Retention(latest=2))
    check_steps(store_path, trees([4, 5]))


def _chain(path: Path, count: int) -> dict[int, Any]:
    """Steps that differ a little from one to the next, stored as differences."""
    states = {}
    table = np.zeros(60_000, np.float32) + noise(5, 60_000)
    with open_store(path, level="small") as store:
        for step in range(1, count + 1):
            table = table.copy()
            table[step * 7 % 50 :: 300] += 1
            states[step] = {"policy": {"table": table, "other": noise(step)}}
            store.commit(step, states[step])
        with store._keeper.kv.read() as txn:
            from casckpt.index.tables import decode_object

            assert any(place.bases for _, row in txn.scan("objects") for place in decode_object(row)[1])
    return states


def test_bases_of_a_retired_step_are_held_while_something_is_decoded_from_them(store_path: Path) -> None:
    """G14."""
    states = _chain(store_path, 6)
    with open_store(store_path) as store:
        plan = casckpt_gc.plan(store, Retention(latest=1))
        assert plan.held_bytes > 0
        plan.execute(grace_s=0.0)
    check_steps(store_path, {6: states[6]})


def test_rewriting_keeps_chains_and_gives_space_back(store_path: Path) -> None:
    """G14, G19: bases are copied as they are, so everything built on them decodes as before."""
    states = _chain(store_path, 8)
    with open_store(store_path) as store:
        before = size(store_path, "packs")
        report = collect(store, Retention(latest=1), compaction=Compaction(needed_share_max=0.99))
        assert report.rewritten_bytes > 0
        assert size(store_path, "packs") < before / 2
    check_steps(store_path, {8: states[8]})


def test_value_that_comes_back_between_collections_stays_decodable(store_path: Path) -> None:
    """G19: A, B, A with collection and compaction between."""
    states = _chain(store_path, 2)
    with open_store(store_path, level="small") as store:
        store.resume()
        expected = {2: states[2]}
        for step, source in ((3, 1), (4, 2), (5, 1), (6, 2)):
            collect(store, Retention(latest=1), compaction=Compaction(needed_share_max=0.99))
            store.commit(step, states[source])
            expected = {step: states[source]}
        collect(store, Retention(latest=1), compaction=Compaction(needed_share_max=0.99))
    check_steps(store_path, expected)


@pytest.mark.full
def test_rolling_retention_rewrites_little(store_path: Path) -> None:
    """G20: chain groups die as a whole, so what is held stays bounded and nothing is encoded again."""
    table = noise(5, 60_000)
    rewritten = written = 0
    with open_store(store_path, level="balanced") as store:
        for step in range(1, 61):
            table = table.copy()
            table[step * 7 % 50 :: 300] += 1
            written += store.commit(step, {"policy": {"table": table, "other": noise(step)}}).stored_bytes
            if step % 5 == 0:
                plan = casckpt_gc.plan(store, Retention(latest=5), compaction=Compaction())
                rewritten += plan.execute(grace_s=0.0).rewritten_bytes
        live = casckpt_gc.plan(store, Retention(latest=4), compaction=Compaction())
    assert rewritten < written / 4
    assert live.held_bytes <= live.live_bytes


def test_many_small_packs_become_few(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, *range(1, 21))
        collect(store, Retention(latest=18), compaction=Compaction())
    assert len(files(store_path, "packs")) == 1
    check_steps(store_path, trees(range(3, 21)))


@pytest.mark.full
def test_compaction_keeps_to_its_budget(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, *range(1, 21))
        report = collect(store, compaction=Compaction(budget_bytes=500_000))
        assert 0 < report.rewritten_bytes <= 500_000
    check_steps(store_path, trees(range(1, 21)))


# --- what is refused ---


def test_store_of_which_nothing_would_be_left_is_not_collected(store_path: Path) -> None:
    """G18."""
    with open_store(store_path) as store:
        commit(store, 1, 2)
        store.retire(1)
        store.retire(2)
        before = files(store_path, "packs")
        with pytest.raises(InvalidInputError, match="no snapshot is left"):
            collect(store)
    assert files(store_path, "packs") == before


@pytest.mark.parametrize(
    "options",
    [
        {"retention": Best("return")},
        {"retention": {"latest": 3}},
        {"thinning": "optimizer"},
        {"thinning": [Retention()]},
        {"compaction": True},
        {"grace_s": float("nan")},
        {"grace_s": -1},
        {"grace_s": "60"},
    ],
    ids=str,
)
def test_what_is_no_rule_is_refused_and_nothing_is_done(store_path: Path, options: dict[str, Any]) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
        rules = {"retention": Retention(latest=1), **options}
        with pytest.raises(InvalidInputError, match="expected"):
            collect(store, rules.pop("retention"), **rules)
        assert store.steps() == [1, 2, 3]
    with pytest.raises(InvalidInputError, match="expected"):
        casckpt_gc.AnyOf(())


@pytest.mark.parametrize("is_thinned", [True, False], ids=["thin", "prune"])
def test_plan_takes_nothing_where_the_snapshot_that_it_counted_on_is_gone(store_path: Path, is_thinned: bool) -> None:
    """Step 3 is the newest whole one, 4 a mixed one above it; somebody retires 3 after the plan was made."""
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
        store.commit(4, {"counters": {"step": 4}}, inherit="*")
        plan = casckpt_gc.plan(store, None if is_thinned else Retention(latest=1), Thinning(["optimizer"]))
        assert (len(plan.thinned), len(plan.retired)) == ((2, 0) if is_thinned else (0, 2))
        store.retire(3)
        report = plan.execute(grace_s=0.0)
        assert (report.thinned_count, report.retired_count) == (0, 0)
        assert difference(tree(2), store.restore(2)) is None


def test_snapshot_that_got_a_tag_after_the_plan_stays_whole(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2, 3, 4)
        store.tag("old", 1)
        plan = casckpt_gc.plan(store, None, Thinning(["optimizer"], spare_tags=False))
        assert [fate.step for fate in plan.thinned] == [1, 2, 3]
        store.tag("good", 2)
        assert plan.execute(grace_s=0.0).thinned_count == 2
        assert difference(tree(2), store.restore("good")) is None
        assert [each.step for each in store.timeline() if each.thinned] == [1, 3]


def test_unreadable_manifest_stops_the_collection_with_nothing_changed(store_path: Path) -> None:
    """G18."""
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
    with open_store(store_path) as store:
        from casckpt.ids import ObjectId

        manifest = ObjectId(bytes.fromhex(store.snapshot(3).components["policy"].manifest))
        (places,) = store._keeper.reader.locate([manifest])
        pack = store_path / "packs" / (found := store._keeper.reader.pack_id(places[0].pack_no).hex())[:2] / found
        data = bytearray(pack.read_bytes())
        data[places[0].offset + places[0].header_size + 3] ^= 1
        pack.write_bytes(data)
        before = files(store_path, "packs", "timeline")
        with pytest.raises(CorruptionError):
            collect(store, Retention(latest=1))
    assert files(store_path, "packs", "timeline") == before


def test_missing_entry_or_pack_stops_the_collection(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
    for victim in (files(store_path, "timeline")[2], files(store_path, "packs")[0]):
        copy = store_path.with_name("copy")
        shutil.copytree(store_path, copy, ignore=shutil.ignore_patterns("index"))
        (copy / victim).unlink()
        with open_store(copy) as store:
            before = files(copy, "packs", "timeline")
            with pytest.raises((CorruptionError, IncompleteError), match="not certain what is needed"):
                collect(store, Retention(latest=1))
        assert files(copy, "packs", "timeline") == before
        shutil.rmtree(copy)


def test_lost_folder_of_leases_stops_the_collection(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
        plan = casckpt_gc.plan(store, Retention(latest=1))
        collection = casckpt_gc.Collection(plan, grace_s=3600.0)
        assert not collection.advance()
        shutil.rmtree(store_path / "leases")
        with pytest.raises(IncompleteError, match="folder is gone"):
            collection.advance()
        assert len(files(store_path, "packs")) == 3


def test_store_with_an_unknown_feature_is_not_collected(store_path: Path) -> None:
    from casckpt.format.document import Features

    with open_store(store_path) as store:
        commit(store, 1, 2)
        plan = casckpt_gc.plan(store, Retention(latest=1))
        store.document = casckpt_replace(store.document, Features(collect=["epochs"]))
        with pytest.raises(casckpt.UnsupportedFormatError, match="epochs"):
            plan.execute(grace_s=0.0)


def casckpt_replace(document: Any, features: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(document, features=features)


def test_document_says_that_the_store_was_collected(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2)
        collect(store, Retention(latest=1))
    assert '"collected"' in (store_path / "casckpt.json").read_text()
    (store_path / "casckpt.json").unlink()
    check_steps(store_path, trees([2]))


def test_document_says_so_also_of_what_was_retired_after_the_plan(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2)
        plan = casckpt_gc.plan(store)
        assert plan.is_empty
        store.retire(1)
        assert plan.execute(grace_s=0.0).condemned_count == 1
    assert '"collected"' in (store_path / "casckpt.json").read_text()


# --- a full disk, and what earlier processes left ---


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_handle_keeps_files_open_that_are_gone(store_path: Path) -> None:
    """Space is free only when nobody has the file open any more."""

    def open_packs() -> list[str]:
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        found = [os.readlink(each) for each in links if os.path.islink(each)]
        return [each for each in found if each.startswith((f"{store_path}/packs", f"{store_path}/trash"))]

    with open_store(store_path) as learner, open_store(store_path) as collector:
        commit(learner, 1, 2, 3)
        for store in (learner, collector):
            assert difference(tree(1), store.restore(1)) is None
        assert len(open_packs()) >= 2
        collect(collector, Retention(latest=1))
        assert learner.steps() == [3]
        assert [each for each in open_packs() if each.endswith("(deleted)")] == []


def test_collection_frees_space_on_a_full_disk(store_path: Path) -> None:
    """G12: from the moment the collection begins nothing can be created or written, but for what the reserve gives."""
    with open_store(store_path) as store:
        commit(store, *range(1, 4))
        collect(store, Retention(latest=3))  # makes the reserve
        commit(store, *range(4, 8))

    disk = FullDisk(store_path)
    with open_store(store_path, system=System(file_system=disk)) as store:
        report = collect(store, Retention(latest=1))
        assert (report.condemned_count, report.is_compaction_skipped) == (5, True)
        assert files(store_path, "tmp") == []
    check_steps(store_path, trees([7]))


def test_pack_of_a_commit_that_never_finished_and_files_of_dead_processes_go(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1)
        orphan = "ab" * 16
        (store_path / "packs" / "ab").mkdir(exist_ok=True)
        (store_path / "packs" / "ab" / orphan).write_bytes(b"x" * 1000)
        mine = Path(store._system.temporary_path(str(store_path)))
        (store_path / "tmp" / f"{mine.name.partition('-')[0]}-999999999-1-{'0' * 16}").write_bytes(b"y" * 500)
        mine.write_bytes(b"z")
        plan = casckpt_gc.plan(store)
        assert plan.freed_bytes == 1500
        assert plan.execute(grace_s=0.0).freed_bytes == 1500
        assert files(store_path, "tmp") == [f"tmp/{mine.name}"]
        mine.unlink()
    check_steps(store_path, trees([1]))


def test_report_and_plan_are_plain_values(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2)
        plan = casckpt_gc.plan(store, Retention(latest=1))
        assert dataclasses.is_dataclass(plan) and plan == casckpt_gc.plan(store, Retention(latest=1))
        assert "freed" in str(plan.execute(grace_s=0.0))


def test_reader_that_catches_up_after_the_files_are_gone_knows_what_is_left(store_path: Path) -> None:
    """An index of its own, as on another machine: tables of packs that were condemned cannot be read any more."""
    with open_store(store_path) as store:
        commit(store, *range(1, 7))
    shutil.rmtree(store_path / "index")
    with open_store(store_path, read_only=True) as reader, open_store(store_path) as store:
        assert reader.steps() == [1, 2, 3, 4, 5, 6]
        collect(store, Retention(latest=2))
        assert reader.steps() == [5, 6]
        assert difference(tree(6), reader.restore()) is None
        assert index_counts(reader) == index_counts(store)


def test_listings_say_which_snapshots_are_thinned_and_owe_nothing_for_retired_ones(store_path: Path) -> None:
    from casckpt.store.inspection import Inspection

    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
        collect(store, Retention(latest=2), Thinning(["optimizer"]))
        rows = Inspection(store).history("main", with_retired=True).rows
        assert [(row.step, row.state, row.reason) for row in rows] == [
            (3, "consistent", ""),
            (2, "thinned", ""),
            (1, "retired", ""),
        ]
        parts = {part.name: part.state for part in Inspection(store).parts(store.snapshot(2))}
        assert parts == {"counters": "whole", "frozen": "whole", "optimizer": "thinned", "policy": "whole"}
        assert str(store.snapshot(2)).endswith("thinned")


def test_collected_store_is_read_without_this_code(store_path: Path) -> None:
    """The independent reader follows docs/format.md: retired and thinned snapshots, condemned packs, their copies."""
    from tests.conformance.independent_reader import read_store

    with open_store(store_path) as store:
        commit(store, *range(1, 6))
        collect(store, Retention(latest=3), Thinning(["optimizer"]))
    found = read_store(store_path)
    assert [each.step for each in found.snapshots if not each.is_retired] == [3, 4, 5]
    assert [sorted(each.components) for each in found.snapshots if not each.is_retired] == [
        ["counters", "frozen", "policy"],
        ["counters", "frozen", "policy"],
        ["counters", "frozen", "optimizer", "policy"],
    ]


def test_index_made_anew_between_counting_and_condemning_condemns_what_was_counted(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fresh commit uses a pack that was counted dead; the others that were have other numbers by then."""
    module = import_module("casckpt_gc.collect")  # the package has a function of that name
    find = module.find

    def find_then_rebuild(store: Any, *arguments: Any) -> Any:
        found = find(store, *arguments)
        with open_store(store_path) as other:
            other.commit(7, tree(1) | {"counters": {"step": 7}})
        store._keeper.rebuild()
        return found

    with open_store(store_path) as store:
        commit(store, 1, 2, 3, 4, 5, 6)
        with monkeypatch.context() as patch:
            patch.setattr(module, "find", find_then_rebuild)
            report = collect(store, Retention(latest=2), compaction=None)
        assert difference(tree(1)["policy"], store.restore(7)["policy"]) is None
        assert report.condemned_count > 0
        assert collect(store, Retention(latest=2)).condemned_count > 0
        assert difference(tree(1)["policy"], store.restore(7)["policy"]) is None


def test_pack_that_got_the_number_of_another_is_looked_at(store_path: Path) -> None:
    """A commit asks which objects are here; it may not be told so of a lost pack because of one that had its number."""
    with casckpt.open(store_path, create=True) as store:
        commit(store, *range(1, 9))
        collect(store, Retention(latest=6))
        store._keeper.rebuild()
        commit(store, *range(9, 15))  # numbered as they come; a rebuild numbers all by their ids, which are random
        before = _live_packs(store)
        checks = {key: WholenessCheck(store._timeline, store._keeper, store._catalog) for key in before}
        assert all(all(checks[key].are_present(sorted(ids))) for key, ids in before.items())
        store._keeper.rebuild()
        after = _live_packs(store)
        number, lost = next((key, ids) for key, ids in after.items() if before.get(key, ids) != ids)
        with store._keeper.kv.read() as txn:
            pack_id, _ = decode_pack_row(txn.get("packs", number_key(number)) or b"")
        os.unlink(pack_path(str(store_path), pack_id))
        assert not any(checks[number].are_present(sorted(lost)))


@pytest.mark.parametrize("moment", ["locate", "_open_pack"])
def test_packs_that_get_other_numbers_while_they_are_read_are_read_right(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with casckpt.open(store_path, create=True) as store:
        commit(store, *range(1, 9))
        collect(store, Retention(latest=6))
        store._keeper.rebuild()
        commit(store, *range(9, 15))
        reader, kv = store._keeper.reader, store._keeper.kv
        act = getattr(reader, moment)
        pack_ids = {number: reader.pack_id(number) for number in _live_packs(store)}
        moving = [number for number, pack_id in pack_ids.items() if sorted(pack_ids.values()).index(pack_id) != number]
        first = next(step for step in range(3, 15) if _packs_of(store, step) <= {*moving})

        def act_then_rebuild(*arguments: Any) -> Any:
            found = act(*arguments)
            if store._keeper.kv is kv:
                store._keeper.rebuild()
            return found

        monkeypatch.setattr(reader, moment, act_then_rebuild)
        for step in (first, *range(3, 15)):
            assert difference(tree(step), store.restore(step)) is None, step
        assert store._keeper.kv is not kv


def _packs_of(store: Any, step: int) -> set[int]:
    """Numbers of the packs of a step's counters."""
    snapshot = store._catalog.load(SnapshotId(bytes.fromhex(store.snapshot(step).id)))
    manifest = store._catalog.manifest(ObjectId(snapshot.components["counters"].manifest))
    located = store._keeper.reader.locate(store._catalog.chunk_ids(manifest))
    return {place.pack_no for places in located for place in places}


def _live_packs(store: Any) -> dict[int, set[Any]]:
    """What lies in packs, by their numbers in the index that is in use."""
    found: dict[int, set[Any]] = {}
    with store._keeper.kv.read() as txn:
        for object_id, row in txn.scan("objects"):
            for place in decode_object(row)[1]:
                if not place.is_inline:
                    found.setdefault(place.pack_no, set()).add(object_id)
    return found
