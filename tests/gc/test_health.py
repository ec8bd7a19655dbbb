"""Patrol and repair: rot is found, named, healed; what cannot be healed is named and nothing thrown away (G10, G17)."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import casckpt_gc
import pytest
from casckpt_gc import Limits, Retention
from casckpt_gc.command import patrol, repair
from click.testing import CliRunner

from casckpt.errors import CorruptionError, InvalidInputError, StorageError
from casckpt.storage.process import System
from casckpt.testing.failing import CountingFileSystem
from casckpt.testing.trees import difference
from tests.gc.collecting import check_steps, collect, commit, files, tree, trees
from tests.gc.test_sweeps import Killed, KillingFileSystem
from tests.unit.stores import UnsyncedFileSystem, open_store

STEPS = range(1, 7)
NO_LIMITS = Limits(0, 0, 1e9, 1e9)
pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # a copy passed over is told so


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A store and, beside it, a copy: `copy`."""
    path = tmp_path / "store"
    with open_store(path) as store:
        commit(store, *STEPS)
    shutil.copytree(path, tmp_path / "copy", ignore=shutil.ignore_patterns("index"))
    return path


def packs_by_step(path: Path) -> dict[int, str]:
    """The pack that each step's commit wrote."""
    with open_store(path, create=False) as store:
        found = {}
        for snapshot in store.timeline():
            body: Any = store._timeline.read(snapshot.seq).envelope.body
            found[snapshot.step] = body.packs[0].pack_id.hex()
        return found


def rot(path: Path, pack: str, at: float = 0.5) -> None:
    """One bit of a pack turned over."""
    file = path / "packs" / pack[:2] / pack
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 4
    file.write_bytes(data)


def test_patrol_finds_rot_and_names_steps_and_components(whole: Path) -> None:
    """G17."""
    rot(whole, packs_by_step(whole)[3])
    with open_store(whole) as store:
        found = casckpt_gc.patrol(store, limits=NO_LIMITS)
        assert not found.ok and len(found.findings) == 1
        assert {step for _, _, step, _ in found.needed_by} == {3}
        assert {name for *_, name in found.needed_by} <= {"policy", "optimizer"}
        assert "needed by main/main@3" in str(found)
        assert store.commit(7, tree(3)).new_bytes > 0  # what is in memory is stored again
        assert difference(tree(3), store.restore(7)) is None


def test_patrol_goes_round_within_its_budget_and_remembers_where_it_was(whole: Path) -> None:
    seen: list[str] = []
    for _ in STEPS:
        with open_store(whole) as store:
            found = casckpt_gc.patrol(store, budget_bytes=1, limits=NO_LIMITS)
            assert (found.checked_count, found.pack_count) == (1, len(STEPS))
            state = json.loads((whole / "patrol").read_text())
            seen.append(max(state, key=state.__getitem__))
    assert len(set(seen)) == len(STEPS)
    (whole / "patrol").write_text("{torn")
    with open_store(whole) as store:
        assert casckpt_gc.patrol(store, limits=NO_LIMITS).checked_count == len(STEPS)


def test_patrol_stops_after_its_time(whole: Path) -> None:
    now = iter(range(0, 10_000, 10))
    system = System(file_system=UnsyncedFileSystem(), monotonic_s=lambda: float(next(now)))
    with open_store(whole, system=system) as store:
        assert casckpt_gc.patrol(store, budget_s=5.0, limits=NO_LIMITS).checked_count == 1


def test_disk_is_watched(whole: Path) -> None:
    with open_store(whole) as store:
        free = casckpt_gc.health(store, NO_LIMITS)
        assert free.state == "good" and free.free_bytes == pytest.approx(shutil.disk_usage(whole).free, rel=0.2)
        assert casckpt_gc.health(store, Limits(1 << 60, 0, 1e9, 1e9)).state == "warn"
        assert casckpt_gc.health(store, Limits(1 << 60, 1 << 60, 1e9, 1e9)).state == "stop"
        assert casckpt_gc.health(store, Limits(0, 0, -1.0, 1e9)).state == "warn"


def test_repair_says_what_it_would_do_and_changes_nothing_before_it_is_told_to(whole: Path) -> None:
    pack = packs_by_step(whole)[3]
    rot(whole, pack)
    before = files(whole, "packs", "timeline", "quarantine")
    with open_store(whole) as store, open_store(whole.with_name("copy"), read_only=True) as copy:
        found = casckpt_gc.repair(store, copy)
        assert (found.is_done, [(heal.pack, heal.what, heal.lost) for heal in found.heals]) == (
            False,
            [(pack, "replace", ())],
        )
        assert files(whole, "packs", "timeline", "quarantine") == before
        assert casckpt_gc.repair(store, copy, execute=True).is_done
    check_steps(whole, trees(STEPS))
    assert files(whole, "quarantine") == [f"quarantine/{pack}"]


def test_pack_that_is_gone_comes_back_from_the_copy(whole: Path) -> None:
    pack = packs_by_step(whole)[2]
    (whole / "packs" / pack[:2] / pack).unlink()
    with open_store(whole) as store, open_store(whole.with_name("copy"), read_only=True) as copy:
        casckpt_gc.repair(store, copy, execute=True)
    check_steps(whole, trees(STEPS))


def test_objects_are_healed_from_a_copy_whose_packs_are_others(whole: Path) -> None:
    copy_path = whole.with_name("copy")
    with open_store(copy_path) as copy:
        collect(copy, compaction=casckpt_gc.Compaction(tiny_count_min=2))  # all packs rewritten
    rot(whole, packs_by_step(whole)[3])
    with open_store(whole) as store, open_store(copy_path, read_only=True) as copy:
        found = casckpt_gc.repair(store, copy, execute=True)
        assert [heal.what for heal in found.heals] == ["rewrite"]
        assert not casckpt_gc.repair(store).heals
    check_steps(whole, trees(STEPS))


def test_what_nothing_gives_back_is_named_and_its_pack_stays(whole: Path) -> None:
    pack = packs_by_step(whole)[3]
    rot(whole, pack)
    with open_store(whole) as store:
        found = casckpt_gc.repair(store, execute=True)
        assert [(heal.what, len(heal.lost)) for heal in found.heals] == [("complete", 1)]
        assert {step for _, _, step, _ in found.lost_by} == {3}
        assert (whole / "packs" / pack[:2] / pack).exists()
        with pytest.raises(CorruptionError):
            store.restore(3)
        for step in set(STEPS) - {3}:
            assert difference(tree(step), store.restore(step)) is None
        store.retire(3)
        collect(store, Retention(latest=2))  # what is lost was let go, so the rest can be collected
    check_steps(whole, trees([5, 6]))


def test_second_record_heals_the_first(whole: Path) -> None:
    rot(whole, packs_by_step(whole)[3])
    with open_store(whole) as store:
        casckpt_gc.patrol(store, limits=NO_LIMITS)
        store.commit(7, tree(3))  # stored again
        found = casckpt_gc.repair(store, execute=True)
        assert [(heal.what, heal.lost) for heal in found.heals] == [("rewrite", ())]
    check_steps(whole, {**trees(STEPS), 7: tree(3)})


def test_validator_that_calls_everything_bad_loses_nothing(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G10."""
    monkeypatch.setattr(sys.modules["casckpt_gc.patrol"], "check16", lambda data: b"x" * 16)
    with open_store(whole) as store:
        found = casckpt_gc.repair(store, execute=True)
        assert len(found.heals) == len(STEPS)
    monkeypatch.undo()
    check_steps(whole, trees(STEPS))
    assert len(files(whole, "quarantine")) == len(STEPS)


@pytest.mark.full
def test_repair_that_is_killed_anywhere_can_be_done_again(whole: Path, tmp_path: Path) -> None:
    rot(whole, packs_by_step(whole)[3])
    with open_store(whole.with_name("copy")) as copy:
        collect(copy, compaction=casckpt_gc.Compaction(tiny_count_min=2))
    n, is_over = 0, False
    while not is_over:
        n += 1
        path = tmp_path / f"killed-{n}"
        shutil.copytree(whole, path, ignore=shutil.ignore_patterns("index"))
        disk = KillingFileSystem(UnsyncedFileSystem(), at=n)
        with open_store(whole.with_name("copy"), read_only=True) as copy:
            try:
                with open_store(path, create=False, system=System(file_system=disk)) as store:
                    casckpt_gc.repair(store, copy, execute=True)
            except (Killed, StorageError):
                pass
            is_over = not disk.was_hit
            with open_store(path, create=False) as store:
                casckpt_gc.repair(store, copy, execute=True)
                assert not casckpt_gc.repair(store).heals
                for step in STEPS:
                    assert difference(tree(step), store.restore(step)) is None, (n, step)
        shutil.rmtree(path)
    assert n > 10


def test_other_store_is_no_copy(whole: Path, tmp_path: Path) -> None:
    with (
        open_store(tmp_path / "stranger") as stranger,
        open_store(whole) as store,
        pytest.raises(InvalidInputError, match="not a copy"),
    ):
        casckpt_gc.repair(store, stranger)


def test_commands_find_and_heal(whole: Path) -> None:
    assert CliRunner().invoke(patrol, [str(whole)]).exit_code == 0
    rot(whole, packs_by_step(whole)[3])
    shown = CliRunner().invoke(patrol, [str(whole)])
    assert shown.exit_code == 1 and "needed by main/main@3" in shown.output
    dry = CliRunner().invoke(repair, [str(whole), "--from", str(whole.with_name("copy"))])
    assert dry.exit_code == 1 and "nothing was changed" in dry.output
    done = CliRunner().invoke(repair, [str(whole), "--from", str(whole.with_name("copy")), "--execute"])
    assert done.exit_code == 0
    check_steps(whole, trees(STEPS))


def test_patrol_reads_each_pack_once(whole: Path) -> None:
    disk = CountingFileSystem(UnsyncedFileSystem(), operations=frozenset({"open"}))
    with open_store(whole, system=System(file_system=disk)) as store:
        before = disk.count
        casckpt_gc.patrol(store, limits=NO_LIMITS)
        assert disk.count - before <= 3 * len(STEPS) + 4  # frame, table, records


def test_pack_of_which_nothing_can_be_read_is_healed_and_the_index_made_anew(whole: Path) -> None:
    pack = packs_by_step(whole)[3]
    file = whole / "packs" / pack[:2] / pack
    file.write_bytes(bytes(file.stat().st_size))
    copy_path = whole.with_name("copy")
    with open_store(copy_path) as copy:
        collect(copy, compaction=casckpt_gc.Compaction(tiny_count_min=2))
    with open_store(whole) as store, open_store(copy_path, read_only=True) as copy:
        found = casckpt_gc.repair(store, copy, execute=True)
        assert [(heal.what, heal.lost) for heal in found.heals] == [("rewrite", ())]
        file.write_bytes(bytes(1000))  # still condemned, whatever lies there
    check_steps(whole, trees(STEPS))
