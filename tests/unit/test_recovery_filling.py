"""Recoveries with an engine, with a damaged component that may be taken from elsewhere, and with reads that resume."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.digest import digest
from casckpt.ids import ObjectId, SnapshotId
from casckpt.objects.packs import pack_path
from casckpt.objects.spool import Spool
from casckpt.recovery import FailureInfo, Policy, RecoveryCoordinator, Reference, list_generations, make_plan
from casckpt.recovery.migrations import Migrations
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from casckpt.testing.failing import CountingFileSystem, FailingFileSystem
from tests.unit.cli_stores import flip
from tests.unit.stores import open_store

ROWS = 200_000  # bytes; random ones, which are stored as they are, and too many for a timeline entry
FILLING = Policy(fill_droppable=True)


def parts(rows: int = ROWS) -> dict[str, Any]:
    policy = torch.nn.Linear(40, 40)
    return {
        "policy": policy,
        "optimizer": torch.optim.Adam(policy.parameters()),
        "replay": {"rows": np.zeros(rows, np.uint8)},
        "rng": casckpt.RngState(),
    }


def update(live: Mapping[str, Any]) -> None:
    live["optimizer"].zero_grad()
    live["policy"](torch.randn(8, 40)).pow(2).mean().backward()
    live["optimizer"].step()
    rows = live["replay"]["rows"]
    rows[:] = torch.randint(256, rows.shape, dtype=torch.uint8).numpy()


def train(path: Path, *, last: int = 3, necessity: str = "droppable") -> dict[int, dict[str, Any]]:
    """Commit steps 1 to `last`; what weights and rows were at each."""
    live, seen = parts(), {}
    with open_store(path) as store:
        for step in range(1, last + 1):
            update(live)
            store.commit(step, live, necessity={"replay": necessity})
            seen[step] = {"weight": live["policy"].weight.detach().clone(), "rows": live["replay"]["rows"].copy()}
    return seen


def damage(path: Path, content: bytes) -> None:
    """Flip a bit of these bytes, wherever they are stored."""
    (file, at) = next(
        (each, each.read_bytes().find(content))
        for each in path.rglob("*")
        if each.is_file() and content in each.read_bytes()
    )
    flip(file, at)


def registered(store: casckpt.Store, live: Mapping[str, Any]) -> casckpt.CheckpointEngine:
    engine = casckpt.CheckpointEngine(store, async_mode=False)
    for name, each in live.items():
        engine.register(name, each, casckpt.SaveStrategy(necessity="droppable" if name == "replay" else "exact"))
    return engine


@pytest.mark.parametrize("with_engine", [False, True])
def test_damaged_droppable_component_is_taken_from_the_neighbour_if_that_is_allowed(
    tmp_path: Path, with_engine: bool
) -> None:
    seen = train(tmp_path / "store")
    damage(tmp_path / "store", seen[3]["rows"].tobytes()[64:128])
    for again in (False, True):  # what was found out is on record the second time, and met before anything is read
        with open_store(tmp_path / "store") as store:
            live = parts()
            report = RecoveryCoordinator(store, policy=FILLING).recover(
                registered(store, live) if with_engine else live
            )
            assert report.step == 3
            assert torch.equal(live["policy"].weight, seen[3]["weight"])
            assert np.array_equal(live["replay"]["rows"], seen[2]["rows"])
            assert any("droppable 'replay' was taken from step 2" in why for why in report.reasons), again
    with open_store(tmp_path / "store") as store:
        report = RecoveryCoordinator(store).recover(parts())  # it was not allowed here
        assert report.step == 2
    with open_store(tmp_path / "store") as store:
        live = parts()
        RecoveryCoordinator(store, policy=FILLING).recover(live)
        update(live)
        store.commit(4, live, necessity={"replay": "droppable"})
        assert np.array_equal(store.restore(4)["replay"]["rows"], live["replay"]["rows"])


@pytest.mark.full
def test_plan_takes_what_a_recovery_takes_where_a_droppable_structure_is_damaged(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1).integers(1 << 62, size=15_000)
    names = [f"column {number:x}" for number in numbers]  # more structure than an entry carries

    def with_columns(step: int) -> dict[str, Any]:
        """In an order that changes with the step: another structure, into which the same objects fit."""
        live = parts()
        return {**live, "replay": {**live["replay"], **dict.fromkeys(names[step:] + names[:step], step)}}

    with open_store(tmp_path / "store") as store:
        for step in (1, 2):
            store.commit(step, with_columns(step), necessity={"replay": "droppable"})
        snapshot = store._catalog.load(SnapshotId(bytes.fromhex(store.timeline()[-1].id)))
        structure = store._restorer.load("replay", snapshot.components["replay"]).manifest.structure
        (places,) = store._keeper.reader.locate([ObjectId(structure)])
        (place,) = places
        assert not place.is_inline
        pack = tmp_path / "store" / Path(pack_path("", store._keeper.reader.pack_id(place.pack_no))).relative_to("/")
    flip(pack, place.offset + place.size - 1)
    with open_store(tmp_path / "store") as store:
        assert make_plan(store, with_columns(0)).action.snapshots[0].step == 1
        plan = make_plan(store, with_columns(0), policy=FILLING)
        assert (plan.action.snapshots[0].step, plan.is_possible) == (2, True)
        assert any("droppable 'replay' is damaged" in note for note in plan.notes)
        assert RecoveryCoordinator(store, policy=FILLING).recover(with_columns(0)).step == 2


def test_exact_component_is_never_filled_and_a_droppable_one_only_from_a_whole_snapshot(tmp_path: Path) -> None:
    seen = train(tmp_path / "store", last=2)
    damage(tmp_path / "store", seen[1]["rows"].tobytes()[64:128])
    damage(tmp_path / "store", seen[2]["rows"].tobytes()[64:128])
    with (
        open_store(tmp_path / "store") as store,
        pytest.raises(casckpt.IncompleteError, match="no older snapshot has it"),
    ):
        RecoveryCoordinator(store, policy=FILLING).recover(parts())
    seen = train(tmp_path / "other", last=2, necessity="exact")
    damage(tmp_path / "other", seen[2]["rows"].tobytes()[64:128])
    with open_store(tmp_path / "other") as store:
        assert RecoveryCoordinator(store, policy=FILLING).recover(parts()).step == 1


def test_damaged_reference_output_is_not_compared_and_not_taken_from_elsewhere(tmp_path: Path) -> None:
    def with_reference() -> dict[str, Any]:
        live = parts()
        return {**live, "reference": Reference(lambda: outputs(live))}

    def outputs(live: Mapping[str, Any]) -> Any:
        """Bytes that depend on a weight."""
        seed = abs(hash(live["policy"].weight[0, 0].item()))
        return np.random.default_rng(seed).integers(256, size=ROWS, dtype=np.uint8)

    live = with_reference()
    with open_store(tmp_path / "store") as store:
        for step in (1, 2):
            update(live)
            store.commit(step, live, necessity={"reference": "droppable"})
    damage(tmp_path / "store", outputs(live).tobytes()[64:128])
    with open_store(tmp_path / "store") as store:
        report = RecoveryCoordinator(store, policy=FILLING).recover(with_reference())
        assert report.step == 2
        assert any("reference output 'reference' is damaged and not compared" in why for why in report.reasons)


def test_engine_goes_on_where_the_coordinator_placed_it(tmp_path: Path) -> None:
    live = parts()
    with open_store(tmp_path / "store") as store:
        engine = registered(store, live)
        for step in (1, 2, 3):
            update(live)
            engine.save(step)
        expected = [update(live) or live["policy"].weight.detach().clone() for _ in range(3)]
    with open_store(tmp_path / "store") as store:
        live = parts()
        engine = registered(store, live)
        report = RecoveryCoordinator(store).recover(engine, FailureInfo("oom-kill", 6))
        assert (report.step, engine.global_step, list_generations(store)[-1].number) == (3, 3, 1)
        assert all(torch.equal(update(live) or live["policy"].weight, weight) for weight in expected)
        engine.save(6)
        assert store.steps() == [1, 2, 3, 6]
        with open_store(tmp_path / "store", create=False) as other, pytest.raises(casckpt.InvalidInputError):
            RecoveryCoordinator(other).recover(engine)


@pytest.mark.parametrize("with_engine", [False, True])
def test_fresh_start_that_was_allowed_in_a_damaged_run_begins_a_line_of_its_own(
    tmp_path: Path, with_engine: bool
) -> None:
    train(tmp_path / "store")
    for pack in (tmp_path / "store" / "packs").rglob("*"):
        if pack.is_file():
            pack.unlink()
    with open_store(tmp_path / "store") as store:
        live = parts()
        with pytest.raises(casckpt.NotFoundError, match="allow_fresh=True"):
            RecoveryCoordinator(store).recover(live)
        engine = registered(store, live) if with_engine else None
        report = RecoveryCoordinator(store).recover(engine or live, allow_fresh=True)
        assert report.is_fresh
        update(live)
        if engine is None:
            store.commit(1, live)
        else:
            engine.save(1)
        assert (store.branch, store.steps(), store.snapshot(1).parent) == ("fresh", [1], None)
    with open_store(tmp_path / "store") as store:
        live = parts()
        assert RecoveryCoordinator(store).recover(live).step == 1  # and the next recovery goes on with it


# --- code that has changed since ---


@pytest.mark.parametrize("with_engine", [False, True])
def test_recovery_migrates_what_older_code_committed_and_tells_how_the_config_differs(
    tmp_path: Path, with_engine: bool
) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(7, {"policy": {"w": torch.arange(4.0)}}, config={"lr": 1, "gamma": 0.9}, schema_version=1)
    migrations = Migrations()

    @migrations.migration(from_version=1)
    def rename(state: dict[str, Any]) -> dict[str, Any]:
        return {"actor": {"weight": state["policy"]["w"] * 2}}

    with open_store(tmp_path / "store") as store:
        live = {"actor": {"weight": torch.zeros(4)}}
        config = {"lr": 2, "gamma": 0.9}
        with pytest.raises(casckpt.MismatchError, match="no migration"):
            RecoveryCoordinator(store, schema_version=2).recover(live)
        with pytest.raises(casckpt.MismatchError, match="lr: 1 → 2"):
            RecoveryCoordinator(store, schema_version=2, migrations=migrations, config=config, fatal=["lr"]).recover(
                live
            )
        assert (list_generations(store), live["actor"]["weight"].tolist()) == ([], [0.0] * 4)  # nothing was touched
        assert make_plan(store, live, schema_version=2, migrations=migrations).is_possible

        engine = casckpt.CheckpointEngine(store, async_mode=False)
        engine.register("actor", live["actor"])
        coordinator = RecoveryCoordinator(store, schema_version=2, migrations=migrations, config=config)
        report = coordinator.recover(engine if with_engine else live)
        assert (report.step, live["actor"]["weight"].tolist()) == (7, [0.0, 2.0, 4.0, 6.0])
        assert {"config: lr: 1 → 2", "1 migrations led to schema version 2"} <= set(report.reasons)
        assert not with_engine or engine.global_step == 7
        store.commit(8, live, schema_version=2, drop=["policy"], config={"lr": 1, "gamma": 0.9})
        assert store.snapshot(8).parent == store.snapshot(7).id


# --- reads that resume ---


class Killed(BaseException):
    """The process ends here."""


class KillingReads(CountingFileSystem):
    """Counts what is read of packs, and ends the process at the `at`-th such read."""

    def perform(self, operation: Any, act: Any) -> Any:
        return super().perform(operation, act) if "/packs/" in operation.path else act()

    def strike(self, operation: Any, act: Any) -> Any:
        raise Killed


def recover(path: Path, marker: Path, at: int, rows: int = ROWS) -> tuple[dict[str, Any] | None, int]:
    """A recovery on a disk that kills at the `at`-th read of a pack: what was restored, and how many reads it took."""
    disk = KillingReads(LocalFileSystem(), operations=("read",))
    live = parts(rows)
    store = open_store(path, create=False, system=System(file_system=disk))
    before = disk.count
    disk._at = before + at if at else 0
    try:
        RecoveryCoordinator(store, marker=str(marker), keep_reads=True).recover(live)
    except Killed:
        return None, disk.count - before
    finally:
        store._keeper.close()
    return live, disk.count - before


@pytest.mark.full
def test_large_reads_go_on_where_a_kill_stopped_them_wherever_that_is(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", chunk_size=4096) as store:  # one thread; a dozen chunks
        live = parts(rows=80_000)
        update(live)
        snapshot = store.commit(1, live)
    marker = tmp_path / "recovery"
    _, all_reads = recover(tmp_path / "store", marker, 0, 80_000)
    assert all_reads >= snapshot.logical_bytes // 4096 > 12
    assert [each.name for each in tmp_path.iterdir() if "reads" in each.name] == []  # all went when it was over
    saved = []
    for at in range(1, all_reads + 1):
        nothing, reads = recover(tmp_path / "store", marker, at, 80_000)
        assert (nothing, reads) == (None, at)
        restored, rest = recover(tmp_path / "store", marker, 0, 80_000)
        assert restored is not None
        assert torch.equal(restored["policy"].weight, live["policy"].weight)
        assert np.array_equal(restored["replay"]["rows"], live["replay"]["rows"])
        saved.append(all_reads - rest)
        assert [each.name for each in tmp_path.iterdir() if "reads" in each.name] == []
    assert saved == sorted(saved)
    assert saved[0] == 0
    assert saved[-1] >= snapshot.logical_bytes // 4096 - 1  # all of the state but the chunk at which it was killed


def test_what_a_spool_says_is_hashed_and_a_torn_or_false_one_is_read_again(tmp_path: Path) -> None:
    train(tmp_path / "store", last=1)
    marker = tmp_path / "recovery"
    all_reads = recover(tmp_path / "store", marker, at=0)[1]
    for spoil in (lambda content: content[: len(content) // 2], lambda content: bytes(byte ^ 1 for byte in content)):
        recover(tmp_path / "store", marker, at=all_reads)
        (file,) = tmp_path.glob("recovery.reads-*")
        file.write_bytes(spoil(file.read_bytes()))
        restored, reads = recover(tmp_path / "store", marker, at=0)
        assert restored is not None
        assert reads > 0
        with open_store(tmp_path / "store") as store:
            assert np.array_equal(restored["replay"]["rows"], store.restore(1)["replay"]["rows"])


def test_spool_on_a_full_disk_keeps_what_it_has(tmp_path: Path) -> None:
    chunks = [bytes([number]) * 100 for number in range(3)]
    disk = FailingFileSystem(LocalFileSystem(), fail_at=3, error=errno.ENOSPC, is_forever=True, has_short_writes=True)
    spool = Spool(str(tmp_path / "reads"), system=System(file_system=disk))
    for chunk in chunks:
        spool.add(digest(chunk), memoryview(chunk))
    assert len(spool) == 1
    spool.close()
    again = Spool(str(tmp_path / "reads"))
    out = memoryview(bytearray(100))
    assert [again.get(digest(chunk), out) for chunk in chunks] == [True, False, False]
    again.remove()
    assert list(tmp_path.iterdir()) == []


def test_reads_are_only_kept_beside_a_marker(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store, pytest.raises(casckpt.InvalidInputError, match="marker="):
        RecoveryCoordinator(store, keep_reads=True)


# --- the plan ---


def test_plan_names_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    train(tmp_path / "store", last=1)
    with open_store(tmp_path / "store") as store:
        assert store.context().environment["world_size"] == "8"
        same = make_plan(store, parts())
        assert (same.world_sizes, same.notes) == ((8, 8), ())
        monkeypatch.setenv("WORLD_SIZE", "4")
        other = make_plan(store, parts())
        assert other.world_sizes == (8, 4)
        assert "8 processes saved this, 4 are to go on" in str(other)
        assert make_plan(store, parts(), world_size=8).notes == ()
        monkeypatch.delenv("WORLD_SIZE")
        assert make_plan(store, parts()).world_sizes == (8, None)
        assert other.is_possible


def test_plan_lists_each_step_with_what_it_touches_and_its_bytes(tmp_path: Path) -> None:
    """Parts of several kinds in one component, and kinds that only a name tells; sizes as torch and numpy say them."""
    policy = torch.nn.Linear(40, 40)
    optimizer = torch.optim.Adam(policy.parameters())
    rows = {"replay": {"rows": np.zeros(1000)}, "steps": 7}
    agent = {"policy": policy, "optimizer": optimizer, **rows, "noise": np.random.default_rng(0)}
    with open_store(tmp_path / "store") as store:
        policy(torch.randn(8, 40)).sum().backward()
        optimizer.step()
        for step in (1, 2):
            store.commit(step, {"agent": agent, "env": {"ticks": np.zeros(5)}, "rng": casckpt.RngState()})
        plan = make_plan(store)
    found = {step.kind: (step.touches, step.size_bytes) for step in plan.steps}
    fills = ["metadata", "weights", "optimizers", "buffers", "environments"]
    order = ["enumerate", "compare", "fence", "verify", *fills, "check", "streams", "post-steps", "continue"]
    assert list(found) == order
    assert found["enumerate"][0] == ("step 2", "step 1")
    weights = 4 * (40 * 40 + 40)
    assert found["weights"] == (("agent",), weights)
    assert found["optimizers"] == (("agent",), 2 * weights + 2 * 4)  # two moments, two step counters
    assert found["buffers"] == (("agent",), 8000)
    assert found["environments"] == (("env",), plan.snapshot.components["env"].logical_bytes)
    assert found["streams"][0] == ("agent", "rng")
    assert found["verify"] == (("agent", "env", "rng"), sum(found[kind][1] for kind in (*fills, "streams")))
    assert found["verify"][1] == plan.read_bytes == sum(c.logical_bytes for c in plan.snapshot.components.values())


def test_plan_fits_one_screen_however_much_is_wrong(tmp_path: Path) -> None:
    train(tmp_path / "store", last=1)
    with open_store(tmp_path / "store") as store:
        assert len(str(make_plan(store, parts())).splitlines()) <= 24
        other = {f"other-{number}": {"w": np.zeros(3)} for number in range(50)}
        plan = make_plan(store, other, logged_step=99, config={"lr": 1})
        assert len(plan.differences) == 54
        assert len(str(plan).splitlines()) <= 24
        assert "differs: … and 51 more" in str(plan)
