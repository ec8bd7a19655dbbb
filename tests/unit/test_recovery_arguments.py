"""What is public in `casckpt.recovery`, given something of another kind: refused by name, before anything is done.

Each entry is called with arguments that are right but for one, for each of them in turn.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt import recovery
from casckpt.arguments import FINITE, FLAG, LIST, NUMBER, ORDERED, TEXTS, WHOLE, maybe, within
from casckpt.recovery import FailureInfo, Policy, Situation, Version
from casckpt.recovery.supervisor import Status
from tests.unit import cli_stores
from tests.unit.stores import open_store


class Wrong:
    """What no argument should be."""


# Filled by the library, and only read by others; made of whatever it is given.
RESULTS = {
    *("Action", "Beat", "Bisection", "Divergence", "DrillReport", "Generation", "LineComparison", "LoadReport"),
    *("PlanStep", "Pulse", "RecoveryPlan", "RecoveryReport", "Situation", "Version"),
}
ANY = {"ref", "config", "a", "b", "good", "bad", "sample"}  # whatever a store makes of them; a sample is the user's own
TOKEN = "a-secret-of-the-training"


def probe() -> None:
    return None


def entries(store: casckpt.Store, folder: Path) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Name of each public entry, what is called, and arguments without which it cannot be."""
    made = {
        "BeatFile": recovery.BeatFile(str(folder / "beats"), "learner"),
        "Frontier": recovery.Frontier(),
        "Migrations": recovery.Migrations(),
        "RecoveryCoordinator": recovery.RecoveryCoordinator(store),
        "Reference": recovery.Reference(probe),
        "SampleGate": recovery.SampleGate(Version(1, 1)),
        "SampleHold": recovery.SampleHold(1),
        "Drill": recovery.Drill(["true"], str(folder)),
        "BeatClient": recovery.BeatClient("localhost", 1, name="actor", token=TOKEN),
        "TrialSteps": recovery.TrialSteps(lambda targets: 0.0),
    }
    needed: dict[str, dict[str, Any]] = {
        "BeatClient": {"host": "localhost", "port": 1, "name": "actor", "token": TOKEN},
        "BeatFile": {"folder": str(folder / "beats"), "name": "learner"},
        "BeatFolder": {"folder": str(folder / "beats")},
        "BeatServer": {"version": lambda: Version(1, 1), "token": TOKEN},
        "Drill": {"command": ["true"], "store_path": str(folder)},
        "HealthServer": {"status": Status()},
        "RecoveryCoordinator": {"store": store},
        "RecoveryCoordinator.recover": {"targets": {}},
        "Reference": {"probe": probe},
        "Rule": {"choose": "newest", "why": "a test"},
        "SampleGate": {"version": Version(1, 1)},
        "SampleHold": {"count_max": 1},
        "SampleHold.add": {"sample": 1},
        "Supervisor": {"command": ["true"]},
        "TrialSteps": {"step": lambda targets: 0.0},
        "bisect_check": {"store": store, "check": lambda snapshot: "passes"},
        "command_check": {"command": "true", "store_path": str(folder)},
        "command_probe": {"command": "true"},
        "compare_lines": {"store": store, "a": 1, "b": 1},
        "config_drift": {"store": store, "config": {}},
        "decide": {"situation": Situation("empty", "a test"), "failure": FailureInfo()},
        "load_into": {"store": store, "targets": {}},
        "survey": {"store": store, "policy": Policy()},
        "open_generation": {"store": store, "snapshot": None},
        **{name: {"store": store} for name in ("continuation", "list_generations", "make_plan", "own_generation")},
        **{name: {"targets": {}} for name in ("find_nonfinite", "find_schedule_gaps")},
        "migration": {"from_version": 1},
        "Migrations.chain": {"found": 1, "expected": 1},
    }
    for name in recovery.__all__:
        if name not in RESULTS:
            yield name, getattr(recovery, name), needed.get(name, {})
    for name, owner in made.items():
        for method, call in inspect.getmembers(owner, inspect.ismethod):
            if not method.startswith("_"):
                yield f"{name}.{method}", call, needed.get(f"{name}.{method}", {})


def test_each_argument_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    tried, kept = set(), []
    with open_store(tmp_path / "store") as store:
        store.commit(1, {"w": {"n": 1}})
        for name, call, needed in entries(store, tmp_path):
            for parameter in inspect.signature(call).parameters:
                if parameter in ANY:
                    continue
                tried.add(f"{name}({parameter})")
                try:
                    call(**{**needed, parameter: Wrong()})
                except casckpt.InvalidInputError as error:
                    if parameter not in error.message or "Wrong" not in error.message:
                        kept.append(f"{name}({parameter}): {error.message}")
                except Exception as error:  # noqa: BLE001 - each of them is what must not come
                    kept.append(f"{name}({parameter}): {type(error).__name__}: {error}")
                else:
                    kept.append(f"{name}({parameter}) was taken")
        assert len(store.timeline()) == 1
        assert not recovery.list_generations(store)
    assert kept == []
    assert len(tried) > 150


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda c: c.recover({}, failure="oom-kill"), "failure"),
        (lambda c: c.recover(None), "targets"),
        (lambda c: c.recover([("policy", {})]), "targets"),
        (lambda c: c.decide(FailureInfo), "failure"),
        (lambda c: recovery.SampleGate((1, 2)), "version"),
        (lambda c: recovery.SampleGate(Version(1, 2)).admit((1, 2)), "sample"),
        (lambda c: recovery.SampleGate(Version(1, "2")), "version"),
        (lambda c: recovery.SampleHold(1).learn((1, 2)), "version"),
        (lambda c: recovery.Supervisor("python train.py"), "command"),
        (lambda c: recovery.Drill("python train.py", "store"), "command"),
        (lambda c: recovery.Policy(rules=("newest",)), "rules"),
        (lambda c: recovery.RecoveryCoordinator(c._store, checks=[3]), "checks"),
        (lambda c: recovery.Frontier().take(True), "count"),
        (lambda c: recovery.Rule("newest", "a test", answers=3), "answers"),
    ],
)
def test_mistake_that_is_easily_made_is_refused_by_name(tmp_path: Path, call: Any, argument: str) -> None:
    with (
        open_store(tmp_path / "store") as store,
        pytest.raises(casckpt.InvalidInputError, match=f"{argument}=.*expected"),
    ):
        call(recovery.RecoveryCoordinator(store))


def test_kinds_take_what_python_and_numpy_have_for_them() -> None:
    numpy = pytest.importorskip("numpy")
    assert all(WHOLE.fits(each) for each in (0, -1, numpy.int64(3)))
    assert not any(WHOLE.fits(each) for each in (True, 1.0, "1", None))
    assert all(NUMBER.fits(each) for each in (0, 0.5, numpy.float32(1)))
    assert not any(NUMBER.fits(each) for each in (True, "1", None))
    assert not any(WHOLE.fits(each) for each in (numpy.array([1, 2]), numpy.array(1.0), numpy.bool_(True)))
    assert [within(WHOLE, 1).fits(each) for each in (numpy.int64(1), 0, numpy.array([1, 2]))] == [
        True,
        False,
        False,
    ]
    assert [within(NUMBER, 0).fits(each) for each in (0, math.inf, -0.5, math.nan)] == [True, True, False, False]
    assert not within(FINITE, 0).fits(math.inf)
    assert maybe(within(WHOLE, 1)).fits(None) and not ORDERED.fits(math.nan)
    assert maybe(NUMBER).fits(None) and not maybe(NUMBER).fits("")
    assert TEXTS.fits(("a", "b")) and not TEXTS.fits("ab") and not TEXTS.fits(["a", 1])
    assert LIST.fits(iter(())) and not LIST.fits({}) and not LIST.fits(b"")
    assert FLAG.fits(False) and not FLAG.fits(0)


@pytest.mark.parametrize("value", [-1, -0.5, float("nan")])
@pytest.mark.parametrize("name", sorted({*vars(recovery.Settings())} - {"watch"}))
def test_patience_that_is_none_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(casckpt.InvalidInputError, match=name):
        recovery.Settings(**{name: value})


def test_trial_without_a_step_is_refused() -> None:
    with pytest.raises(casckpt.InvalidInputError, match="count=0: expected an integer from 1 on"):
        recovery.TrialSteps(lambda targets: 0.0, count=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda store: recovery.make_plan(store, world_size=0),
            "world_size=0: expected an integer from 1 on, or None$",
        ),
        (lambda store: recovery.make_plan(store, logged_step=-1), "logged_step=-1: expected an integer from 0 on, or"),
        (lambda store: FailureInfo("nan", -3), "step=-3: expected an integer from 0 on, or None$"),
        (lambda store: FailureInfo("nan", 3.5), "step=3.5: expected an integer from 0 on, or None, got float$"),
        (lambda store: recovery.SampleGate(Version(1, 1), behind_max=-1), "behind_max=-1: expected an integer from 0"),
        (lambda store: recovery.SampleHold(0), "count_max=0: expected an integer from 1 on$"),
        (lambda store: recovery.Frontier().take(-1), "count=-1: expected an integer from 0 on$"),
        (lambda store: recovery.migration(from_version=-1), "from_version=-1: expected an integer from 0 on$"),
        (lambda store: Policy(metric="return", drop_max=float("nan")), "drop_max=nan: expected a number from 0 on"),
        (lambda store: Policy(drop_max=0.5), "drop_max=0.5: expected a metric"),
    ],
)
def test_number_that_cannot_be_is_refused_by_name(tmp_path: Path, call: Any, message: str) -> None:
    with open_store(tmp_path / "store") as store, pytest.raises(casckpt.InvalidInputError, match=message):
        call(store)


@pytest.mark.parametrize("option", [("--world-size", 0), ("--logged-step", -1), ("--failed-step", -3)])
def test_plan_refuses_a_number_that_cannot_be(tmp_path: Path, option: tuple[str, int]) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(1, {"w": {"n": 1}})
    called = cli_stores.call("plan", tmp_path / "store", *option)
    assert (called.code, called.out) == (2, "")
    assert f"={option[1]}: expected an integer from" in called.err
