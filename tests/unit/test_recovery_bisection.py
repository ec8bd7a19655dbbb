"""The first failure of a check, against a scan of every step."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

import casckpt
from casckpt.recovery import Bisection, bisect_check, command_check
from casckpt.recovery.bisection import FAILS, PASSES, UNKNOWN, search
from tests.unit.cli_stores import call, make_store
from tests.unit.stores import open_store


@pytest.mark.parametrize("count", range(8))
def test_search_agrees_with_a_scan_for_every_pattern(count: int) -> None:
    """Every place of the first failure, and every set of elements that cannot be judged."""
    for first in range(count + 1):
        for unknown in itertools.product((False, True), repeat=count):
            calls = []

            def judge(index: int, first: int = first, unknown: tuple[bool, ...] = unknown, calls: list = calls) -> str:
                calls.append(index)
                return UNKNOWN if unknown[index] else PASSES if index < first else FAILS

            good = max((i for i in range(first) if not unknown[i]), default=None)
            bad = min((i for i in range(first, count) if not unknown[i]), default=None)
            assert search(count, judge) == (good, bad)


def test_search_among_a_thousand_asks_a_dozen_times() -> None:
    calls: list[int] = []

    def judge(index: int) -> str:
        calls.append(index)
        return PASSES if index < 613 else FAILS

    assert search(1000, judge) == (612, 613)
    assert len(calls) <= 12


def make_line(path: Path, last: int = 20) -> None:
    with open_store(path, run="walker") as store:
        for step in range(1, last + 1):
            store.commit(step * 10, {"counter": [step], "big": {"n": step}})


def test_check_finds_the_first_failing_step_and_its_predecessor(tmp_path: Path) -> None:
    make_line(tmp_path / "store")
    with open_store(tmp_path / "store", run="walker") as store:
        for failing in (10, 20, 130, 200):
            found = bisect_check(store, lambda each, at=failing: FAILS if each.step >= at else PASSES)
            assert found.first_bad is not None
            assert found.first_bad.step == failing
            assert (found.last_good and found.last_good.step) == (failing - 10 if failing > 10 else None)
        nowhere = bisect_check(store, lambda each: PASSES)
        assert nowhere.first_bad is None
        assert "fails nowhere" in str(nowhere)


def test_mixed_and_damaged_snapshots_are_not_given_to_the_check(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_store(path) as store:
        store.commit(1, {"a": [1], "b": [1]})
        store.commit(2, {"a": [2]}, inherit=["b"])
        store.commit(3, {"a": [3], "b": list(range(100_000))})
        store.commit(4, {"a": [4], "b": [4]})
    for pack in (path / "packs").rglob("*"):
        if pack.is_file():
            pack.unlink()
    seen: list[int] = []

    def check(snapshot: casckpt.Snapshot) -> str:
        seen.append(snapshot.step)
        return FAILS if snapshot.step >= 2 else PASSES

    with open_store(path) as store:
        found = bisect_check(store, check, bad=4)
    assert sorted(seen) == [1, 4]
    assert isinstance(found, Bisection)
    assert (found.between, found.last_good and found.last_good.step, found.first_bad and found.first_bad.step) == (
        (3,),
        1,
        4,
    )


def test_first_step_of_the_search_must_lie_on_the_line(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    with open_store(tmp_path / "store", run="walker") as store, pytest.raises(casckpt.InvalidInputError, match="line"):
        bisect_check(store, lambda each: PASSES, good="side@3", bad="main@4")


@pytest.mark.full
def test_command_is_told_which_snapshot_and_answers_by_its_exit_code(tmp_path: Path) -> None:
    make_line(tmp_path / "store")
    script = tmp_path / "check.py"
    script.write_text(
        "import os, sys, casckpt\n"
        "with casckpt.open(os.environ['CASCKPT_STORE'], read_only=True, run=os.environ['CASCKPT_RUN']) as store:\n"
        "    counter = store.restore(os.environ['CASCKPT_REF'], only=['counter'])['counter'][0]\n"
        "print('looked at', counter)\n"
        "sys.exit(125 if counter == 10 else counter > 13)\n"
    )
    called = call("bisect", tmp_path / "store", "--check", f"{sys.executable} {script}", "--json")
    assert called.code == 1
    found = called.json["check"]
    assert (found["last_good"]["step"], found["first_bad"]["step"], found["between"]) == (130, 140, [])
    verdicts = dict(map(tuple, found["tried"]))
    assert verdicts == {step: "unknown" if step == 100 else "fails" if step > 130 else "passes" for step in verdicts}
    assert len(verdicts) <= 8


@pytest.mark.parametrize(
    ("command", "message"),
    [("", "no command"), ("'unclosed", "closing quotation"), ("no-such-command-at-all", "cannot be started")],
)
def test_command_that_cannot_run_is_no_answer(tmp_path: Path, command: str, message: str) -> None:
    make_line(tmp_path / "store", 2)
    called = call("bisect", tmp_path / "store", "--check", command)
    assert called.code == 2
    assert message.lower() in called.err.lower()


def test_command_killed_by_a_signal_is_no_answer(tmp_path: Path) -> None:
    make_line(tmp_path / "store", 2)
    check = command_check(f"{sys.executable} -c 'import os; os.kill(os.getpid(), 9)'", "store")
    with (
        open_store(tmp_path / "store", run="walker") as store,
        pytest.raises(casckpt.InvalidInputError, match="signal 9"),
    ):
        check(store.snapshot())


def test_code_by_which_a_shell_tells_of_a_signal_is_no_answer_either(tmp_path: Path) -> None:
    """A check that was killed for memory behind a shell says nothing of the step."""
    make_line(tmp_path / "store", 2)
    with open_store(tmp_path / "store", run="walker") as store:
        assert command_check("sh -c 'exit 127'", "store")(store.snapshot()) == "fails"
        for code in (128, 137, 255):
            with pytest.raises(casckpt.InvalidInputError, match=f"exit code {code} at step"):
                command_check(f"sh -c 'exit {code}'", "store")(store.snapshot())


def test_bisect_of_two_lines_names_the_leaf_and_exits_with_one(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    called = call("bisect", tmp_path / "store", "main@4", "side@3", "--run", "walker")
    assert (called.code, called.err) == (0, "")
    assert "nothing to compare" in called.out  # main@3 is retired
    with casckpt.open(tmp_path / "store", run="walker") as store:
        store.resume("side@3", allow_mixed=True)
        store.commit(4, {"counters": {"step": 40}}, inherit=["policy", "frozen"])
    called = call("bisect", tmp_path / "store", "--run", "walker")
    assert called.code == 1
    assert "first divergence 4" in called.out
    assert "counters/step" in called.out
    assert call("bisect", tmp_path / "store", "main@4", "--run", "walker").code == 2
    assert call("bisect", tmp_path / "store", "main@2", "main@4", "--run", "walker").code == 0


def test_bisect_of_a_run_that_left_no_line_says_so(tmp_path: Path) -> None:
    make_line(tmp_path / "store", 2)
    called = call("bisect", tmp_path / "store")
    assert (called.code, called.err) == (0, "")
    assert "left no line" in called.out
