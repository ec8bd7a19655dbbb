"""Completeness templates: what a training lacks is named, and what it has is found under its own names."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import casckpt
from casckpt.engine.roles import TEMPLATES
from casckpt.engine.templates import check_complete, paths_of
from casckpt.replay import Arrays, Ring
from tests.unit.cli_stores import call

torch = pytest.importorskip("torch")
gymnasium = pytest.importorskip("gymnasium")
from casckpt.integrations.gymnasium import EnvState  # noqa: E402

WEIGHTS = np.zeros(2, np.float32)
RNG = {"python": {"words": b"0"}, "numpy": {"state": 1}, "torch": {"cpu": 1}}
OPTIMIZER = {"state": {0: {"exp_avg": WEIGHTS}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
LOOP = {"rng": RNG, "counters": {"step": 3}, "env": {"state": WEIGHTS}, "last_obs": WEIGHTS}
REPLAY = {"replay": {"rows": WEIGHTS, "pos": 3, "full": False}}
STATES: dict[str, dict[str, Any]] = {
    "ppo": {"policy": {"w": WEIGHTS}, "optimizer": OPTIMIZER, **LOOP},
    "sac": {
        **{"actor": {"w": WEIGHTS}, "qf1": {"w": WEIGHTS}, "qf1_target": {"w": WEIGHTS}},
        **{"actor_optimizer": OPTIMIZER, "q_optimizer": OPTIMIZER},
        **{"log_alpha": {"value": WEIGHTS}, "alpha_optimizer": OPTIMIZER, **REPLAY, **LOOP},
    },
    "dqn": {
        **{"q_network": {"w": WEIGHTS}, "target_network": {"w": WEIGHTS}, "optimizer": OPTIMIZER},
        **{"epsilon": {"value": 0.1}, **REPLAY, **LOOP},
    },
    "grpo": {
        **{"policy": {"w": WEIGHTS}, "reference": {"w": WEIGHTS}, "optimizer": OPTIMIZER, "lr_scheduler": {"last": 1}},
        **{"prompt_cursor": {"index": 7}, "rng": RNG, "counters": {"step": 3}},
    },
    "pbt": {
        **{f"member-{i}": {"policy": {"w": WEIGHTS}, "optimizer": OPTIMIZER, "counters": {"step": 1}} for i in (0, 1)},
        **{"scores": {"member-0": 1.0}, "generation": {"number": 2}, "rng": RNG},
    },
}
GOES_WITH = {  # taking this component away makes these roles missing
    "ppo": {
        "policy": ["policy"],
        "optimizer": ["optimizer"],
        "env": ["environment"],
        "last_obs": ["last observation"],
        "counters": ["counters"],
        "rng": ["random stream of python", "random stream of numpy", "random stream of torch"],
    },
    "sac": {
        "actor": ["actor"],
        "qf1": ["critics"],
        "qf1_target": ["target critics"],
        "actor_optimizer": ["actor optimizer"],
        "q_optimizer": ["critic optimizer"],
        "log_alpha": ["temperature"],
        "alpha_optimizer": ["temperature optimizer"],
        "replay": ["replay rows", "replay position"],
    },
    "dqn": {
        "q_network": ["q network"],
        "target_network": ["target network"],
        "optimizer": ["optimizer"],
        "epsilon": ["exploration rate"],
        "replay": ["replay rows", "replay position"],
    },
    "grpo": {
        "policy": ["policy"],
        "reference": ["reference"],
        "optimizer": ["optimizer"],
        "lr_scheduler": ["schedule"],
        "prompt_cursor": ["prompt cursor"],
    },
    "pbt": {"scores": ["scores"], "generation": ["generation"]},
}

PPO = {"template": "ppo"}


def test_every_template_has_a_state_here() -> None:
    assert set(STATES) == set(GOES_WITH) == set(TEMPLATES)


@pytest.mark.parametrize("name", STATES)
def test_state_with_everything_is_complete(name: str) -> None:
    report = check_complete(name, paths_of(STATES[name]), strict=True)
    assert report.is_complete
    assert report.missing == ()


@pytest.mark.parametrize(("name", "component"), [(name, gone) for name, rows in GOES_WITH.items() for gone in rows])
def test_component_that_is_taken_away_is_missed_by_the_name_of_its_role(name: str, component: str) -> None:
    state = {key: value for key, value in STATES[name].items() if key != component}
    assert list(check_complete(name, paths_of(state)).missing) == GOES_WITH[name][component]
    with pytest.raises(casckpt.InvalidInputError, match=GOES_WITH[name][component][0]):
        check_complete(name, paths_of(state), strict=True)


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_one_forgotten_random_stream_is_named(name: str) -> None:
    state = {**STATES["ppo"], "rng": {key: value for key, value in RNG.items() if key != name}}
    assert check_complete("ppo", paths_of(state)).missing == (f"random stream of {name}",)


def test_member_without_its_optimizer_is_named() -> None:
    state = {**STATES["pbt"], "member-1": {"policy": {"w": WEIGHTS}, "counters": {"step": 1}}}
    assert check_complete("pbt", paths_of(state)).missing == ("member 1: optimizer", "member 1: hyper-parameters")
    nobody = {key: value for key, value in STATES["pbt"].items() if not key.startswith(("member", "scores"))}
    assert "members" in check_complete("pbt", paths_of({**nobody, "scores": {"best": 1.0}})).missing


def test_temperature_that_is_fixed_needs_no_optimizer() -> None:
    gone = ("log_alpha", "alpha_optimizer")
    state = {key: value for key, value in STATES["sac"].items() if key not in gone}
    assert check_complete("sac", paths_of(state)).missing == ("temperature", "temperature optimizer")
    report = check_complete("sac", paths_of({**state, "ent_coef_tensor": {"value": WEIGHTS}}))
    assert report.is_complete
    assert [each.state for each in report.roles if each.role == "temperature optimizer"] == ["not needed"]


def test_role_under_a_name_of_ones_own_is_found_where_it_is_said_to_be() -> None:
    state = {**STATES["ppo"], "stuff": STATES["ppo"]["policy"]}
    del state["policy"]
    assert check_complete("ppo", paths_of(state)).missing == ("policy",)
    assert check_complete("ppo", paths_of(state), aliases={"policy": ["stuff"]}).is_complete
    with pytest.raises(casckpt.InvalidInputError, match="nothing is at stuf; without it"):
        check_complete("ppo", paths_of(state), aliases={"policy": ["stuf"]}, strict=True)
    with pytest.raises(casckpt.InvalidInputError, match="polcy"):
        check_complete("ppo", paths_of(state), aliases={"polcy": ["stuff"]})


def test_what_cannot_be_captured_makes_its_role_incomplete() -> None:
    report = check_complete("ppo", paths_of(STATES["ppo"]), not_capturable={"env/handle": "a socket"})
    assert report.missing == ("environment",)
    (environment,) = [each for each in report.roles if each.role == "environment"]
    assert (environment.state, environment.reason) == ("not capturable", "a socket")


def test_live_components_say_what_their_capture_lacks_and_strict_refuses(store_path: Path) -> None:
    """An environment that may be captured in part is there; what of it is not makes the state incomplete."""
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=1)
    env.unwrapped.handle = threading.Lock()
    state = {**STATES["ppo"], "env": EnvState(env, strict=False)}
    with casckpt.open(store_path, create=True) as store, casckpt.CheckpointEngine(store, config=PPO) as engine:
        for name, value in state.items():
            engine.register(name, value)
        report = engine.coverage()
        assert list(report.not_capturable) == ["env/env.env.env.env.handle"]
        assert (report.missing, report.is_complete) == (("environment",), False)
        with pytest.raises(casckpt.InvalidInputError, match=r"env\.handle: a lock"):
            engine.save(1)
        del env.unwrapped.handle
        assert engine.coverage().is_complete
        assert engine.save(1) is not None


def test_unknown_template_is_refused_with_the_known_ones() -> None:
    with pytest.raises(casckpt.InvalidInputError, match="ppo, sac, dqn, grpo, pbt"):
        check_complete("a3c", {})


def test_ring_has_rows_and_a_place(tmp_path: Path) -> None:
    ring = Ring(Arrays({"obs": np.zeros((4, 2), np.float32)}, SimpleNamespace(total=3), total="total"))
    state = {**{name: value for name, value in STATES["sac"].items() if name != "replay"}, "replay": ring}
    assert check_complete("sac", paths_of(state)).is_complete
    with casckpt.open(tmp_path / "store", create=True) as store:
        store.commit(1, state)
        assert check_complete("sac", paths_of(store.restore())).is_complete
    assert call("coverage", tmp_path / "store", "--template", "sac", "--strict").code == 0


def test_live_objects_have_the_paths_of_their_state() -> None:
    module = torch.nn.Linear(2, 2)
    state = {"policy": module, "optimizer": torch.optim.Adam(module.parameters()), "rng": casckpt.RngState()}
    paths = paths_of(state)
    assert paths["policy"] == ["policy/weight", "policy/bias"]
    assert any(path.startswith("rng/python/") for path in paths["rng"])
    missing = check_complete("ppo", paths).missing
    assert missing == ("counters", "environment", "last observation")


def test_command_names_what_a_snapshot_lacks_and_strict_refuses(tmp_path: Path) -> None:
    state = {key: value for key, value in STATES["sac"].items() if key != "alpha_optimizer"}
    state["env"] = {"state": WEIGHTS, "not_captured": ["handle: a socket"]}
    with casckpt.open(tmp_path / "store", create=True) as store:
        store.commit(1, state)
        store.commit(2, STATES["sac"], drop=())
    called = call("coverage", tmp_path / "store", "main@1", "--template", "sac", "--json")
    assert called.code == 0
    assert called.json["missing"] == ["temperature optimizer", "environment"]
    assert called.json["not_capturable"] == {"env/handle": "a socket"}
    refused = call("coverage", tmp_path / "store", "main@1", "--template", "sac", "--strict")
    assert refused.code == 1
    assert "temperature optimizer" in refused.out
    assert call("coverage", tmp_path / "store", "--template", "sac", "--strict").code == 0
    aliased = call(
        "coverage", tmp_path / "store", "main@1", "--template", "sac", "--alias", "temperature optimizer=qf1", "--json"
    )
    assert aliased.json["missing"] == ["environment"]
    assert call("coverage", tmp_path / "store", "--template", "nonsense").code == 2
