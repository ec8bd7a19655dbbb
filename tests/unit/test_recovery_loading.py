"""Snapshots loaded with changes, against the same done by hand on plain values."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.recovery import Migrations, config_drift, load_into
from casckpt.state.transfer import copy_tree
from tests.unit.stores import open_store


def agent(seed: int, lr: float) -> dict[str, Any]:
    torch.manual_seed(seed)
    policy = torch.nn.Linear(6, 3)
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    for _ in range(3):
        optimizer.zero_grad()
        policy(torch.randn(8, 6)).pow(2).mean().backward()
        optimizer.step()
    return {"policy": policy, "optimizer": optimizer, "counters": {"step": seed, "best": [1.0, float(seed)]}}


def values(live: dict[str, Any]) -> dict[str, Any]:
    return {name: copy_tree(name, value) for name, value in live.items()}


def moments(live: dict[str, Any]) -> list[torch.Tensor]:
    return [entry[key] for entry in live["optimizer"].state.values() for key in ("exp_avg", "exp_avg_sq")]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def test_population_member_takes_moments_of_another_and_keeps_its_rate(tmp_path: Path) -> None:
    """The exploit step: weights and moments of A, the perturbed rate of B; and A's bytes are stored once."""
    a, b = agent(1, 1e-3), agent(2, 5e-4)
    with open_store(tmp_path / "store", run="a") as store:
        best = store.commit(10, a)
    with open_store(tmp_path / "store", run="b") as store:
        store.commit(10, b)
        report = load_into(store, b, best, keep=["optimizer/param_groups/*/lr"], is_resume=True)
        assert b["optimizer"].param_groups[0]["lr"] == 5e-4
        assert equal(moments(a), moments(b))
        assert torch.equal(a["policy"].weight, b["policy"].weight)
        assert b["counters"] == {"step": 1, "best": [1.0, 1.0]}
        assert report.kept == ("optimizer/param_groups/0/lr",)
        clone = store.commit(11, b)
        assert clone.parent == best.id
        assert clone.new_bytes < 400  # the optimizer's scalars: its rate is another


def test_only_takes_named_places_and_nothing_else(tmp_path: Path) -> None:
    a, b = agent(1, 1e-3), agent(2, 5e-4)
    with open_store(tmp_path / "store") as store:
        store.commit(1, a)
        before = [tensor.clone() for tensor in (b["policy"].weight, *moments(b))]
        report = load_into(store, b, only=["policy/bias", "counters/best/1"])
    assert equal(before, [b["policy"].weight, *moments(b)])
    assert torch.equal(b["policy"].bias, a["policy"].bias)
    assert b["counters"] == {"step": 2, "best": [1.0, 1.0]}
    assert report.taken == ("counters/best/1", "policy/bias")
    assert report.components == ("counters", "policy")


def test_override_sets_values_by_path(tmp_path: Path) -> None:
    a, b = agent(1, 1e-3), agent(2, 5e-4)
    with open_store(tmp_path / "store") as store:
        store.commit(1, a)
        report = load_into(store, b, override={"optimizer/param_groups/*/lr": 7e-4, "counters/step": 99})
    assert b["optimizer"].param_groups[0]["lr"] == 7e-4
    assert equal(moments(a), moments(b))
    assert b["counters"]["step"] == 99
    assert set(report.overridden) == {"optimizer/param_groups/0/lr", "counters/step"}


def test_override_may_change_an_option_that_has_three_values(tmp_path: Path) -> None:
    live: dict[str, Any] = {"options": {"foreach": True, "fused": None, "clip": None}}
    with open_store(tmp_path / "store") as store:
        store.commit(1, live)
        changes = {"options/foreach": None, "options/fused": False, "options/clip": 0.5}
        load_into(store, live, override=changes)
    assert live == {"options": {"foreach": None, "fused": False, "clip": 0.5}}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": ["optimizer/param_groups/*/nothing"]}, casckpt.NotFoundError, "names nothing"),
        ({"keep": ["critic/w"]}, casckpt.NotFoundError, "no component"),
        ({"only": ["policy"], "keep": ["optimizer/param_groups"]}, casckpt.InvalidInputError, "only= takes nothing"),
        ({"keep": "policy"}, casckpt.InvalidInputError, "keep=.policy.: expected a list of texts"),
        ({"keep": ["counters/*"], "override": {"counters/step": 1}}, casckpt.InvalidInputError, "both"),
        ({"override": {"counters": 5}}, casckpt.InvalidInputError, "expected a mapping, found a number"),
        ({"override": {"counters": {"step": 1}}}, casckpt.InvalidInputError, "best.*are missing"),
        ({"override": {"counters/step": "9"}}, casckpt.InvalidInputError, "expected a number, found text"),
        (
            {"override": {"optimizer/param_groups/*/lr": None}},
            casckpt.InvalidInputError,
            "expected a number, found nothing",
        ),
        ({"override": {"policy/bias": None}}, casckpt.InvalidInputError, "expected an array, found nothing"),
        ({"override": {"counters": None}}, casckpt.InvalidInputError, "expected a mapping, found nothing"),
        ({"override": {"optimizer/state": 7}}, casckpt.InvalidInputError, "expected a mapping"),
        ({"override": {"optimizer/state/0/exp_avg": "x"}}, casckpt.InvalidInputError, "expected an array, found text"),
        ({"override": {"policy/bias": torch.zeros(5)}}, casckpt.MismatchError, r"policy/bias"),
        ({"schema_version": 2}, casckpt.MismatchError, "no migration"),
        ({"schema_version": 0}, casckpt.MismatchError, "older than the code"),
        ({"config": {"lr": 2}, "fatal": ["l*"]}, casckpt.MismatchError, "must not"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_touched(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    a, b = agent(1, 1e-3), agent(2, 5e-4)
    with open_store(tmp_path / "store") as store:
        store.commit(1, a, config={"lr": 1})
        before = values(b)
        with pytest.raises(error, match=message):
            load_into(store, b, migrations=Migrations(), **options)
    after = values(b)
    assert equal([before["policy"]["weight"], before["policy"]["bias"]], [b["policy"].weight, b["policy"].bias])
    assert before["counters"] == after["counters"]
    assert before["optimizer"]["param_groups"] == after["optimizer"]["param_groups"]


def old_state() -> dict[str, Any]:
    return {"net": {"w": np.arange(6.0), "b": np.ones(2)}, "counters": {"step": 3}, "legacy": {"x": 1}}


def chain_of_three() -> Migrations:
    migrations = Migrations()

    @migrations.migration(from_version=1)
    def rename(state: dict[str, Any]) -> dict[str, Any]:
        return {"policy": state["net"], "counters": state["counters"]}

    @migrations.migration(from_version=2)
    def reshape(state: dict[str, Any]) -> dict[str, Any]:
        state["policy"]["w"] = state["policy"]["w"].reshape(2, 3)
        return state

    @migrations.migration(from_version=3)
    def add(state: dict[str, Any]) -> dict[str, Any]:
        state["counters"]["episodes"] = state["counters"]["step"] * 2
        return state

    return migrations


def test_migrations_run_in_a_chain_from_the_stored_version(tmp_path: Path) -> None:
    live = {"policy": {"w": np.zeros((2, 3)), "b": np.zeros(2)}, "counters": {"step": 0, "episodes": 0}}
    weights = live["policy"]["w"]
    with open_store(tmp_path / "store") as store:
        store.commit(1, old_state(), schema_version=1)
        report = load_into(store, live, schema_version=4, migrations=chain_of_three(), is_resume=True)
        assert live["policy"]["w"] is weights
        assert np.array_equal(weights, np.arange(6.0).reshape(2, 3))
        assert live["counters"] == {"step": 3, "episodes": 6}
        assert report.schema_versions == (1, 4)
        assert report.gone == ("legacy", "net")
        assert "from schema version 1 to 4" in str(report)
        after = store.commit(2, live, schema_version=4, drop=report.gone)
        assert (after.step, store.context(2).schema_version) == (2, 4)
        untouched = {"policy": {"w": np.zeros((2, 3)), "b": np.zeros(2)}, "counters": {"step": 0, "episodes": 0}}
        assert load_into(store, untouched, 2, schema_version=4, migrations=chain_of_three()).schema_versions == (4, 4)
        assert untouched["counters"] == {"step": 3, "episodes": 6}


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_missing_link_of_the_chain_refuses_before_reading(tmp_path: Path, missing: int) -> None:
    migrations = chain_of_three()
    del migrations._functions[missing]
    live = {"policy": {"w": np.zeros((2, 3)), "b": np.zeros(2)}, "counters": {"step": 0, "episodes": 0}}
    with open_store(tmp_path / "store") as store:
        store.commit(1, old_state(), schema_version=1)
        with pytest.raises(casckpt.MismatchError, match=rf"\[{missing}\]"):
            load_into(store, live, schema_version=4, migrations=migrations)
    assert live["counters"] == {"step": 0, "episodes": 0}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_migration_that_fails_names_itself_and_touches_nothing(tmp_path: Path, version: int) -> None:
    migrations = chain_of_three()

    def fails(state: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("net")

    migrations._functions[version] = fails
    live = {"policy": {"w": np.zeros((2, 3)), "b": np.zeros(2)}, "counters": {"step": 0, "episodes": 0}}
    with open_store(tmp_path / "store") as store:
        store.commit(1, old_state(), schema_version=1)
        with pytest.raises(casckpt.MismatchError, match=r"fails failed: KeyError") as failed:
            load_into(store, live, schema_version=4, migrations=migrations)
    assert isinstance(failed.value.__cause__, KeyError)
    assert live["counters"] == {"step": 0, "episodes": 0}


def test_one_version_has_one_migration() -> None:
    migrations = chain_of_three()
    with pytest.raises(casckpt.AlreadyExistsError, match="from version 2"):
        migrations.migration(from_version=2)(lambda state: state)
    with pytest.raises(casckpt.InvalidInputError):
        migrations.migration(from_version=-1)


def test_public_decorator_registers_for_every_load(tmp_path: Path) -> None:
    from casckpt.recovery import migrations as module

    @casckpt.migration(from_version=901)
    def later(state: dict[str, Any]) -> dict[str, Any]:
        return {"counters": {"step": state["counters"]["step"] + 1}}

    live = {"counters": {"step": 0}}
    try:
        with open_store(tmp_path / "store") as store:
            store.commit(1, {"counters": {"step": 5}}, schema_version=901)
            load_into(store, live, schema_version=902)
    finally:
        del module.registered._functions[901]
    assert live == {"counters": {"step": 6}}


def test_config_drift_is_told_item_by_item(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(1, {"a": [1]}, config={"lr": 1e-3, "ppo": {"clip": 0.2, "batch": 64}, "old": 1})
        new = {"lr": 3e-4, "ppo": {"clip": 0.2, "batch": 128}, "new": 2}
        changes = config_drift(store, new)
        assert {change.path: str(change) for change in changes} == {
            "lr": "lr: 0.001 → 0.0003",
            "ppo.batch": "ppo.batch: 64 → 128",
            "old": "old was 1, is gone",
            "new": "new is new: 2",
        }
        with pytest.warns(casckpt.ConfigDriftWarning, match=r"ppo.batch: 64 → 128") as caught:
            report = load_into(store, {"a": [0]}, config=new)
        assert caught[0].filename == __file__  # of the line that must change
        assert len(report.config_changes) == 4
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_into(store, {"a": [0]}, config={"lr": 1e-3, "ppo": {"clip": 0.2, "batch": 64}, "old": 1})
        for fatal in ("ppo.*", "old", "new", "l?"):
            with pytest.raises(casckpt.MismatchError, match="must not"):
                config_drift(store, new, fatal=[fatal])
        assert config_drift(store, new, fatal=["gamma", "ppo.clip"]) == changes


def test_resume_with_a_taken_branch_name_touches_nothing(tmp_path: Path) -> None:
    live = {"a": [0]}
    with open_store(tmp_path / "store") as store:
        store.commit(1, {"a": [1]})
        store.commit(2, {"a": [2]})
        with pytest.raises(casckpt.AlreadyExistsError):
            load_into(store, live, 1, is_resume=True, branch="main")
        assert live == {"a": [0]}
        load_into(store, live, 1, is_resume=True, branch="side")
        assert (live, store.step, store.branch) == ({"a": [1]}, 1, "side")


class DrawingWhenLoaded:
    """An object whose loading draws from the global stream, as one that builds its layers anew does."""

    def __init__(self) -> None:
        self.values = {"a": 1, "b": 2}

    def state_dict(self) -> dict[str, int]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, int]) -> None:
        torch.rand(1)
        self.values = dict(state)


@pytest.mark.parametrize("options", [{}, {"keep": ["odd/a"]}, {"override": {"odd/a": 7}}, {"only": ["odd/b", "rng"]}])
def test_random_streams_come_last_whatever_else_is_loaded_with_changes(tmp_path: Path, options: dict[str, Any]) -> None:
    with open_store(tmp_path / "store") as store:
        torch.manual_seed(5)
        store.commit(1, {"odd": DrawingWhenLoaded(), "rng": casckpt.RngState()})
        expected = torch.rand(3)
        torch.manual_seed(6)
        load_into(store, {"odd": DrawingWhenLoaded(), "rng": casckpt.RngState()}, **options)
    assert torch.equal(torch.rand(3), expected)
