"""Cases of capture that need no engine: what optimizers hold on to, and what a report must list."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import casckpt
from casckpt.integrations.gymnasium import EnvState
from tests.unit.environments import Counting


def temperature() -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """The entropy coefficient of SAC: a bare tensor, not a module's parameter, with an optimizer of its own."""
    log_alpha = torch.zeros(1, requires_grad=True)
    return log_alpha, torch.optim.Adam([log_alpha], lr=0.1)


def update(log_alpha: torch.Tensor, optimizer: torch.optim.Optimizer, target: float) -> float:
    optimizer.zero_grad()
    (log_alpha * target).sum().backward()
    optimizer.step()
    return log_alpha.item()


@pytest.mark.parametrize("is_fresh", [True, False], ids=["a new process", "time travel"])
def test_optimizer_of_a_temperature_moves_the_live_tensor_after_a_restore(is_fresh: bool, store_path: Any) -> None:
    live = temperature()
    for target in (1.0, -0.5, 2.0):
        update(*live, target)
    with casckpt.open(store_path, create=True) as store:
        store.commit(3, {"temperature": {"log_alpha": live[0]}, "optimizer": live[1]})
        expected = [update(*live, target) for target in (0.3, 0.7)]
        log_alpha, optimizer = temperature() if is_fresh else live
        store.resume_into({"temperature": {"log_alpha": log_alpha}, "optimizer": optimizer}, 3)
    assert optimizer.param_groups[0]["params"][0] is log_alpha
    assert log_alpha.requires_grad and log_alpha.is_leaf
    assert [update(log_alpha, optimizer, target) for target in (0.3, 0.7)] == expected


def types_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = {f"group/{name}": type(value) for name, value in optimizer.param_groups[0].items()}
    states = next(iter(optimizer.state.values()))
    return groups | {
        name: (type(value), value.dtype, value.device, value.shape) if isinstance(value, torch.Tensor) else type(value)
        for name, value in states.items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1e-3},
        {"lr": 1e-3, "fused": True},
        {"lr": 1e-3, "foreach": True, "amsgrad": True},
        {"lr": torch.tensor(1e-3), "foreach": False},
        {"lr": torch.tensor(1e-3), "capturable": True},
    ],
    ids=["plain", "fused", "foreach", "tensor lr", "capturable"],
)
def test_numbers_of_an_optimizer_keep_their_types(options: dict[str, Any], store_path: Any) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(module.parameters(), **options)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        if options.get("capturable"):  # its steps run on accelerators only; the state it would have is made by hand
            names = ("exp_avg", "exp_avg_sq")
            for parameter in module.parameters():
                moments = {name: torch.full_like(parameter, 0.5) for name in names}
                optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
        else:
            optimizer.step()
        return module, optimizer

    module, optimizer = make()
    before = types_of(optimizer)
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"module": module, "optimizer": optimizer})
        other_module, other = make()
        store.resume_into({"module": other_module, "optimizer": other}, 1)
    assert types_of(other) == before
    steps = [state["step"].item() for state in other.state.values()]
    assert steps == [3.0 if options.get("capturable") else 1.0] * 2


def test_report_of_an_environment_lists_every_stream_that_is_captured_and_what_is_not() -> None:
    env = Counting()
    env.reset(seed=1)
    env.sampler = random.Random(1)
    env.legacy = np.random.RandomState(2)
    env.noise = torch.Generator()
    env.action_space = gymnasium.spaces.Discrete(2, seed=3)
    report = EnvState(env).report()
    streams = {"_np_random", "sampler", "legacy", "noise", "action_space._np_random"}
    assert {f"env.{name}" for name in streams} <= set(report.captured)
    assert [finding.path for finding in report.missing] == ["env.count"]
    plain = report.to_dict()
    assert plain["missing"][0][0] == "env.count"
    assert plain["is_complete"] is False


def test_every_stream_that_the_report_lists_goes_on() -> None:
    env, other = Counting(), Counting()
    for each, seed in ((env, 1), (other, 2)):
        each.reset(seed=seed)
        each.sampler = random.Random(seed)
        each.legacy = np.random.RandomState(seed)
        each.noise = torch.Generator().manual_seed(seed)
        each.action_space = gymnasium.spaces.Discrete(1000, seed=seed)

    def drawn(each: Any) -> list[float]:
        noise = torch.rand(1, generator=each.noise).item()
        return [
            each.np_random.random(),
            each.sampler.random(),
            each.legacy.rand(),
            noise,
            int(each.action_space.sample()),
        ]

    EnvState(other, strict=False).load_state_dict(EnvState(env, strict=False).state_dict())
    assert drawn(other) == drawn(env)
