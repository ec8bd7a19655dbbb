"""The self-test of environments: a fresh process says whether a capture is all there is to know."""

from __future__ import annotations

import pytest

from casckpt.integrations.gymnasium import self_test
from tests.unit.environments import Counting, Fragile, Handles, cart_pole, five_deep


def hopper() -> object:
    return five_deep("Hopper-v5")


def test_environment_that_is_captured_whole_passes_in_a_fresh_process() -> None:
    report = self_test(cart_pole, warm_up=40, steps=200)
    assert (report.is_exact, report.steps, report.first_step, report.missing) == (True, 200, None, [])
    assert str(report) == "exact: 200 steps in a fresh process equal those in this one"


@pytest.mark.full
def test_simulator_below_five_wrappers_passes_in_a_fresh_process() -> None:
    assert self_test(hopper).is_exact


@pytest.mark.full
def test_position_of_an_iterator_fails_at_the_first_step_and_is_named() -> None:
    report = self_test(Counting, warm_up=5, steps=10)
    assert not report.is_exact
    assert report.first_step == 0
    assert "observation" in report.problem
    assert any(text.startswith("env.count: itertools.count") for text in report.missing)


@pytest.mark.full
def test_pointer_and_other_handles_fail_and_are_named() -> None:
    report = self_test(Handles, warm_up=5, steps=10)
    assert not report.is_exact
    assert any(text.startswith("env.pointer: a pointer") for text in report.missing)


@pytest.mark.full
def test_environment_that_cannot_be_made_elsewhere_fails_with_its_reason() -> None:
    Fragile.is_allowed = True
    try:
        report = self_test(Fragile, warm_up=1, steps=3)
    finally:
        Fragile.is_allowed = False
    assert not report.is_exact
    assert "the licence server said no" in report.problem
