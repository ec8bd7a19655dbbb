"""What a recovery knows of steps that are lost, and what it tells a person to do about it."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import casckpt
from casckpt.errors import cut
from casckpt.recovery import (
    FailureInfo,
    Policy,
    RecoveryCoordinator,
    Rule,
    decide,
    list_generations,
    make_plan,
    survey,
)
from casckpt.store.generations import open_generation
from tests.unit.cli_stores import call, entry_path, flip
from tests.unit.stores import open_store

LAST = 5  # the newest step of `make`


def state(step: int) -> dict[str, Any]:
    """Of one step nothing is in another but the structure, which lies in the first one's entry."""
    return {"policy": {"w": np.random.default_rng(step).standard_normal(8)}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 to 5 with a recovery, metrics, a tag and another run's step between; step 5's entry is the newest."""
    path = tmp_path_factory.mktemp("losses") / "store"
    with open_store(path) as store:
        store.commit(1, state(1))
        store.commit(2, state(2))
        RecoveryCoordinator(store).recover(state(0))
        store.commit(3, state(3))
        store.annotate(3, metrics={"return": 1.0})
        store.commit(4, state(4))
        store.tag("good", 4)
    with open_store(path, run="other") as store:
        store.commit(9, state(9))
    with open_store(path) as store:
        store.commit(LAST, state(LAST))
    return path


def entry_count(path: Path) -> int:
    return sum(entry_path(path, seq).exists() for seq in range(100))


def damaged_copies(whole: Path, copy: Path, seqs: Iterator[int] | range) -> Iterator[tuple[int, str]]:
    """The store with one of its entries damaged or gone, for each of some; without the index, which knew them."""
    for seq in seqs:
        for how in ("flipped", "gone"):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            shutil.rmtree(copy / "index", ignore_errors=True)
            flip(entry_path(copy, seq), 60) if how == "flipped" else entry_path(copy, seq).unlink()
            yield seq, how


@pytest.mark.full
def test_with_any_entry_lost_the_newest_step_is_recovered_or_its_loss_is_told(whole: Path, tmp_path: Path) -> None:
    """In the plan, as text and as JSON, in the report and in the timeline."""
    copy, count, outcomes = tmp_path / "copy", entry_count(whole), Counter[str]()
    assert count == 10
    for seq, how in damaged_copies(whole, copy, range(count)):
        if (seq, how) == (count - 1, "gone"):
            continue  # see the next test
        shown, document = call("plan", copy).out, call("plan", copy, "--json").json["plan"]
        named = f"a newer step may be lost: timeline entry {seq}"
        planned = [[" ".join(shown.split())], document["action"]["reasons"], document["situation"]["passed_over"][:1]]
        with open_store(copy) as store:
            try:
                report = RecoveryCoordinator(store).recover(state(0))
            except casckpt.NotFoundError as error:
                outcomes["refused"] += 1
                tellings = [*planned, error.reasons, [error.message]]
            else:
                outcomes[f"step {report.step}"] += 1
                tellings = [*planned, report.reasons, list_generations(store)[-1].reasons]
                if report.step == LAST:
                    continue
        for texts in tellings:
            assert any(named in text for text in texts), (seq, how, texts)
    assert outcomes == {"refused": 2, "step 4": 1, f"step {LAST}": 16}


def test_newest_entry_of_all_that_went_without_a_trace_is_known_by_index_or_marker(whole: Path, tmp_path: Path) -> None:
    """Nothing in the timeline tells of it then; a copy without index and marker cannot know."""
    path, marker = tmp_path / "store", tmp_path / "marker"
    shutil.copytree(whole, path)
    last = entry_count(path) - 1
    with open_store(path) as store:  # the index is this machine's from here on
        assert survey(store, Policy()).candidates[0].step == LAST
    entry_path(path, last).unlink()
    with pytest.warns(casckpt.StoreWarning, match=f"entry {last} was here before"):
        store = open_store(path)
    with store:
        (told,) = survey(store, Policy()).passed_over
        assert f"timeline entry {last} is missing" in told
    assert call("repair", path, "--from", whole, "--execute").code == 1  # nothing proves which file it was
    with open_store(path) as store:  # and it stays known
        assert str(entry_path(path, last)) in told
        assert survey(store, Policy()).passed_over == (told,)
        assert RecoveryCoordinator(store, marker=marker).recover(state(0)).generation == 2
    entry_path(path, last + 1).unlink()
    shutil.rmtree(path / "index", ignore_errors=True)
    with open_store(path) as store:
        report = RecoveryCoordinator(store, marker=marker).recover(state(0), FailureInfo("hang", 12))
    assert report.step == 4
    assert any("the marker tells of generation 2" in why and "the timeline of 1" in why for why in report.reasons)
    assert any("had come to step 12, 8 beyond the newest" in why for why in report.reasons)


def test_snapshots_that_are_labelled_as_diverged_hide_none_before_them(tmp_path: Path) -> None:
    """However many they are: more than a recovery tries."""
    with open_store(tmp_path / "store") as store:
        store.commit(1, state(1))
        for step in range(2, 22):
            store.commit(step, {"policy": {"w": np.full(8, np.nan)}}, labels={"diverged": "true"})
        assert [each.step for each in RecoveryCoordinator(store).decide().snapshots] == [1]


def test_refusal_where_no_snapshot_passes_names_the_way_to_the_last_good_one(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with open_store(tmp_path / "store") as store:
        for step in range(1, 19):
            store.commit(step, {"policy": {"w": torch.full((4,), float("nan"))}})
        with pytest.raises(
            casckpt.IncompleteError, match="none of 16 snapshots passed: step 18 does not pass"
        ) as caught:
            RecoveryCoordinator(store).recover({"policy": {"w": torch.zeros(4)}})
    told = caught.value.message
    assert told.index("casckpt bisect") < told.index("diverged=true")
    assert "and 11 more reasons" in told and len(told) < 1500


def test_restore_of_the_latest_tells_of_a_lost_entry_too(whole: Path, tmp_path: Path) -> None:
    for seq, _ in damaged_copies(whole, tmp_path / "copy", range(9, 10)):
        with open_store(tmp_path / "copy", read_only=True) as store:
            if not store._catalog.bad_entries():
                continue  # gone without a trace
            with pytest.warns(casckpt.StoreWarning, match=f"may be lost: timeline entry {seq}"):
                assert (store.restore()["policy"]["w"] == state(4)["policy"]["w"]).all()
            break
    else:
        pytest.fail("nothing was damaged")


# --- what a person is told to do ---


def lose_none(path: Path) -> None:
    del path


def flip_all(path: Path) -> None:
    for seq in range(1, entry_count(path)):
        flip(entry_path(path, seq), 60)


@pytest.mark.parametrize(
    ("lose", "run", "answer", "first"),
    [
        (lose_none, "mian", "ambiguous", "casckpt runs"),
        (flip_all, "main", "damaged", "casckpt verify"),
        (flip_all, "mian", "damaged", "casckpt verify"),
    ],
)
def test_refusal_names_what_to_do_first_and_the_fresh_start_last(
    whole: Path, tmp_path: Path, lose: Callable[[Path], None], run: str, answer: str, first: str
) -> None:
    path = tmp_path / "store"
    shutil.copytree(whole, path)
    shutil.rmtree(path / "index", ignore_errors=True)
    lose(path)
    with open_store(path, run=run) as store:
        assert survey(store, Policy()).answer == answer
        with pytest.raises(casckpt.NotFoundError) as caught:
            RecoveryCoordinator(store).recover(state(0))
        plan = make_plan(store)
    for text in (caught.value.message, str(plan), plan.action.advice):
        assert 0 < text.index(first) < text.index("allow_fresh=True")
        assert text.index(str(path), text.index(first)) > 0
    if answer == "damaged":
        assert caught.value.message.index("--from COPY --execute") < caught.value.message.index("allow_fresh")


def test_plan_of_a_wholly_damaged_store_names_no_run_and_says_everything_once(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    shutil.copytree(whole, path)
    shutil.rmtree(path / "index", ignore_errors=True)
    flip_all(path)
    called = call("plan", path)
    assert (called.code, called.err) == (1, "")
    assert "'main'" not in called.out
    lines = [line for line in called.out.splitlines() if line.strip()]
    assert len(set(lines)) == len(lines)
    assert sum("no snapshot can be restored" in line for line in lines) == 1
    assert call("plan", path, "--json").json["run"] is None
    assert "'gone'" not in call("plan", path, "--run", "gone").out


def test_stop_of_a_rule_of_ones_own_says_that_it_was_the_rule(whole: Path) -> None:
    policy = Policy(rules=(Rule("stop", "on fridays nobody deploys"),))
    with open_store(whole, read_only=True) as store:
        action = decide(survey(store, policy), FailureInfo(), policy)
    assert action.kind == "stop"
    assert "nobody deploys" in action.reasons[0]
    assert "rules of the policy" in action.advice


def test_refusal_with_a_thousand_reasons_fits_a_screen(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(1, {"policy": {"w": 1}, "counters": [0]})
        for step in range(2, 40):
            store.commit(step, {"counters": [step]}, inherit=["policy"])
        with pytest.raises(casckpt.NotFoundError, match=r"and \d+ more reasons") as caught:
            RecoveryCoordinator(store, policy=Policy(floor_step=2)).recover(state(0))
    assert len(caught.value.reasons) >= 38
    assert len(caught.value.message) < 2000


# --- texts that are too long ---


@pytest.mark.parametrize(
    ("text", "length", "expected"),
    [
        ("one two three", 13, "one two three"),
        ("one two three", 12, "one two…"),
        ("one two three", 8, "one two…"),
        ("one two three", 7, "one…"),
        ("onetwothree", 5, "onet…"),
        ("one  two", 6, "one…"),
        ("", 1, ""),
    ],
)
def test_text_is_cut_at_a_word(text: str, length: int, expected: str) -> None:
    assert cut(text, length) == expected
    assert len(expected) <= length


def test_reasons_in_the_timeline_end_with_a_word(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        open_generation(store, None, ["word " * 300])
        (generation,) = list_generations(store)
    (reason,) = generation.reasons
    assert 900 < len(reason) <= 1000
    assert set(reason.removesuffix("…").split()) == {"word"}
    assert reason.endswith("word…")
