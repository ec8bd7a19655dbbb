"""Optimizer state goes into an optimizer whose parameter groups have the same hyper-parameters, and into no other."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from casckpt.errors import MismatchError
from casckpt.format.structure import decode_structure
from casckpt.state import Target, capture

KINDS = ["Adam", "AdamW", "SGD", "RMSprop"]
SCHEDULERS = ["none", "StepLR", "OneCycleLR", "CyclicLR", "CosineAnnealingLR", "SWALR"]
TORCH_ADDED_LATER = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")


def trained(kind: str, scheduler: str = "none", step_count: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    options = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    schedule(scheduler, optimizer)
    for _ in range(step_count):
        step(model, optimizer)
    return model, optimizer


def schedule(name: str, optimizer: torch.optim.Optimizer) -> None:
    lr = torch.optim.lr_scheduler
    if name == "StepLR":
        lr.StepLR(optimizer, 2)
    elif name == "OneCycleLR":
        lr.OneCycleLR(optimizer, 0.5, 20)
    elif name == "CyclicLR":
        lr.CyclicLR(optimizer, 0.01, 0.1)
    elif name == "CosineAnnealingLR":
        lr.CosineAnnealingLR(optimizer, 10)
    elif name == "SWALR":
        torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(6.0).reshape(2, 3)).pow(2).sum().backward()
    optimizer.step()


def stored(value: Any) -> tuple[bytes, bytes, list[bytes]]:
    captured = capture("o", value)
    blocks = [bytes(captured.blocks.view(i, 0, captured.blocks.size(i))) for i in range(len(captured.blocks))]
    return captured.structure_bytes, captured.scalars, blocks


def restore(snapshot: tuple[bytes, bytes, list[bytes]], live: Any, *, strict: bool = True) -> None:
    target = Target("o", live, decode_structure(snapshot[0]), strict=strict)
    target.check(snapshot[1])
    for block, memory in target.blocks.items():
        memory[:] = snapshot[2][block]
    target.finish(snapshot[1])


def hyper_parameters(kind: str) -> set[str]:
    """The names as the constructor has them: torch's own word on what the class takes."""
    return set(inspect.signature(getattr(torch.optim, kind)).parameters) - {"params", *TORCH_ADDED_LATER}


@pytest.mark.few(8)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("live_kind", KINDS)
@pytest.mark.parametrize("stored_kind", KINDS)
def test_state_of_another_optimizer_class_is_refused_by_the_names_of_its_hyper_parameters(
    stored_kind: str, live_kind: str, strict: bool
) -> None:
    _, source = trained(stored_kind)
    model, live = trained(live_kind, step_count=0)
    snapshot = stored(source)
    only_one_side = hyper_parameters(stored_kind) ^ hyper_parameters(live_kind)
    target = Target("o", live, decode_structure(snapshot[0]), strict=strict)
    assert {each.path for each in target.differences} == {f"o/param_groups/0/{name}" for name in only_one_side}
    if only_one_side:
        with pytest.raises(MismatchError, match="param_groups/0"):
            target.check(snapshot[1])
        assert target.blocks == {} and not live.state
    else:
        restore(snapshot, live, strict=strict)
    step(model, live)


@pytest.mark.few(12)
@pytest.mark.parametrize("live_scheduler", ["none", "same"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_resume_is_never_refused_for_what_schedulers_and_newer_releases_add(
    kind: str, scheduler: str, live_scheduler: str
) -> None:
    source_model, source = trained(kind, scheduler)
    model, live = trained(kind, step_count=0)
    if live_scheduler == "same":
        schedule(scheduler, live)
    model.load_state_dict(source_model.state_dict())
    restore(stored(source), live)
    step(source_model, source), step(model, live)
    assert torch.equal(model.weight, source_model.weight)


@pytest.mark.parametrize("older", ["stored", "live"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_of_an_older_or_newer_release_of_torch_is_taken(kind: str, older: str) -> None:
    _, source = trained(kind)
    model, live = trained(kind, step_count=0)
    state = source.state_dict()
    for name in TORCH_ADDED_LATER:
        if older == "stored":
            state["param_groups"][0].pop(name, None)
        else:
            state["param_groups"][0].setdefault(name, False)
    restore(stored(state), live)
    step(model, live)
    assert live.state[model.weight]


@pytest.mark.parametrize("strict", [True, False])
def test_another_number_of_groups_is_a_difference_before_the_scalars_are_read(strict: bool) -> None:
    def make(count: int) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(count)])

    target = Target("o", make(1), decode_structure(stored(make(2))[0]), strict=strict)
    assert [(each.path, each.expected, each.found) for each in target.differences] == [
        ("o/param_groups", "2 groups", "1 groups")
    ]


def test_a_state_that_is_no_optimizers_is_refused() -> None:
    _, live = trained("Adam")
    for other in ({"weights": torch.ones(1)}, None, {"state": {}, "param_groups": [3]}):
        snapshot = stored(other)
        target = Target("o", live, decode_structure(snapshot[0]))
        with pytest.raises(MismatchError, match="o/param_groups"):
            target.check(snapshot[1])


def test_a_name_that_the_user_gave_to_groups_must_be_there_on_both_sides() -> None:
    def make(**extra: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], **extra}], lr=0.1)

    named = stored(make(name="actor"))
    restore(named, make(name="critic"))
    target = Target("o", make(), decode_structure(named[0]))
    assert [each.path for each in target.differences] == ["o/param_groups/0/name"]
