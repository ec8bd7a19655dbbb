"""What is held for old differences stays bounded, and cold chunks get smaller: objects encoded anew (G14, G20, I8).

The weights here move a little in every place at every step, as those of a network do: a difference takes a third of
what a chunk takes by itself, so the bases of a few retired steps are soon more than what is left.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import casckpt_gc
import numpy as np
import pytest
from casckpt_gc import Compaction, Retention
from casckpt_gc.mark import Mark, census, roots
from casckpt_gc.recode import Encoder

from casckpt.errors import CorruptionError, InvalidInputError
from casckpt.index.tables import decode_object
from casckpt.storage.process import System
from tests.gc.collecting import check_steps, collect, files, noise, size
from tests.gc.faults import SHARED, sweep
from tests.unit.stores import open_store

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # a stale index is reported so
SIZE = 100_000  # float32: a difference of these is too large to lie in an entry
NEVER = Compaction(held_share_max=float("inf"))


def moving(count: int) -> dict[int, dict[str, Any]]:
    """Weights at each step: all of them moved a little with each."""
    weights = noise(5, SIZE).astype(np.float64)
    states = {}
    for step in range(1, count + 1):
        states[step] = {"policy": {"w": weights.astype(np.float32)}}
        weights = weights + 1e-6 * noise(100 + step, SIZE)
    return states


STATES = moving(12)


def commit_chain(path: Path, count: int, *, level: str = "small", states: dict[int, Any] = STATES) -> None:
    with open_store(path, level=level) as store:
        for step in range(1, count + 1):
            store.commit(step, states[step])


def needed(path: Path) -> tuple[int, int]:
    """Bytes of records that are live, and of those that are held."""
    with open_store(path, create=False) as store:
        mark = Mark(store)
        mark.add(roots(store))
        found = census(store, mark)
        return found.live_bytes, found.held_bytes


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chain") / "store"
    commit_chain(path, 8)
    return path


@pytest.fixture
def copied(chain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(chain, tmp_path / "store", ignore=shutil.ignore_patterns("index")))


def test_what_is_held_is_given_back_where_it_is_more_than_what_is_live(copied: Path) -> None:
    """G14: dependants are encoded anew before the base goes; the plan says so, and what it frees is what goes."""
    with open_store(copied) as store:
        before = size(copied, "packs")
        plan = casckpt_gc.plan(store, Retention(latest=1))
        assert plan.recoded_count == 1 and plan.recoded_bytes == 4 * SIZE and plan.held_bytes == 0
        assert "encode anew" in str(plan) and not plan.is_empty
        report = plan.execute(grace_s=0.0)
        assert (report.recoded_count, report.freed_bytes) == (1, plan.freed_bytes)
        assert 0 < report.recoded_bytes <= plan.recoded_bytes
        assert size(copied, "packs") < before / 2
    live, held = needed(copied)
    assert held == 0 < live
    check_steps(copied, {8: STATES[8]})


def test_packs_of_nothing_else_go_as_a_whole(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("casckpt.objects.writer.PACK_TARGET_SIZE", 1)  # a pack for every record
    commit_chain(store_path, 8)
    with open_store(store_path) as store:
        plan = casckpt_gc.plan(store, Retention(latest=1), compaction=Compaction(0.0, 1.0, tiny_count_min=1000))
        assert plan.recoded_count == 1 and plan.rewritten_bytes == 0
        assert plan.execute(grace_s=0.0).recoded_count == 1
    assert needed(store_path)[1] == 0
    check_steps(store_path, {8: STATES[8]})


def test_without_a_bound_it_stays_held(copied: Path) -> None:
    with open_store(copied) as store:
        report = collect(store, Retention(latest=1), compaction=NEVER)
        assert report.recoded_count == 0
    live, held = needed(copied)
    assert held > 2 * live
    check_steps(copied, {8: STATES[8]})


def test_a_new_record_names_the_nearest_snapshot_that_stays(store_path: Path) -> None:
    """Steps 1, 4, 8 and 10 stay: 4 and so on become differences to 1 and so on, and all of a chain is less deep."""
    commit_chain(store_path, 10)
    with open_store(store_path) as store:
        eager = Compaction(held_share_max=0.0, held_gain_min=0.1)
        report = collect(store, Retention(latest=1, every_steps=4), compaction=eager)
        assert report.recoded_count == 3
        with store._keeper.kv.read() as txn:
            rows = {key: decode_object(row)[1] for key, row in txn.scan("objects")}
        based = {key: places for key, places in rows.items() if places and places[0].bases}
        assert based
        for places in based.values():
            for place in places:
                assert all(each.depth < place.depth for base in place.bases for each in rows[base])
    kept = [1, 4, 8, 10]  # the first of each span of four
    check_steps(store_path, {step: STATES[step] for step in kept})
    assert needed(store_path)[1] == 0


def test_what_would_not_pay_is_left_alone(store_path: Path) -> None:
    """G20: where differences take next to nothing, a base weighs as much as what would be written instead."""
    states = {1: {"policy": {"w": noise(5, SIZE)}}}
    for step in range(2, 9):
        weights = states[step - 1]["policy"]["w"].copy()
        weights[step * 7 % 50 :: 300] += 1
        states[step] = {"policy": {"w": weights}}
    commit_chain(store_path, 8, states=states)
    with open_store(store_path) as store:
        report = collect(store, Retention(latest=1))
        assert report.recoded_count == report.recoded_bytes == 0
    live, held = needed(store_path)
    assert live < held < 8 * SIZE  # the base, and differences of a few bytes
    check_steps(store_path, {8: states[8]})


def test_commits_go_on_from_what_was_encoded_anew(copied: Path) -> None:
    with open_store(copied, level="small") as store:
        assert collect(store, Retention(latest=1)).recoded_count == 1
        for step in (9, 10, 11):
            snapshot = store.commit(step, STATES[step])
            assert snapshot.stored_bytes < 0.6 * snapshot.new_bytes  # differences still
        collect(store, Retention(latest=2))
    check_steps(copied, {step: STATES[step] for step in (10, 11)})


def test_held_stays_within_live_over_many_collections_and_little_is_written_for_it(store_path: Path) -> None:
    """G20: what is written anew frees half as much again, so in all it is at most twice what was committed."""
    written = recoded = 0
    with open_store(store_path, level="small") as store:
        for step in range(1, 13):
            written += store.commit(step, STATES[step]).stored_bytes
            if step % 3 == 0:
                recoded += collect(store, Retention(latest=2)).recoded_bytes
                live, held = needed(store_path)
                assert held <= max(live, 1.5 * 4 * SIZE), step  # or what the dependant would take by itself
    assert 0 < recoded <= 2 * written
    check_steps(store_path, {step: STATES[step] for step in (11, 12)})


@pytest.mark.parametrize("budget_bytes", [4 * SIZE - 1, 1])
def test_nothing_is_encoded_beyond_the_budget(copied: Path, budget_bytes: int) -> None:
    with open_store(copied) as store:
        plan = casckpt_gc.plan(store, Retention(latest=1), compaction=Compaction(budget_bytes=budget_bytes))
        assert plan.postponed_object_count and "to encode anew" in str(plan)
        report = collect(store, Retention(latest=1), compaction=Compaction(budget_bytes=budget_bytes))
        assert (report.recoded_count, report.rewritten_bytes) == (0, 0)
    check_steps(copied, {8: STATES[8]})


def test_cold_snapshots_become_smaller_when_asked(store_path: Path) -> None:
    commit_chain(store_path, 6, level="fast")
    before = {name: (store_path / name).stat().st_size for name in files(store_path, "packs")}
    with open_store(store_path, level="fast") as store:
        assert collect(store).recoded_count == 0
        plan = casckpt_gc.plan(store, compaction=Compaction(cold_after=2))
        report = plan.execute(grace_s=0.0)
        gone = before.keys() - set(files(store_path, "packs"))
        assert report.recoded_count == plan.recoded_count == len(gone) == 4
        assert report.freed_bytes == plan.freed_bytes == sum(before[name] for name in gone)
        assert size(store_path, "packs") < 0.75 * sum(before.values())
        again = casckpt_gc.plan(store, compaction=Compaction(cold_after=2))
        assert again.recoded_count == 0
    check_steps(store_path, {step: STATES[step] for step in range(1, 7)})
    with pytest.raises(InvalidInputError, match="cold_after"):
        Compaction(cold_after=0)
    for name in vars(Compaction()).keys() - {"cold_after", "is_thorough"}:
        for value in (-1, float("nan"), "1", True, None):
            with pytest.raises(InvalidInputError, match=f"{name}={value!r}"):
                Compaction(**{name: value})  # type: ignore[arg-type]


def test_told_to_stop_it_leaves_everything_as_it_was(copied: Path) -> None:
    asked = []

    def is_stopped() -> bool:
        asked.append(1)
        return len(asked) > 1

    with open_store(copied) as store:
        plan = casckpt_gc.plan(store, Retention(latest=1))
        report = casckpt_gc.Collection(plan, grace_s=0.0, is_stopped=is_stopped).run()
        assert report.recoded_count == 0 and report.is_compaction_skipped
        assert files(copied, "tmp") == []
        assert collect(store, Retention(latest=1)).recoded_count == 0  # nothing was let go since
        assert collect(store, compaction=Compaction(is_thorough=True)).recoded_count == 1
    check_steps(copied, {8: STATES[8]})


def test_a_commit_that_relies_on_what_goes_keeps_it(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 9 is published between the mark and the condemnation, as a difference to step 8 as it was."""
    with open_store(copied, level="small") as learner, open_store(copied, run="collector") as store:
        store.run = "main"
        plan = casckpt_gc.plan(store, Retention(latest=1))
        collection = casckpt_gc.Collection(plan, grace_s=0.0)
        real = collection._verdict
        published: list[Any] = []

        def verdict(*args: Any) -> Any:
            if not published:
                published.append(learner.commit(9, STATES[9]))
                store._keeper.catch_up()
            return real(*args)

        monkeypatch.setattr(collection, "_verdict", verdict)
        collection.run()
        assert published[0].stored_bytes < 0.6 * published[0].new_bytes
    check_steps(copied, {8: STATES[8], 9: STATES[9]})


def test_no_new_record_is_published_that_would_hold_what_goes(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8: the plan is proven with the records as they are, whatever made them."""
    real = Encoder._note

    def wrong(self: Encoder, object_id: Any, plain_size: int, form: Any, bases: Any) -> Any:
        (places,) = self._store._keeper.reader.locate([object_id])
        return real(self, object_id, plain_size, form, places[0].bases)

    monkeypatch.setattr(Encoder, "_note", wrong)
    before = files(copied, "packs")
    with open_store(copied) as store, pytest.raises(CorruptionError, match="may not name"):
        collect(store, Retention(latest=1))
    monkeypatch.undo()
    assert set(before) <= set(files(copied, "packs"))
    check_steps(copied, {8: STATES[8]})


def test_damage_in_what_is_to_be_encoded_leaves_it_as_it_is(copied: Path) -> None:
    """A bad record of step 8 has no say in whether steps 1 to 7 are let go; repair may still find it."""
    with open_store(copied) as store:
        seq = store.snapshot(8).seq
        body: Any = store._timeline.read(seq).envelope.body
        pack = body.packs[0].pack_id.hex()
    file = copied / "packs" / pack[:2] / pack
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with open_store(copied) as store:
        assert collect(store, Retention(latest=1)).recoded_count == 0
    assert file.exists()


def let_go(path: Path, system: System) -> None:
    with open_store(path, create=False, system=system) as store:
        collect(store, Retention(latest=1))


def check_after(path: Path) -> None:
    with open_store(path, create=False) as store:
        collect(store, Retention(latest=1))
        collect(store, Retention(latest=1))
    check_steps(path, {8: STATES[8]})
    assert files(path, "trash", "leases") == []


def test_some_kills_while_something_is_encoded_anew_cost_nothing(chain: Path, tmp_path: Path) -> None:
    assert sweep(chain, tmp_path, let_go, check_after, modes=["killed"], stride=29) > 1


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("modes", SHARED)
def test_no_fault_while_something_is_encoded_anew_costs_anything(
    chain: Path, tmp_path: Path, modes: tuple[str, ...]
) -> None:
    assert sweep(chain, tmp_path, let_go, check_after, modes=modes) > 30
