"""The four answers of a store, and the table of decisions, row by row."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import casckpt
from casckpt.recovery import Action, FailureInfo, Policy, RecoveryCoordinator, Rule, decide, make_plan, survey
from casckpt.recovery.decision import DEFAULT_RULES
from tests.unit.cli_stores import call, entry_path, flip
from tests.unit.stores import open_store


def make_run(path: Path, metrics: list[float | None], labels: dict[int, dict[str, str]] | None = None) -> None:
    """Steps 10, 20, … with these values of "return"; each has a pack of its own."""
    with open_store(path) as store:
        for number, value in enumerate(metrics, 1):
            weights = np.random.default_rng(number).standard_normal(40_000)
            known = {} if value is None else {"return": value}
            store.commit(number * 10, {"policy": {"w": weights}}, metrics=known, labels=(labels or {}).get(number * 10))


class FailsOnce:
    """A check that the first snapshot does not pass."""

    def __init__(self) -> None:
        self.answers = [["no"]]

    def __call__(self, targets: Any) -> list[str]:
        return self.answers.pop() if self.answers else []


def lose_packs(path: Path) -> None:
    for pack in (path / "packs").rglob("*"):
        if pack.is_file():
            pack.unlink()


def steps(action: Action) -> list[int]:
    return [snapshot.step for snapshot in action.snapshots]


def test_empty_ambiguous_damaged_and_usable_are_four_answers(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        assert survey(store, Policy()).answer == "empty"
        assert decide(survey(store, Policy()), FailureInfo()).kind == "fresh"
    make_run(tmp_path / "store", [1.0, 2.0])
    with open_store(tmp_path / "store") as store:
        situation = survey(store, Policy())
        assert situation.answer == "usable"
        assert steps(decide(situation, FailureInfo())) == [20, 10]
    with open_store(tmp_path / "store", run="mian") as store:
        situation = survey(store, Policy())
        assert (situation.answer, decide(situation, FailureInfo()).kind) == ("ambiguous", "stop")
        assert "'main'" in situation.reason
    lose_packs(tmp_path / "store")
    with open_store(tmp_path / "store") as store:
        situation = survey(store, Policy())
        assert (situation.answer, decide(situation, FailureInfo()).kind) == ("damaged", "stop")
    shutil.rmtree(tmp_path / "store" / "index")
    with open_store(tmp_path / "store", run="mian") as store:  # what is lost may have been this run's
        situation = survey(store, Policy())
        assert (situation.answer, decide(situation, FailureInfo()).kind) == ("damaged", "stop")


def test_fresh_start_on_a_store_that_is_not_empty_needs_the_flag(tmp_path: Path) -> None:
    make_run(tmp_path / "store", [1.0])
    with open_store(tmp_path / "store", run="new") as store:
        situation = survey(store, Policy())
        assert decide(situation, FailureInfo()).kind == "stop"
        assert decide(situation, FailureInfo(), allow_fresh=True).kind == "fresh"
        careless = Policy(rules=(Rule("fresh", "always", ("empty", "ambiguous", "damaged", "usable")),))
        assert decide(situation, FailureInfo(), careless).kind == "stop"
        assert decide(situation, FailureInfo(), careless, allow_fresh=True).kind == "fresh"
    with open_store(tmp_path / "store") as store:
        assert decide(survey(store, Policy()), FailureInfo(), careless).kind == "stop"
        assert decide(survey(store, Policy()), FailureInfo(), allow_fresh=True).kind == "resume"


def lost(count: int) -> tuple[Rule, ...]:
    return (Rule("best", "lost much", lost_steps_min=count), *DEFAULT_RULES)


RETURNS = [1.0, 5.0, 3.0, 4.0]  # of steps 10 to 40


@pytest.mark.parametrize(
    ("failure", "policy", "expected"),
    [
        ("unknown", Policy(), [40, 30, 20, 10]),
        ("oom-kill", Policy(metric="return"), [40, 30, 20, 10]),
        ("nan", Policy(), [40, 30, 20, 10]),
        ("nan", Policy(metric="return"), [20, 40, 30, 10]),
        ("nan", Policy(metric="return", largest=False), [10, 30, 40, 20]),
        ("nan", Policy(metric="absent"), [40, 30, 20, 10]),
        ("hang", Policy(metric="return", drop_max=0.1), [20]),
        ("hang", Policy(metric="return", drop_max=0.3), [40, 30, 20, 10]),
        ("unknown", Policy(floor_step=30), [40, 30]),
        ("unknown", Policy(floor_step=50), []),
        ("eviction", Policy(rules=(Rule("best", "always"),), metric="return"), [20, 40, 30, 10]),
        ("eviction", Policy(rules=()), []),
        ("eviction", Policy(rules=lost(60), metric="return"), [20, 40, 30, 10]),
        ("eviction", Policy(rules=lost(61), metric="return"), [40, 30, 20, 10]),
    ],
)  # fmt: skip
def test_table_decides_row_by_row(tmp_path: Path, failure: str, policy: Policy, expected: list[int]) -> None:
    make_run(tmp_path / "store", list(RETURNS))
    with open_store(tmp_path / "store") as store:
        action = decide(survey(store, policy), FailureInfo(failure, 100), policy)
    assert steps(action) == expected
    assert action.kind == ("resume" if expected else "stop")
    assert action.reasons


def test_labelled_and_nonfinite_snapshots_count_as_diverged(tmp_path: Path) -> None:
    make_run(tmp_path / "store", [1.0, 5.0, float("nan"), None], {40: {"diverged": "true"}})
    policy = Policy(metric="return")
    with open_store(tmp_path / "store") as store:
        situation = survey(store, policy)
        action = decide(situation, FailureInfo(), policy)
    assert steps(action) == [20, 10]
    told = "; ".join(action.reasons)
    assert "step 40: labelled diverged=true" in told
    assert "step 30: return is nan" in told
    assert "the newest snapshot has diverged" in told


def test_one_that_is_labelled_as_diverged_is_not_fallen_back_to(tmp_path: Path) -> None:
    make_run(tmp_path / "store", [1.0, 2.0, 3.0, 4.0, 5.0], {40: {"diverged": "true"}})
    policy = Policy(metric="return")
    with open_store(tmp_path / "store") as store:
        action = decide(survey(store, policy), FailureInfo(), policy)
        taken = RecoveryCoordinator(store, policy=policy, checks=[FailsOnce()]).recover(
            {"policy": {"w": np.zeros(40_000)}}
        )
    assert steps(action) == [50, 30, 20, 10]
    assert taken.step == 30


def test_rule_that_asks_for_the_newest_whatever_it_is_gets_it(tmp_path: Path) -> None:
    make_run(tmp_path / "store", [1.0, 2.0, 3.0], {30: {"diverged": "true"}, 20: {"diverged": "true"}})
    policy = Policy(rules=(Rule("newest", "always"),))
    with open_store(tmp_path / "store") as store:
        assert steps(decide(survey(store, policy), FailureInfo(), policy)) == [30, 20, 10]


def test_mixed_and_damaged_snapshots_are_passed_over_with_the_reason(tmp_path: Path) -> None:
    make_run(tmp_path / "store", [1.0, 2.0])
    newest = max(
        (p for p in (tmp_path / "store" / "packs").rglob("*") if p.is_file()), key=lambda p: p.stat().st_mtime_ns
    )
    with open_store(tmp_path / "store") as store:
        store.commit(30, {"counters": [1], "policy": {"w": np.zeros(3)}})
        store.commit(40, {"counters": [2]}, inherit=["policy"])
        store.retire(30)
    newest.unlink()
    with open_store(tmp_path / "store") as store:
        situation = survey(store, Policy())
    assert [each.step for each in situation.candidates] == [10]
    assert [text.split(" (")[0] + text.partition(")")[2][:14] for text in situation.passed_over] == [
        "step 40 is mixed",
        "step 20 is not whole:",
    ]


def test_unknown_kind_of_failure_is_refused() -> None:
    with pytest.raises(casckpt.InvalidInputError, match="expected one of"):
        FailureInfo("bad luck")


def test_plan_on_the_command_line_says_what_and_exits_by_it(tmp_path: Path) -> None:
    make_run(tmp_path / "store", list(RETURNS))
    called = call("plan", tmp_path / "store", "--logged-step", 47)
    assert (called.code, called.err) == (0, "")
    assert "resume from main/main@40" in called.out
    assert "7 ahead of the snapshot" in called.out
    called = call("plan", tmp_path / "store", "--failure", "nan", "--metric", "return", "--json")
    assert called.json["plan"]["action"]["snapshots"][0]["step"] == 20
    assert call("plan", tmp_path / "store", "--failure", "bad-luck").code == 2
    called = call("plan", tmp_path / "store", "--run", "other")
    assert called.code == 1
    assert "a person must decide" in called.out
    assert call("plan", tmp_path / "store", "--run", "other", "--allow-fresh").code == 0


def test_planning_changes_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "store", [1.0])
    before = {
        path: path.read_bytes()
        for path in (tmp_path / "store").rglob("*")
        if path.is_file() and "index" not in path.parts
    }
    live = {"policy": {"w": np.zeros(40_000)}}
    with open_store(tmp_path / "store", read_only=True) as store:
        assert make_plan(store, live).is_possible
    after = {
        path: path.read_bytes()
        for path in (tmp_path / "store").rglob("*")
        if path.is_file() and "index" not in path.parts
    }
    assert before == after
    assert not live["policy"]["w"].any()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"choose": "newst"}, "expected one of fresh, newest, best, stop"),
        ({"choose": "best", "answers": ("useable",)}, "expected one of empty, ambiguous, damaged, usable"),
        ({"choose": "best", "failures": ("nan", "oom")}, "'oom': expected one of exception, nan, oom-kill"),
        ({"choose": "best", "failures": "nan"}, r"Write \('nan',\)"),
        ({"choose": "stop", "answers": "damaged"}, r"Write \('damaged',\)"),
    ],
)
def test_rule_with_a_word_that_means_nothing_is_refused(facts: dict[str, Any], message: str) -> None:
    """It would never fit, or quietly choose the newest."""
    with pytest.raises(casckpt.InvalidInputError, match=message):
        Rule(why="mistyped", **facts)


@pytest.mark.parametrize(
    "facts", [{"drop_max": 0.1}, {"metric": "r", "drop_max": -0.1}, {"metric": "r", "drop_max": float("nan")}]
)
def test_drop_that_could_never_be_judged_is_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(casckpt.InvalidInputError, match="drop_max"):
        Policy(**facts)


def test_best_that_others_are_held_against_is_none_that_is_labelled_as_diverged(tmp_path: Path) -> None:
    make_run(tmp_path / "store", [1.0, 5.0, 1e9, 4.9], {30: {"diverged": "true"}})
    policy = Policy(metric="return", drop_max=0.1)
    with open_store(tmp_path / "store") as store:
        situation = survey(store, policy)
    assert steps(decide(situation, FailureInfo(), policy)) == [40, 20, 10]
    assert {each.step for each in situation.candidates if each.id in situation.diverged} == {10, 30}


@pytest.mark.full
def test_plan_names_the_next_snapshot_where_reading_the_newest_shows_damage(tmp_path: Path) -> None:
    """A bit is flipped all over the newest; sizes are right, so nothing shows before something of it is read."""
    with open_store(tmp_path / "store") as store:
        store.commit(10, {"policy": {"w": np.zeros(3)}})
        seq = store.commit(20, {"policy": {"w": np.zeros(3), "more": [np.ones(2), "x"]}}, config={"lr": 1}).seq
    size = entry_path(tmp_path / "store", seq).stat().st_size
    chosen = []
    for offset in range(0, size, 7):
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        flip(entry_path(tmp_path / "copy", seq), offset)
        live = {"policy": {"w": np.ones(3)}}
        with open_store(tmp_path / "copy", read_only=True) as store:
            plan = make_plan(store, live, config={"lr": 1})
        assert plan.snapshot is not None
        chosen.append(plan.snapshot.step)
        assert plan.is_possible is (chosen[-1] == 10)  # the newest has more than the live object takes
        shutil.rmtree(tmp_path / "copy")
    assert chosen.count(10) > 0
