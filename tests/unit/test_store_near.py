"""Targets, clones and opponents of agents that torch trains: what they take in a store, and that they come back.

Each claim on bytes is a share of what the tensors hold; every state is compared with a copy of what was committed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from casckpt.store import components
from casckpt.store.inspection import Inspection
from casckpt.testing.invariants import check_depths
from casckpt.testing.trees import difference
from tests.unit.stores import open_store

SIZE = 300  # a square matrix of 350 KiB, nearly all of a network


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several that wait for each other beside other processes cost seconds."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


class Learner:
    """A network, and the Adam that trains it on noise."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, 1))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=3e-4)

    def train(self, step_count: int = 1) -> None:
        for _ in range(step_count):
            loss = (self.net(torch.randn(64, 8)) - torch.randn(64, 1)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


class Log:
    """Commits to a store, with copies of what was committed."""

    def __init__(self, path: Path, level: str = "balanced", run: str = "main") -> None:
        self.store: Any = open_store(path, level=level, run=run)
        self.kept: dict[int, dict[str, Any]] = {}

    def commit(self, **components: Any) -> dict[str, float]:
        """Commit; the share of its tensors' bytes that each component takes, whether shared with others or not."""
        step = len(self.kept) + 1
        state = {name: components[name].state_dict() for name in sorted(components)}
        self.kept[step] = copy.deepcopy(state)
        snapshot = self.store.commit(step, state)
        parts = Inspection(self.store).parts(snapshot)
        return {part.name: part.stored_bytes / part.facts.logical_bytes for part in parts}

    def check(self) -> None:
        """Everything comes back, from files alone and after the index is made again; depths fall along every chain."""
        check_depths(self.store)
        self.store._keeper.rebuild()
        check_depths(self.store)
        assert self.store.verify(read_data=True).ok
        for step, state in self.kept.items():
            assert difference(state, self.store.restore(step)) is None
        self.store.close()


def follow(target: nn.Module, source: nn.Module, rate: float, *, is_lerp: bool = False) -> None:
    """What agents do after each step of their optimizer."""
    with torch.no_grad():
        for old, new in zip(target.parameters(), source.parameters(), strict=True):
            if is_lerp:
                old.lerp_(new, rate)
            else:
                old.mul_(1 - rate).add_(new, alpha=rate)


@pytest.mark.full
@pytest.mark.parametrize(
    ("level", "rate", "is_lerp"),
    [("balanced", 0.005, False), pytest.param("small", 0.0005, True, marks=pytest.mark.full)],
    ids=["Polyak", "EMA"],
)
def test_target_one_step_apart_takes_next_to_nothing(store_path: Path, level: str, rate: float, is_lerp: bool) -> None:
    """Two critics with one optimizer, whose targets follow them: each is found to be its own critic's."""
    log = Log(store_path, level)
    one, two = Learner(0), Learner(1)
    both = torch.optim.Adam([*one.net.parameters(), *two.net.parameters()], lr=3e-4)
    one.optimizer = two.optimizer = both
    targets = [copy.deepcopy(each.net) for each in (one, two)]
    for step in range(1, 6):
        for learner, target in zip((one, two), targets, strict=True):
            learner.train()
            follow(target, learner.net, rate, is_lerp=is_lerp)
        shares = log.commit(critic_1=one.net, critic_2=two.net, target_1=targets[0], target_2=targets[1], both=both)
        if step >= 3:
            assert shares["target_1"] < 0.03 and shares["target_2"] < 0.03, (step, shares)
    log.check()


@pytest.mark.full
def test_target_many_steps_apart_takes_less_than_its_change(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {}
    for is_near in (True, False):
        if not is_near:
            monkeypatch.setattr(components, "find_near", lambda *arguments: None)
        log = Log(store_path / str(is_near))
        critic = Learner(0)
        target = copy.deepcopy(critic.net)
        for _ in range(4):
            for _ in range(20):
                critic.train()
                follow(target, critic.net, 0.01)
            found = log.commit(critic=critic.net, target=target, optimizer=critic.optimizer)
        shares[is_near] = found["target"]
        log.check()
    assert shares[True] < 0.9 * shares[False], shares


def test_hard_update_is_stored_as_what_the_source_has_moved_since(store_path: Path) -> None:
    """Every sixth step the target becomes the network of that moment, two steps before a commit."""
    log = Log(store_path)
    learner, other = Learner(0), Learner(1)
    target = copy.deepcopy(other.net)  # as far from the network as two seeds are
    log.commit(net=learner.net, target=target, optimizer=learner.optimizer)
    far = log.commit(net=learner.net, target=other.net, optimizer=learner.optimizer)["target"]
    learner.train(4)
    target = copy.deepcopy(learner.net)
    learner.train(2)
    near = log.commit(net=learner.net, target=target, optimizer=learner.optimizer)["target"]
    again = log.commit(net=learner.net, target=target, optimizer=learner.optimizer)["target"]
    assert near < 0.8 * far, (near, far)
    assert again == near, "unchanged"
    log.check()


def test_member_that_took_over_anothers_weights_is_stored_as_a_difference_to_them(store_path: Path) -> None:
    """A population in one snapshot: the last member exploits the first, optimizer and all, and both train on."""
    log = Log(store_path)
    members = [Learner(seed) for seed in range(3)]

    def commit() -> dict[str, float]:
        state: dict[str, Any] = {f"net_{number}": each.net for number, each in enumerate(members)}
        return log.commit(**state, **{f"optimizer_{number}": each.optimizer for number, each in enumerate(members)})

    for _ in range(2):
        for each in members:
            each.train(3)
        alone = commit()
    members[2].net.load_state_dict(members[0].net.state_dict())
    members[2].optimizer.load_state_dict(copy.deepcopy(members[0].optimizer.state_dict()))
    for each in members:
        each.train(1)
    cloned = commit()
    assert alone["optimizer_2"] > 0.8 and cloned["net_0"] < 0.1
    assert cloned["net_2"] < 0.7, (cloned, alone)
    assert cloned["optimizer_2"] < 0.9, (cloned, alone)
    log.check()


def test_opponents_made_from_a_policy_are_stored_as_copies_of_it_or_differences_to_it(store_path: Path) -> None:
    log = Log(store_path)
    policy = Learner(0)
    policy.train(5)
    first = log.commit(policy=policy.net, optimizer=policy.optimizer)
    policy.train(1)
    pool = {"opponent_0": copy.deepcopy(policy.net)}
    shares = log.commit(policy=policy.net, optimizer=policy.optimizer, **pool)
    assert shares["opponent_0"] == pytest.approx(shares["policy"], abs=0.01)
    exploiter = Learner(0)
    exploiter.net.load_state_dict(policy.net.state_dict())
    exploiter.train(1)
    policy.train(1)
    shares = log.commit(policy=policy.net, optimizer=policy.optimizer, opponent_1=exploiter.net, **pool)
    assert first["policy"] > 0.8 > 0.7 > shares["opponent_1"]
    log.check()


def test_rounded_copies_and_leaves_that_equal_another_cost_nothing(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed precision: float32 masters, the bf16 model that is their rounding, an average that has caught up."""
    monkeypatch.setattr(components, "PREDICTED_SIZE_MIN", 0)
    log = Log(store_path)
    learner = Learner(0)
    average = copy.deepcopy(learner.net)
    for _ in range(3):
        learner.train()
        average.load_state_dict(learner.net.state_dict())
        model = copy.deepcopy(learner.net).bfloat16()
        shares = log.commit(masters=learner.net, model=model, average=average)
        parts = log.store.snapshot("latest").components
        assert parts["average"].new_bytes + parts["masters"].new_bytes <= parts["masters"].logical_bytes
        assert shares["model"] < 0.04, "its small leaves, and a few bytes for each large one"
    log.check()


def adapt(base: nn.Linear, adapters: nn.ParameterDict, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Steps of fine-tuning in which the base is frozen and its adapters of low rank learn."""
    for _ in range(count):
        x = torch.randn(32, SIZE)
        optimizer.zero_grad()
        (base(x) + x @ adapters["a"].T @ adapters["b"].T - torch.randn(32, SIZE)).square().mean().backward()
        optimizer.step()


def merge(base: nn.Linear, adapters: nn.ParameterDict) -> None:
    with torch.no_grad():
        base.weight.add_(adapters["b"] @ adapters["a"], alpha=0.5)


def test_low_rank_adapters_leave_the_base_free_and_a_merge_is_a_difference_to_it(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, and as a copy beside the frozen base, which is never stored again."""
    monkeypatch.setattr(components, "PREDICTED_SIZE_MIN", 0)
    log = Log(store_path)
    torch.manual_seed(0)
    base = nn.Linear(SIZE, SIZE, bias=False).requires_grad_(False)
    adapters = nn.ParameterDict({"a": torch.randn(4, SIZE) / 9, "b": torch.zeros(SIZE, 4)})
    optimizer = torch.optim.Adam(adapters.parameters(), lr=1e-5)
    parts = {"base": base, "adapters": adapters, "optimizer": optimizer}
    alone = log.commit(**parts)["base"]
    for _ in range(3):
        adapt(base, adapters, optimizer, 2)
        log.commit(**parts)
        changed = log.store.snapshot("latest").components
        assert changed["base"].new_bytes == 0 < changed["adapters"].new_bytes
        assert changed["adapters"].new_bytes + changed["optimizer"].new_bytes < 0.2 * changed["base"].logical_bytes
    merged = copy.deepcopy(base)
    merge(merged, adapters)
    assert not torch.equal(merged.weight, base.weight)
    shares = log.commit(**parts, merged=merged)
    assert shares["merged"] < 0.75 * alone, "a new component takes what it adds to the base"
    assert log.store.snapshot("latest").components["base"].new_bytes == 0
    del parts["base"]
    shares = log.commit(**parts, base=merged, merged=merged)
    assert log.store.snapshot("latest").new_bytes < 0.01 * alone * 4 * SIZE * SIZE, "moving the merged weights is free"
    adapt(merged, adapters, optimizer, 2)
    merge(merged, adapters)
    shares = log.commit(**parts, base=merged, merged=merged)
    assert shares["base"] < 0.75 * alone, "merged in place, it takes what it adds to its past"
    log.check()


def test_networks_of_different_seeds_are_stored_as_if_there_were_one(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is gained where nothing is near: the same bytes as without looking."""
    found = {}
    for is_near in (True, False):
        if not is_near:
            monkeypatch.setattr(components, "find_near", lambda *arguments: None)
        log = Log(store_path / str(is_near))
        learners = [Learner(seed) for seed in range(4)]
        found[is_near] = log.commit(**{f"net_{number}": each.net for number, each in enumerate(learners)})
        log.check()
    assert found[True] == found[False]


# --- forks ---


@pytest.mark.parametrize("is_told", [True, False], ids=["restored from it", "copied in memory"])
def test_first_commit_of_a_run_is_stored_as_a_difference_to_its_origin(store_path: Path, is_told: bool) -> None:
    """What was restored before; without that, the newest head of another run."""
    origin, unrelated = Log(store_path, run="origin"), Log(store_path, run="unrelated")
    learner, other = Learner(0), Learner(1)
    if is_told:
        whole = origin.commit(net=learner.net, optimizer=learner.optimizer)
    unrelated.commit(net=other.net, optimizer=other.optimizer)
    if not is_told:
        whole = origin.commit(net=learner.net, optimizer=learner.optimizer)
    fork = Log(store_path, run="fork")
    if is_told:
        fork.store.restore(origin.store.timeline()[-1].id)
    learner.train(1)
    shares = fork.commit(net=learner.net, optimizer=learner.optimizer)
    assert shares["net"] < 0.8 * whole["net"], (shares, whole)
    (first,) = fork.store.timeline()
    assert first.parent is None
    for log in (origin, unrelated, fork):
        log.check()


def test_run_beside_another_that_is_damaged_starts_by_itself(store_path: Path) -> None:
    learner = Learner(0)
    origin = Log(store_path, run="origin")
    origin.commit(net=learner.net, optimizer=learner.optimizer)
    for pack in store_path.glob("packs/*/*"):
        pack.unlink()
    fork = Log(store_path, run="fork")
    shares = fork.commit(net=learner.net, optimizer=learner.optimizer)
    assert shares["net"] > 0.8
    assert difference(fork.kept[1], fork.store.restore(1)) is None
    fork.store.close()
    origin.store.close()
