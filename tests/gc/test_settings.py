"""Maintenance in a config: found by its entry point, checked with the config, begun and ended by the engine."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import casckpt_gc
import pytest
from casckpt_gc.settings import MaintenanceSettings

from casckpt.engine import maintenance
from casckpt.engine.config import read_config
from casckpt.engine.engine import CheckpointEngine
from casckpt.engine.strategy import SaveStrategy
from casckpt.errors import InvalidInputError
from tests.unit.stores import open_store

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
WRITTEN: dict[str, Any] = {
    "every_commits": 2,
    "grace_s": 0,
    "compact": False,
    "patrol_bytes": 1 << 20,
    "limits": {"stop_free_bytes": 1 << 30, "warn_write_s": 1},
    "retention": {
        "latest": 3,
        "every_steps": 1000,
        "every_hours": 1.5,
        "best": [
            {"metric": "return", "count": 2, "mode": "max", "at_most": {"violations": 0.1}},
            {"metrics": {"return": "max", "cost": "min"}},
        ],
    },
    "thinning": {"components": ["optimizer"], "keep_latest": 2, "spare_tags": False},
}
MEANT = MaintenanceSettings(
    casckpt_gc.Retention(
        latest=3,
        every_steps=1000,
        every_hours=1.5,
        best=(
            casckpt_gc.Best("return", count=2, at_most={"violations": 0.1}),
            casckpt_gc.Pareto({"return": "max", "cost": "min"}),
        ),
    ),
    (casckpt_gc.Thinning(["optimizer"], keep_latest=2, spare_tags=False),),
    every_commits=2,
    grace_s=0,
    compact=False,
    patrol_bytes=1 << 20,
    limits=casckpt_gc.Limits(stop_free_bytes=1 << 30, warn_write_s=1),
)


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point that pyproject.toml declares, whatever was installed here before."""
    declared = PYPROJECT.read_text().split(f'[project.entry-points."{maintenance.GROUP}"]\n')[1].split("\n\n")[0]
    pairs = [line.split(" = ") for line in declared.splitlines()]
    plugins = [EntryPoint(name, value.strip('"'), maintenance.GROUP) for name, value in pairs]
    monkeypatch.setattr(maintenance, "entry_points", lambda group: plugins if group == maintenance.GROUP else [])


def test_mapping_and_yaml_say_the_same_as_values(tmp_path: Path) -> None:
    assert read_config({"maintenance": WRITTEN}).maintenance == MEANT
    path = tmp_path / "engine.yaml"
    path.write_text(
        "maintenance: {every_commits: 2, grace_s: 0, compact: false, patrol_bytes: 1048576, "
        "limits: {stop_free_bytes: 1073741824, warn_write_s: 1}, retention: {latest: 3, every_steps: 1000, "
        "every_hours: 1.5, best: [{metric: return, count: 2, at_most: {violations: 0.1}}, "
        "{metrics: {return: max, cost: min}}]}, "
        "thinning: [{components: [optimizer], keep_latest: 2, spare_tags: false}]}"
    )
    assert read_config(path).maintenance == MEANT
    assert read_config({"maintenance": {}}).maintenance == MaintenanceSettings()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"every_comits": 5}, "config: maintenance: unknown key 'every_comits'"),
        ({"every_commits": 0}, "config: maintenance: every_commits=0"),
        ({"every_commits": "50"}, "config: maintenance: every_commits='50'"),
        ({"grace_s": -1}, "config: maintenance: grace_s=-1"),
        ({"compact": 1}, "config: maintenance: compact=1"),
        ({"patrol_bytes": -1}, "config: maintenance: patrol_bytes=-1"),
        ({"limits": {"stop": 1}}, "config: maintenance.limits: unknown key 'stop'"),
        ({"limits": {"warn_write_s": "1"}}, "config: maintenance.limits: warn_write_s='1'"),
        ({"retention": 5}, "config: maintenance.retention: expected keys and values, found int"),
        ({"retention": {"lastest": 1}}, "config: maintenance.retention: unknown key 'lastest'"),
        ({"retention": {"latest": "3"}}, "config: maintenance.retention: latest='3'"),
        ({"retention": {"every_hours": "1"}}, "config: maintenance.retention: every_hours='1'"),
        ({"retention": {"every_steps": 0}}, "config: maintenance.retention: every_steps=0"),
        ({"retention": {"best": "return"}}, "config: maintenance.retention.best: expected keys and values, or a list"),
        ({"retention": {"best": {"count": 1}}}, "config: maintenance.retention.best: .*metric"),
        ({"retention": {"best": {"metric": "a", "mode": "most"}}}, "maintenance.retention.best: .*'most' is no mode"),
        ({"retention": {"best": {"metrics": ["a"]}}}, "maintenance.retention.best: .*metrics"),
        ({"retention": {"best": {"metric": "a", "at_most": 3}}}, "maintenance.retention.best: .*at_most"),
        ({"thinning": {"keep_latest": 1}}, "config: maintenance.thinning: .*components"),
        ({"thinning": {"components": "optimizer"}}, "config: maintenance.thinning: components='optimizer'"),
        ({"thinning": [{"components": ["a"]}, 5]}, "config: maintenance.thinning: expected keys and values, found int"),
    ],
)
def test_mistake_names_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_config({"maintenance": {**WRITTEN, **change}})


def test_settings_that_nothing_installed_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "entry_points", lambda group: [])
    with pytest.raises(InvalidInputError, match=r"config: maintenance: one installed package must .* found none"):
        read_config({"maintenance": WRITTEN})


def test_engine_begins_what_its_config_says_and_ends_it(store_path: Path) -> None:
    config = {"maintenance": {"every_commits": 5, "grace_s": 0, "retention": {"latest": 2}}}
    with open_store(store_path) as store:
        engine = CheckpointEngine(store, config=config, save_budget=None)
        counters = {"n": 0}
        engine.register("counters", counters, SaveStrategy(every_steps=1))
        for step in range(1, 6):
            counters["n"] = step
            engine.step(step)
            engine.wait()
        begun = engine._own_maintenance
        assert isinstance(begun, casckpt_gc.Maintenance)
        begun.wait()
        assert (begun.error, store.steps()) == (None, [4, 5])
        engine.close()
        assert begun._stop.is_set()


def test_maintenance_that_is_given_wins_and_stays_its_owners(store_path: Path) -> None:
    given = casckpt_gc.Maintenance(every_commits=1000)
    with open_store(store_path) as store:
        engine = CheckpointEngine(store, config={"maintenance": WRITTEN}, maintenance=given)
        engine.register("counters", {"n": 1})
        engine.save(1, async_mode=False)
        engine.close()
    assert engine._own_maintenance is None
    assert (given._commit_count, given._stop.is_set()) == (1, False)


def test_config_without_maintenance_never_loads_what_deletes() -> None:
    code = (
        "import sys; from casckpt.engine.config import read_config; "
        "read_config({'components': {'policy': {'every_steps': 1}}}); print('casckpt_gc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
