"""`casckpt gc`, and collections that a training starts by itself."""

from __future__ import annotations

import threading
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import casckpt_gc
import pytest
from casckpt_gc import Maintenance, Retention, Thinning
from casckpt_gc.command import gc
from click.testing import CliRunner

from casckpt.cli._group import casckpt as group
from casckpt.errors import CasckptError, InvalidInputError, StoreWarning
from casckpt.storage.process import System
from tests.gc.collecting import check_steps, commit, files, noise, trees
from tests.unit.cli_stores import call
from tests.unit.stores import UnsyncedFileSystem, open_store


@pytest.fixture(autouse=True)
def command_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its entry point does, whether this checkout is installed with it or not."""
    import casckpt.cli._group as module

    class Here:
        name, value = "gc", "casckpt_gc.command:gc"

        def load(self) -> object:
            return gc

    monkeypatch.setattr(module, "_plugins", lambda: {"gc": Here()})


@pytest.fixture
def long(store_path: Path) -> Path:
    with open_store(store_path) as store:
        for step, value in zip(range(1, 8), (0.0, 9.0, 3.0, 8.0, 1.0, 2.0, 1.0), strict=True):
            store.commit(step, trees([step])[step], metrics={"return": value})
    return store_path


def test_plan_says_and_collect_does_the_same(long: Path) -> None:
    rules = ["--latest", "1", "--best", "return:2", "--every-steps", "5"]
    planned = call("gc", "plan", long, *rules, "--json").json
    assert [fate["step"] for fate in planned["fates"] if fate["reasons"]] == [1, 2, 4, 5, 7]
    assert planned["retired_count"] == 2
    assert len(files(long, "packs")) == 7
    done = call("gc", "collect", long, *rules, "--grace", "0", "--json").json
    assert (done["retired_count"], done["freed_bytes"]) == (2, planned["freed_bytes"])
    check_steps(long, trees([1, 2, 4, 5, 7]))


def test_screens_name_steps_and_bytes(long: Path) -> None:
    shown = call("gc", "plan", long, "--latest", "2").out
    assert "steps 1, 2, 3, 4, 5" in shown and "frees" in shown
    text = call("gc", "collect", long, "--latest", "2", "--thin", "optimizer", "--grace", "0").out
    assert "retired 5 snapshots, thinned 1" in text
    assert call("gc", "compact", long, "--grace", "0").code == 0


def test_without_a_rule_everything_stays(long: Path) -> None:
    assert call("gc", "collect", long, "--grace", "0", "--json").json["retired_count"] == 0
    check_steps(long, trees(range(1, 8)))


@pytest.mark.parametrize(
    "text", ["", ":min", "return:best", "return:min:x", "return:1:min", "return:²", "return:" + "9" * 5000]
)
def test_best_that_means_nothing_is_refused(long: Path, text: str) -> None:
    outcome = call("gc", "plan", long, "--best", text)
    assert outcome.code == 2 and "--best" in outcome.err


def test_metric_that_no_snapshot_has_is_refused_before_anything_goes(long: Path) -> None:
    for command in (["plan"], ["collect", "--grace", "0"]):
        outcome = call("gc", *command, long, "--latest", "1", "--best", "retrun:3", "--best", "return")
        assert outcome.code == 2 and "'retrun'" in outcome.err and "'return'" not in outcome.err
    check_steps(long, trees(range(1, 8)))
    with open_store(long, create=False) as store:
        plan = casckpt_gc.plan(store, Retention(best=casckpt_gc.Pareto({"return": "max", "cost": "min"})))
        assert plan.unknown_metrics == ("cost",) and "no snapshot has a metric 'cost'" in str(plan)
        store.annotate(1, metrics={"cost": 1.0})
        both = Retention() | Retention(best=casckpt_gc.Best("return", at_most={"cost": 2.0}))
        assert casckpt_gc.plan(store, both).unknown_metrics == ()


def test_component_that_no_snapshot_has_or_had_is_named(long: Path) -> None:
    shown = call("gc", "collect", long, "--thin", "optimzer", "--thin", "optimizer", "--grace", "0").out
    assert "no snapshot has a component 'optimzer'" in shown and "'optimizer'" not in shown
    with open_store(long, create=False) as store:
        store.commit(8, {"policy": 1}, drop=("counters", "frozen", "optimizer"))
        casckpt_gc.collect(store, None, Thinning(["optimizer"]), grace_s=0.0)
        plan = casckpt_gc.plan(store, None, Thinning(["optimizer", "critic"]))
        assert all("optimizer" in store.snapshot(step).thinned for step in range(1, 8))
        assert plan.unknown_components == ("critic",) and "'critic': nothing is withdrawn" in str(plan)


def test_what_a_budget_leaves_is_said(store_path: Path) -> None:
    with open_store(store_path) as store:
        kept = {"policy": noise(1, 600_000)}  # 2.4 MB
        store.commit(1, {**kept, "optimizer": noise(2, 1_200_000)})
        store.commit(2, kept, drop=("optimizer",))
        casckpt_gc.collect(store, Retention(latest=1), compaction=None, grace_s=0.0)
    done = call("gc", "compact", store_path, "--budget", "1", "--grace", "0")
    assert "condemned 0 packs" in done.out and "beyond the budget: 1 pack" in done.out and "--budget" in done.out
    told = call("gc", "compact", store_path, "--budget", "1", "--grace", "0", "--json").json
    assert (told["condemned_count"], told["postponed_count"]) == (0, 1)
    assert 1 << 20 < told["postponed_bytes"] < 2_500_000  # of what stays, and no more
    done = call("gc", "compact", store_path, "--budget", "4", "--grace", "0")
    assert "condemned 1 packs" in done.out and "beyond" not in done.out


def test_hours_that_mean_nothing_are_refused(long: Path) -> None:
    for hours in ("0", "-1", "nan", "inf"):
        assert call("gc", "collect", long, "--every-hours", hours, "--grace", "0").code == 2


def test_store_with_several_runs_asks_for_one(long: Path) -> None:
    with open_store(long, run="second") as store:
        commit(store, 1)
    assert "--run" in call("gc", "plan", long, "--latest", "1").err
    assert call("gc", "plan", long, "--latest", "1", "--run", "second").code == 0


def test_every_command_explains_itself() -> None:
    for name in ("plan", "collect", "compact"):
        shown = CliRunner().invoke(group, ["gc", name, "--help"])
        assert shown.exit_code == 0 and "Usage:" in shown.output


def test_document_of_the_commands_is_complete() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    section = text[text.index("## Deleting") :]
    options = {option for command in gc.commands.values() for each in command.params for option in each.opts}
    assert {option for option in options if option.startswith("--") and f"`{option}" not in section} == set()


# --- in a training ---


@pytest.mark.parametrize(
    "options",
    [
        {"retention": {"latest": 3}},
        {"thinning": "optimizer"},
        {"every_commits": 0},
        {"every_commits": float("nan")},
        {"compaction": True},
        {"grace_s": float("nan")},
        {"grace_s": -1.0},
        {"patrol_bytes": -1},
        {"limits": 5},
    ],
    ids=str,
)
def test_maintenance_that_could_not_work_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="expected"):
        Maintenance(**options)


def test_maintenance_collects_after_so_many_commits(store_path: Path) -> None:
    with open_store(store_path) as store, Maintenance(Retention(latest=2), every_commits=3, grace_s=0.0) as maintenance:
        for step in range(1, 8):
            commit(store, step)
            maintenance.after_commit(store)
            maintenance.wait()
        assert maintenance.error is None and maintenance.report is not None
        assert store.steps() == [5, 6, 7]
    check_steps(store_path, trees([5, 6, 7]))


def test_maintenance_patrols_and_watches_the_disk(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(warnings, "warn", lambda message, *_, **__: told.append(str(message)))
    monkeypatch.setattr("casckpt_gc.maintenance.WATCH_STOPPED_S", 0.0)
    limits = casckpt_gc.Limits(1 << 60, 1 << 60, 1e9, 1e9)  # nothing has an exbibyte
    with (
        open_store(store_path) as store,
        Maintenance(every_commits=1, grace_s=0.0, patrol_bytes=1, limits=limits) as maintenance,
    ):
        assert maintenance.may_save()
        commit(store, 1)
        maintenance.after_commit(store)
        maintenance.wait()
        assert maintenance.patrolled is not None and maintenance.patrolled.checked_count == 1
        assert maintenance.health is not None and maintenance.health.state == "stop"
        assert not maintenance.may_save()  # and looks again
        maintenance.wait()
        monkeypatch.setattr("casckpt_gc.maintenance.health", lambda *_: casckpt_gc.Health(1 << 61, 0.0, "good"))
        assert not maintenance.may_save()
        maintenance.wait()
        assert maintenance.may_save()
    assert [message for message in told if "left out" in message] == told and len(told) == 1


def test_the_disk_is_watched_before_anything_is_collected(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first commit on, and again when that is long ago; a look that is not due costs nothing."""
    looks: list[str] = []

    def look(own: Any, limits: Any) -> Any:
        looks.append(own.path)
        return casckpt_gc.Health(0, 0.0, "stop" if len(looks) == 2 else "good")

    monkeypatch.setattr("casckpt_gc.maintenance.health", look)
    monkeypatch.setattr(warnings, "warn", lambda *_, **__: None)
    now_s = [0.0]
    system = System(file_system=UnsyncedFileSystem(), monotonic_s=lambda: now_s[0])
    with (
        open_store(store_path, system=system) as store,
        Maintenance(every_commits=1000, limits=casckpt_gc.Limits()) as maintenance,
    ):
        assert maintenance.may_save()
        for step in (1, 2):
            commit(store, step)
            maintenance.after_commit(store)
            maintenance.wait()
            assert maintenance.may_save() and len(looks) == 1
        now_s[0] += 3600.0
        assert maintenance.may_save()  # by what is known, while it looks
        maintenance.wait()
        now_s[0] += 1.5
        assert not maintenance.may_save()
        maintenance.wait()
        assert maintenance.may_save() and len(looks) == 3
    assert maintenance.report is None


def test_the_disk_is_watched_while_a_collection_waits(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    states = iter(["good", "stop"])

    def look(own: Any, limits: Any) -> Any:
        state = next(states, "stop")
        if state == "stop":
            looked.set()
        return casckpt_gc.Health(0, 0.0, state)

    monkeypatch.setattr("casckpt_gc.maintenance.health", look)
    monkeypatch.setattr("casckpt_gc.maintenance.POLL_S", 0.001)
    monkeypatch.setattr(warnings, "warn", lambda *_, **__: None)
    now_s = [0.0]
    system = System(file_system=UnsyncedFileSystem(), monotonic_s=lambda: now_s[0])
    options: dict[str, Any] = {"every_commits": 2, "grace_s": 3600.0, "limits": casckpt_gc.Limits()}
    with open_store(store_path, system=system) as store, Maintenance(Retention(latest=1), **options) as maintenance:
        commit(store, 1)
        maintenance.after_commit(store)
        maintenance.wait()
        commit(store, 2)
        maintenance.after_commit(store)  # a collection, which waits for readers without a lease
        now_s[0] += 11.0
        assert looked.wait(60)
        assert maintenance.report is None  # it has not ended


def test_look_at_the_disk_that_fails_is_not_repeated_at_once(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    def look(own: Any, limits: Any) -> Any:
        looks.append(own.path)
        raise OSError("no room")

    monkeypatch.setattr("casckpt_gc.maintenance.health", look)
    monkeypatch.setattr(warnings, "warn", lambda *_, **__: None)
    now_s = [0.0]
    system = System(file_system=UnsyncedFileSystem(), monotonic_s=lambda: now_s[0])
    limits = casckpt_gc.Limits()
    with open_store(store_path, system=system) as store, Maintenance(every_commits=1000, limits=limits) as maintenance:
        for step in range(1, 6):
            commit(store, step)
            maintenance.after_commit(store)
            maintenance.wait()
            assert maintenance.may_save()
            maintenance.wait()
        assert len(looks) == 1
        now_s[0] += 11.0
        maintenance.may_save()
        maintenance.wait()
        assert len(looks) == 2


@pytest.mark.parametrize(("what", "last"), [("health", 6), ("plan", 7)])
def test_error_stands_until_what_failed_goes_well(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, last: int
) -> None:
    """A look at the disk after each commit, a collection after two: neither speaks for the other."""
    monkeypatch.setattr(warnings, "warn", lambda *_, **__: None)
    monkeypatch.setattr("casckpt_gc.maintenance.WATCH_S", 0.0)
    failing = {"health": False, "plan": False}
    module = import_module("casckpt_gc.maintenance")

    def failing_when_told(name: str, act: Any) -> Any:
        def try_it(*given: Any, **options: Any) -> Any:
            if failing[name]:
                raise OSError(f"no {name}")
            return act(*given, **options)

        return try_it

    for name in failing:
        monkeypatch.setattr(module, name, failing_when_told(name, getattr(module, name)))
    limits = casckpt_gc.Limits()
    with open_store(store_path) as store, Maintenance(every_commits=2, grace_s=0.0, limits=limits) as maintenance:
        seen = []
        for step in range(1, 13):
            failing[what] = 4 <= step <= 6
            commit(store, step)
            maintenance.after_commit(store)
            maintenance.wait()
            seen.append(None if maintenance.error is None else str(maintenance.error))
    told = [f"no {what}" if 4 <= step <= last else None for step in range(1, 13)]
    assert seen == told


def test_failed_collection_does_not_stop_the_training_and_is_told_once(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise InvalidInputError("no")

    monkeypatch.setattr("casckpt_gc.maintenance.plan", refuse)
    told = []
    monkeypatch.setattr(warnings, "warn", lambda message, kind=None, **_: told.append((str(message), kind)))
    with open_store(store_path) as store, Maintenance(every_commits=1) as maintenance:
        for step in (1, 2, 3):
            commit(store, step)
            maintenance.after_commit(store)
            maintenance.wait()
        assert isinstance(maintenance.error, CasckptError)
    assert [kind for message, kind in told if "training goes on" in message] == [StoreWarning]


@pytest.mark.parametrize("level", ["fast", "small"])
def test_maintenance_encodes_anew_as_the_training_does(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """What a collection writes must not take longer to restore than the training asked for."""
    seen: list[tuple[str, str, str]] = []

    def look(own: Any, *args: object, **options: object) -> None:
        seen.append((own.run, own._committer.options["level"].name, own._committer.options["verify"]))
        raise FileNotFoundError("tmp")

    monkeypatch.setattr("casckpt_gc.maintenance.plan", look)
    monkeypatch.setattr(warnings, "warn", lambda *_, **__: None)
    maintenance = Maintenance(every_commits=1)
    with open_store(store_path, run="a", level=level, verify="off") as store:
        commit(store, 1)
        maintenance.after_commit(store)
        maintenance.close()
        commit(store, 2)
        maintenance.after_commit(store)  # over: nothing is begun any more
        maintenance.wait()
    assert seen == [("a", level, "off")]
    assert isinstance(maintenance.error, FileNotFoundError)


def test_closing_does_not_wait_for_the_grace_time(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2)
        maintenance = Maintenance(Retention(latest=1), every_commits=1, grace_s=3600.0)
        maintenance.after_commit(store)
        maintenance.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "casckpt-maintenance"]
        casckpt_gc.collect(store, Retention(latest=1), grace_s=0.0)
    check_steps(store_path, trees([2]))
