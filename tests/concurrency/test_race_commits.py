"""(g, S34, S35) Real processes race commits on one store: in runs of their own, and on the same branch."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import casckpt
from casckpt.errors import AlreadyExistsError, ConflictError
from casckpt.format.entry import Commit, decode_entry
from casckpt.testing.invariants import index_counts
from casckpt.testing.trees import difference
from tests.concurrency.racers import racing

COMMITS = 12

OWN_RUN = f"""
with casckpt.open(path, run=f"seed-{{me}}") as store:
    gate()
    for step in range(1, {COMMITS + 1}):
        state = {{"policy": {{"weight": np.full(40_000, 100 * me + step // 4, np.float32) + np.arange(40_000)}},
                 "counters": {{"step": step, "me": me}}}}
        store.commit(step, state)
"""

SAME_BRANCH = f"""
store = casckpt.open(path)
gate()
while True:
    state = store.resume("latest")
    step = state["counters"]["step"] + 1
    if step > {COMMITS}:
        break
    try:
        store.commit(step, {{"counters": {{"step": step, "pid": os.getpid()}}}})
        say(won=step)
    except ConflictError as error:
        say(lost=step, host=error.host, pid=error.pid, step=error.step)
store.close()
"""

ONE_COMMIT = """
store = casckpt.open(path)
gate()
try:
    store.commit(1, {"counters": {"step": 1, "pid": os.getpid()}})
    say(won=1)
except ConflictError as error:
    say(lost=1, host=error.host, pid=error.pid, step=error.step, text=str(error))
store.close()
"""


def _entries(path: Path) -> list[Commit]:
    """The commits in order, after checking that numbers are contiguous and linked."""
    files = sorted(path.glob("timeline/*/*"), key=lambda file: file.name)
    assert [int(file.name) for file in files] == list(range(len(files)))
    entries = [decode_entry(file.read_bytes(), seq, file.name) for seq, file in enumerate(files)]
    for before, after in itertools.pairwise(entries):
        assert after.envelope.previous == before.digest, f"entry {after.seq} does not follow {before.seq}"
    return [entry.envelope.body for entry in entries if isinstance(entry.envelope.body, Commit)]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.full)])
def test_processes_in_their_own_runs_all_succeed_and_lose_nothing(store_path: Path, count: int) -> None:
    casckpt.open(str(store_path), create=True).close()
    with racing([OWN_RUN] * count, str(store_path)) as racers:
        for racer in racers:
            racer.release()
        for racer in racers:
            racer.finish()
    assert len(_entries(store_path)) == count * COMMITS
    for me in range(count):
        with casckpt.open(str(store_path), run=f"seed-{me}") as store:
            assert store.steps() == list(range(1, COMMITS + 1))
            for step in store.steps():
                expected = {
                    "counters": {"step": step, "me": me},
                    "policy": {"weight": np.full(40_000, 100 * me + step // 4, np.float32) + np.arange(40_000)},
                }
                problem = difference(expected, store.restore(step))
                assert problem is None, problem
            counts = index_counts(store)
            assert store.verify(read_data=True).ok
    shutil.rmtree(store_path / "index")
    with casckpt.open(str(store_path)) as store:
        assert index_counts(store) == counts, "the index that two processes wrote is the one that a rebuild makes"


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.full)])
def test_processes_on_one_branch_win_each_step_exactly_once(store_path: Path, count: int) -> None:
    with casckpt.open(str(store_path), create=True) as store:
        store.commit(0, {"counters": {"step": 0, "pid": os.getpid()}})
    with racing([SAME_BRANCH] * count, str(store_path)) as racers:
        for racer in racers:
            racer.release()
        said = {racer.pid: racer.finish() for racer in racers}
    winners = {line["won"]: pid for pid, lines in said.items() for line in lines if "won" in line}
    assert sum("won" in line for lines in said.values() for line in lines) == len(winners) == COMMITS
    commits = _entries(store_path)
    assert [commit.step for commit in commits] == list(range(COMMITS + 1))
    for before, after in itertools.pairwise(commits):
        assert after.expected_head == before.snapshot and after.branch == before.branch
    with casckpt.open(str(store_path)) as store:
        assert {step: store.restore(step)["counters"]["pid"] for step in store.steps() if step} == winners
    for pid, lines in said.items():
        for line in lines:
            if "lost" in line:
                assert line["host"] == socket.gethostname()
                assert line["pid"] in said.keys() - {pid} and winners[line["step"]] == line["pid"]


def test_second_learner_on_a_branch_is_told_who_the_first_is(store_path: Path) -> None:
    casckpt.open(str(store_path), create=True).close()
    with racing([ONE_COMMIT] * 2, str(store_path)) as (first, second):
        first.release()
        assert first.hear() == {"won": 1}
        second.release()
        heard = second.hear()
    assert (heard["lost"], heard["host"], heard["pid"], heard["step"]) == (1, socket.gethostname(), first.pid, 1)
    for fact in (socket.gethostname(), str(first.pid), "step 1"):
        assert fact in heard["text"]


def test_commit_published_between_looking_at_the_head_and_taking_a_number_is_a_conflict(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is shared: it may know the other commit when the number is chosen, but not when the head was."""
    with casckpt.open(str(store_path), create=True) as one, casckpt.open(str(store_path)) as two:
        one.commit(1, {"counters": 1})
        two.resume("latest")
        append = one._committer.append

        def late(*arguments: Any) -> Any:
            monkeypatch.undo()
            two.commit(2, {"counters": "two"})
            return append(*arguments)

        monkeypatch.setattr(one._committer, "append", late)
        with pytest.raises(ConflictError):
            one.commit(2, {"counters": "one"})
        assert one.steps() == [1, 2]
        assert one.restore(2) == {"counters": "two"}
    assert [commit.step for commit in _entries(store_path)] == [1, 2]


def test_tag_published_between_checking_the_name_and_taking_a_number_is_refused(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with casckpt.open(str(store_path), create=True) as one, casckpt.open(str(store_path)) as two:
        one.commit(1, {"counters": 1})
        one.commit(2, {"counters": 2})
        append = one._committer.append

        def late(*arguments: Any) -> Any:
            monkeypatch.undo()
            two.tag("good", 2)
            return append(*arguments)

        monkeypatch.setattr(one._committer, "append", late)
        with pytest.raises(AlreadyExistsError):
            one.tag("good", 1)
        assert one.snapshot("good").step == two.snapshot("good").step == 2


def test_head_moved_while_latest_is_being_resumed_is_a_conflict_and_not_a_branch(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with casckpt.open(str(store_path), create=True) as one, casckpt.open(str(store_path)) as two:
        one.commit(1, {"counters": 1})
        two.resume("latest")
        values = one._restorer.values

        def slow(*arguments: Any, **options: Any) -> Any:
            two.commit(2, {"counters": "two"})
            return values(*arguments, **options)

        monkeypatch.setattr(one._restorer, "values", slow)
        assert one.resume("latest") == {"counters": 1}
        with pytest.raises(ConflictError):
            one.commit(2, {"counters": "one"})
        assert [branch.name for branch in one.branches()] == ["main"]


def test_handle_before_a_fork_does_not_list_the_branch_that_took_its_name(store_path: Path) -> None:
    with casckpt.open(str(store_path), create=True) as one, casckpt.open(str(store_path)) as two:
        for step in (1, 2):
            one.commit(step, {"counters": step})
        one.resume(1)
        two.resume(1)
        assert two.branch == one.branch
        one.commit(3, {"counters": "one"})
        assert two.steps() == [1]
        assert two.resume("latest") == {"counters": 1}
        two.commit(4, {"counters": "two"})
        assert two.branch != one.branch
        assert (one.steps(), two.steps()) == ([1, 3], [1, 4])
