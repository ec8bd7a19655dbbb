"""Records bound to steps: evaluations, where a logger stands, and configs item by item."""

from __future__ import annotations

import math
from typing import Any

import pytest

import casckpt
from casckpt.engine.records import EvaluationLog, LoggerIdentity, config_digest


def test_evaluation_that_ended_after_the_save_it_belongs_to_is_dropped_by_a_restore(store_path: Any) -> None:
    log = EvaluationLog()
    with casckpt.open(store_path, create=True) as store:
        log.add(400, {"return": 1.0})
        store.commit(500, {"evaluations": log})
        store.commit(510, {"evaluations": log})
        log.add(500, {"return": 9.0}, known_at=520)
        store.commit(520, {"evaluations": log})
        store.resume_into({"evaluations": log}, 510)
        assert [record.step for record in log.records] == [400]
        store.resume_into({"evaluations": log}, 520)
        assert [(record.step, record.known_at) for record in log.records] == [(400, 400), (500, 520)]


def test_log_that_lives_elsewhere_is_cut_at_the_restored_step() -> None:
    log = EvaluationLog()
    log.add(400, {"return": 1.0})
    log.add(500, {"return": 9.0}, known_at=520)
    log.add(510, {"return": 2.0})
    assert [record.step for record in log.rewind(510)] == [500]
    assert [record.step for record in log.records] == [400, 510]


def test_best_evaluation_is_the_earliest_of_equal_ones_and_never_nan() -> None:
    log = EvaluationLog()
    for step, value in enumerate([1.0, math.nan, 3.0, 3.0, 0.5]):
        log.add(step, {"return": value})
    log.add(9, {"length": 4.0})
    assert log.best("return").step == 2
    assert log.best("return", largest=False).step == 4
    with pytest.raises(casckpt.NotFoundError, match="metrics are length, return"):
        log.best("reward")


def test_growing_log_changes_no_structure_and_comes_back_with_gaps(store_path: Any) -> None:
    log, fresh = EvaluationLog(), EvaluationLog()
    log.add(1, {"return": 1.0})
    log.add(2, {"return": 2.0, "length": 5.0})
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"evaluations": log})
        log.add(3, {"length": 6.0})
        store.commit(2, {"evaluations": log})
        store.restore_into({"evaluations": fresh}, 2)
    assert fresh.records == log.records
    assert fresh.records[2].metrics == {"length": 6.0}


@pytest.mark.parametrize(("step", "known_at"), [(-1, None), (5, 4), (1.5, None), (True, None)])
def test_evaluation_of_an_impossible_step_is_refused(step: Any, known_at: Any) -> None:
    log = EvaluationLog()
    with pytest.raises(casckpt.InvalidInputError, match="0 <= step <= known_at"):
        log.add(step, {}, known_at=known_at)
    assert log.records == []


def test_logger_goes_on_as_the_run_that_was_saved_and_repeats_nothing(store_path: Any) -> None:
    identity, fresh = LoggerIdentity("run-a"), LoggerIdentity("run-b")
    assert [identity.note(step) for step in (0, 10, 10, 20)] == [True, True, False, True]
    with casckpt.open(store_path, create=True) as store:
        store.commit(20, {"logger": identity})
        identity.note(30)
        store.resume_into({"logger": fresh}, 20)
    assert (fresh.run_id, fresh.next_step) == ("run-a", 21)
    assert [fresh.note(step) for step in (20, 21)] == [False, True]
    assert LoggerIdentity("new").next_step == 0
    with pytest.raises(casckpt.InvalidInputError, match="run_id"):
        LoggerIdentity("")


def test_digest_of_a_config_is_that_of_its_content() -> None:
    before = {"lr": 1e-3, "net": {"width": 64, "depth": 2}, "old": 1}
    now = {"net": {"depth": 3, "width": 64}, "lr": 1e-3, "new": [1]}
    assert config_digest(before) == config_digest(dict(reversed(before.items()))) != config_digest(now)
    with pytest.raises(casckpt.InvalidInputError, match="config"):
        config_digest({"f": object()})
