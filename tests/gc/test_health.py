"""Patrol and repair: rot is found, named, healed; what cannot be healed is named and nothing thrown away (G10, G17)."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import casckpt_gc
import numpy as np
import pytest
from casckpt_gc import Limits, Retention
from casckpt_gc.command import patrol, repair
from casckpt_gc.compact import pack_writer
from click.testing import CliRunner

from casckpt.codec.contract import DIFFERENCE
from casckpt.codec.difference import base_of, encode_difference
from casckpt.errors import CorruptionError, InvalidInputError
from casckpt.storage.process import System
from casckpt.testing.failing import CountingFileSystem
from casckpt.testing.trees import difference
from tests.gc.collecting import check_steps, collect, commit, files, noise, tree, trees
from tests.gc.faults import SHARED, sweep
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
            assert (found.checked_count, found.file_count) == (1, len(STEPS))
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
        for value in (-1, float("nan"), "1", True):
            for name in ("budget_bytes", "budget_s"):
                with pytest.raises(InvalidInputError, match=f"{name}={value!r}"):
                    casckpt_gc.patrol(store, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="stop_free_bytes=nan"):
        Limits(stop_free_bytes=float("nan"))  # type: ignore[arg-type]


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


@pytest.mark.few(1)
@pytest.mark.parametrize("has_file", [True, False], ids=["damaged", "missing"])
def test_timeline_entry_comes_from_another_copy(whole: Path, has_file: bool) -> None:
    with open_store(whole) as store:
        seq = store.snapshot(3).seq
        entry = Path(store._timeline.path(seq))
    data = bytearray(entry.read_bytes())
    data[100] ^= 1
    entry.unlink()
    if has_file:
        entry.write_bytes(data)
    shutil.rmtree(whole / "index")
    with open_store(whole) as store, open_store(whole.with_name("copy"), read_only=True) as copy:
        assert 3 not in store.steps()
        assert [each.is_healed for each in casckpt_gc.repair(store).entries] == [False]
        assert f"timeline entry {seq}: from the other copy" in str(casckpt_gc.repair(store, copy))
        assert 3 not in store.steps()  # nothing was changed
        assert [each.is_healed for each in casckpt_gc.repair(store, copy, execute=True).entries] == [True]
        assert casckpt_gc.repair(store, copy).entries == ()
    assert len(files(whole, "quarantine")) == has_file
    check_steps(whole, trees(STEPS))


def test_entry_of_a_copy_that_went_on_differently_is_not_taken(whole: Path) -> None:
    copy_path = whole.with_name("copy")
    with open_store(whole) as store, open_store(copy_path) as copy:
        entry = Path(store._timeline.path(store.commit(7, tree(7)).seq))
        copy.commit(7, tree(8))
    entry.write_bytes(b"x" * 500)
    shutil.rmtree(whole / "index")
    with open_store(whole) as store, open_store(copy_path, read_only=True) as copy:
        assert [each.is_healed for each in casckpt_gc.repair(store, copy, execute=True).entries] == [False]
        assert store.steps() == [*STEPS]


def chained(path: Path, count: int = 4) -> dict[int, Any]:
    """Steps whose weights are differences each to the one before."""
    weights, states = noise(5, 100_000), {}
    with open_store(path, level="small") as store:
        for step in range(1, count + 1):
            states[step] = {"policy": {"w": weights}}
            store.commit(step, states[step])
            weights = weights + np.float32(1e-6) * noise(10 + step, 100_000)
    return states


def test_base_is_computed_from_what_was_built_on_it(tmp_path: Path) -> None:
    """The other copy let go of steps 1 to 3 and encoded step 4 anew: from that and three differences step 1 follows."""
    path, copy_path = tmp_path / "store", tmp_path / "copy"
    states = chained(path)
    shutil.copytree(path, copy_path, ignore=shutil.ignore_patterns("index"))
    with open_store(copy_path, level="small") as copy:
        assert collect(copy, Retention(latest=1)).recoded_count == 1
    rot(path, packs_by_step(path)[1])
    with open_store(path) as store, open_store(copy_path, read_only=True) as copy:
        for step in states:
            with pytest.raises(CorruptionError):
                store.restore(step)
        assert len(casckpt_gc.repair(store).heals[0].lost) == 1
        dry = casckpt_gc.repair(store, copy)
        assert [(heal.what, len(heal.derived), heal.lost) for heal in dry.heals] == [("rewrite", 1, ())]
        assert "1 of them from dependants" in str(dry)
        assert casckpt_gc.repair(store, copy, execute=True).heals == dry.heals
        assert not casckpt_gc.repair(store).heals
    check_steps(path, states)


def test_difference_leads_back_to_its_base() -> None:
    """Sparse, dense, of every item size; bytes after the last item are the new chunk's own."""
    rng = np.random.default_rng(3)
    for itemsize, size, changed in itertools.product((1, 2, 4, 8), (4096, 4099), (3, 4000)):
        base = rng.integers(0, 256, size, np.uint8)
        plain = base.copy()
        plain[rng.choice(size // 8 * 8, min(changed, size // 8 * 8), replace=False)] += 1
        form = encode_difference(plain.data, base.data, itemsize, ceiling=1 << 20)
        assert form is not None and form.codec == DIFFERENCE
        assert base_of(form.params, memoryview(form.payload), plain.data) == base.tobytes()


def test_validator_that_calls_everything_bad_loses_nothing(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G10."""
    monkeypatch.setattr(sys.modules["casckpt_gc.patrol"], "check16", lambda data: b"x" * 16)
    with open_store(whole) as store:
        found = casckpt_gc.repair(store, execute=True)
        assert len(found.heals) == len(STEPS)
    monkeypatch.undo()
    check_steps(whole, trees(STEPS))
    assert len(files(whole, "quarantine")) == len(STEPS)


def repair_sweep(whole: Path, tmp_path: Path, modes: Sequence[str], stride: int = 1) -> int:
    """A repair breaks off at its n-th operation, and is done again; returns at how many."""
    with open_store(whole.with_name("copy"), read_only=True) as copy:

        def heal(path: Path, system: System) -> None:
            with open_store(path, create=False, system=system) as store:
                casckpt_gc.repair(store, copy, execute=True)

        def check(path: Path) -> None:
            with open_store(path, create=False) as store:
                casckpt_gc.repair(store, copy, execute=True)
                assert not casckpt_gc.repair(store).heals
                for step in STEPS:
                    assert difference(tree(step), store.restore(step)) is None, step
                assert store.verify(read_data=True).ok

        return sweep(whole, tmp_path, heal, check, modes=modes, stride=stride)


@pytest.fixture
def repacked(whole: Path) -> Path:
    """One pack is bad, and the copy has its objects in another one."""
    rot(whole, packs_by_step(whole)[3])
    with open_store(whole.with_name("copy")) as copy:
        collect(copy, compaction=casckpt_gc.Compaction(tiny_count_min=2))
    return whole


def test_repair_that_is_killed_somewhere_can_be_done_again(repacked: Path, tmp_path: Path) -> None:
    assert repair_sweep(repacked, tmp_path, ["killed"], 13) > 1


@pytest.mark.full
@pytest.mark.parametrize("modes", SHARED)
def test_repair_that_breaks_off_anywhere_can_be_done_again(
    repacked: Path, tmp_path: Path, modes: tuple[str, ...]
) -> None:
    assert repair_sweep(repacked, tmp_path, modes) > 10


def test_repair_whose_new_pack_a_collection_takes_away_makes_another(
    repacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its name and the entry that names it, it looks like one that a dead commit left."""
    real, taken = pack_writer, []

    def make(store: Any) -> Any:
        writer = real(store)
        publish = writer.publish

        def published() -> Any:
            written = publish()
            if not taken:
                taken.append(written)
                with open_store(repacked, create=False) as other:
                    collect(other, compaction=None)
            return written

        writer.publish = published
        return writer

    monkeypatch.setattr(sys.modules["casckpt_gc.repair"], "pack_writer", make)
    with open_store(repacked) as store, open_store(repacked.with_name("copy"), read_only=True) as copy:
        assert [heal.what for heal in casckpt_gc.repair(store, copy, execute=True).heals] == ["rewrite"]
    assert len(taken) == 1
    check_steps(repacked, trees(STEPS))


def test_repair_that_cannot_heal_all_writes_what_it_can_once(whole: Path) -> None:
    """The other copy lacks one of two objects that are bad here."""
    copy_path = whole.with_name("copy")
    with open_store(copy_path) as copy:
        collect(copy, Retention(latest=6), casckpt_gc.Thinning(["policy"], keep_latest=1))
    pack = packs_by_step(whole)[3]
    file = whole / "packs" / pack[:2] / pack
    file.write_bytes(bytes(file.stat().st_size))
    with open_store(whole) as store, open_store(copy_path, read_only=True) as copy:
        (heal,) = casckpt_gc.repair(store, copy, execute=True).heals
        assert heal.what == "complete" and heal.healed and len(heal.lost) == 2  # a chunk and its manifest
        assert difference({"m": noise(10_003)}, store.restore(3, only=["optimizer"])["optimizer"]) is None
        before = files(whole, "packs", "timeline")
        casckpt_gc.repair(store, copy, execute=True)
        assert files(whole, "packs", "timeline") == before


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
    assert dry.exit_code == 1 and "nothing was changed: pass --execute to heal" in dry.output
    with open_store(whole) as store:
        assert "nothing was changed: pass execute=True to heal" in str(casckpt_gc.repair(store))
    done = CliRunner().invoke(repair, [str(whole), "--from", str(whole.with_name("copy")), "--execute"])
    assert done.exit_code == 0 and "done" in done.output
    check_steps(whole, trees(STEPS))
    for options in ([], ["--execute"]):
        again = CliRunner().invoke(repair, [str(whole), *options])
        assert again.exit_code == 0 and "all is well" in again.output


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
