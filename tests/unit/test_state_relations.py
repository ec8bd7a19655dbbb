"""Relations: found in states of real optimizers, and right by what the codec makes of them; none where none can be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from casckpt.codec.difference import encode_difference
from casckpt.codec.models import (
    ADAM_WEIGHT,
    CENTERED_STEP,
    FIRST_MOMENT,
    MOMENTUM_WEIGHT,
    NESTEROV_WEIGHT,
    ROUNDING,
    SECOND_MOMENT,
    SQUARES,
)
from casckpt.codec.prediction import Operand, encode_prediction
from casckpt.format.scalars import decode_scalars
from casckpt.format.structure import leaf_places
from casckpt.state import Captured, capture
from casckpt.state.blocks import Blocks
from casckpt.state.relations import CANDIDATE_COUNT_MAX, Place, Relation, Relations, _candidates, find_relations

SIZE = 160  # a square matrix of 100 KiB is a large block

Plain = dict[tuple[str, int], tuple[bytes, int]]  # bytes and item size of each block


def model(*, layer_count: int = 2, is_biased: bool = True, size: int = SIZE) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(size, size, bias=is_biased) for _ in range(layer_count)))


def train(module: torch.nn.Module, *optimizers: torch.optim.Optimizer, count: int = 1) -> None:
    for _ in range(count):
        loss = module(torch.randn(64, SIZE)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def captures(**components: Any) -> dict[str, Captured]:
    return {name: capture(name, value) for name, value in components.items()}


def bytes_of(captured: dict[str, Captured]) -> Plain:
    return {
        (name, block): (bytes(each.blocks.view(block, 0, each.blocks.size(block))), each.blocks[block][1])
        for name, each in captured.items()
        for block in range(len(each.blocks))
    }


def block_at(captured: dict[str, Captured], path: str) -> Place:
    name = path.split("/")[0]
    structure = captured[name].structure
    (leaf,) = (place.leaf for place in leaf_places(structure, name) if place.path == path)
    return Place(name, structure.leaves[leaf].block)


def share(place: Place, relation: Relation, old: Plain, new: Plain) -> float:
    """What the codec takes by a relation, as a share of the block; 1 where it does not pay."""
    operands = []
    for each in relation.operands:
        chunk, itemsize = (old if each.is_before else new)[each.component, each.block]
        operands.append(Operand((memoryview(chunk),), itemsize))
    plain = memoryview(new[place.component, place.block][0])
    encoded = encode_prediction(plain, relation.models, operands, ceiling=len(plain))
    return 1.0 if encoded is None else (encoded.stored_size + len(encoded.params)) / len(plain)


def kinds(relations: Relations, place: Place) -> list[int]:
    return [relation.kind for relation in relations.of(place.component, place.block)]


def best(place: Place, relations: Relations, old: Plain, new: Plain) -> float:
    return min(share(place, each, old, new) for each in relations.of(place.component, place.block))


def step_apart(
    tree: Callable[[torch.nn.Module, torch.optim.Optimizer], dict[str, Any]],
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Captured], Relations, Plain, Plain]:
    """A state, its relations to that of one step before, and the plain bytes of both."""
    train(module, optimizer, count=3)
    captured = captures(**tree(module, optimizer))
    old, before = bytes_of(captured), find_relations(captured)
    train(module, optimizer)
    captured = captures(**tree(module, optimizer))
    return captured, find_relations(captured, before), old, bytes_of(captured)


def live(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"policy": module, "optimizer": optimizer}


def one_component(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tree = {"agent": {"nets": [module.state_dict()]}, "algo": {"opt": optimizer.state_dict()}, "seed": 7}
    return {"learner": tree}


LEAF = torch.zeros(300, 300)
GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0]}
SLOT = {"step": 3, "exp_avg": LEAF, "exp_avg_sq": LEAF + 1}
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


# --- optimizers ---


@pytest.mark.few(1)
@pytest.mark.parametrize("tree", [live, one_component])
def test_every_large_leaf_of_an_adamw_step_follows_from_others(tree: Callable[..., dict[str, Any]]) -> None:
    module = model()
    _, relations, old, new = step_apart(tree, module, torch.optim.AdamW(module.parameters(), **ADAMW))
    large = {Place(*key) for key, (plain, _) in new.items() if len(plain) >= 64 * 1024}
    assert set(relations) == large
    assert len(relations) == len(large) == 6  # two weights with two moments each
    found = [kind for place in large for kind in kinds(relations, place)]
    assert sorted(found) == sorted([SECOND_MOMENT, ADAM_WEIGHT, FIRST_MOMENT] * 2)
    for place in large:
        if kinds(relations, place) != [FIRST_MOMENT]:  # which needs bf16 gradients
            assert best(place, relations, old, new) < 0.05  # second moments of the fourth step


def test_groups_with_own_decay_keep_their_parameters() -> None:
    module = model(layer_count=3)
    first, *others = module
    groups = [
        {"params": [parameter for layer in others for parameter in layer.parameters()], "weight_decay": 0.5},
        {"params": first.parameters(), "weight_decay": 0.0, "lr": 1e-2},
    ]
    captured, relations, old, new = step_apart(live, module, torch.optim.AdamW(groups, lr=1e-3))
    moments = [place for place in relations if place.component == "optimizer"]
    assert len(moments) == 6
    for name in ("0.weight", "1.weight", "2.weight"):  # the order of groups is not that of the module
        place = block_at(captured, f"policy/{name}")
        assert set(kinds(relations, place)) == {ADAM_WEIGHT}
        assert best(place, relations, old, new) < 0.02


@pytest.mark.few(1)
@pytest.mark.parametrize("trained", [slice(0, 2), slice(2, 4), slice(1, 3)])
def test_frozen_layers_of_equal_shape_leave_the_right_candidate(trained: slice) -> None:
    module = model(layer_count=4, is_biased=False)
    parameters = list(module.parameters())
    captured, relations, old, new = step_apart(live, module, torch.optim.AdamW(parameters[trained], **ADAMW))
    for number in range(4)[trained]:
        place = block_at(captured, f"policy/{number}.weight")
        assert len(relations.of(*place[:2])) <= 3
        assert best(place, relations, old, new) < 0.01


@pytest.mark.full
def test_candidates_are_bounded() -> None:
    module = model(layer_count=14, is_biased=False)
    parameters = list(module.parameters())[4:11]
    captured, relations, *_ = step_apart(live, module, torch.optim.AdamW(parameters, **ADAMW))
    places = [block_at(captured, f"policy/{number}.weight") for number in range(14)]
    counts = [len(relations.of(*place[:2])) for place in places]
    assert max(counts) == CANDIDATE_COUNT_MAX and min(counts) >= 1


@pytest.mark.full
def test_one_optimizer_over_two_components_and_targets_beside_them() -> None:
    actor, critic = model(), model()
    both = torch.nn.Sequential(actor, critic)
    optimizer = torch.optim.AdamW(both.parameters(), **ADAMW)
    captured, relations, old, new = step_apart(
        lambda module, optimizer: {"actor": actor, "critic": critic, "optimizer": optimizer}, both, optimizer
    )
    for name in ("actor/0.weight", "actor/1.weight", "critic/0.weight", "critic/1.weight"):
        assert best(block_at(captured, name), relations, old, new) < 0.01
    target = copy.deepcopy(both)
    captured, relations, old, new = step_apart(
        lambda module, optimizer: {"net": both, "target": target, "optimizer": optimizer}, both, optimizer
    )
    for name in ("net/0.0.weight", "net/1.1.weight"):
        assert best(block_at(captured, name), relations, old, new) < 0.01


def test_two_optimizers_leave_a_candidate_each() -> None:
    actor, critic = model(is_biased=False), model(is_biased=False)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3 * (1 + n)) for n, each in enumerate((actor, critic))]
    both = torch.nn.Sequential(actor, critic)
    tree = {"actor": actor, "critic": critic, "optimizers": dict(zip("ab", optimizers, strict=True))}
    train(both, *optimizers, count=3)
    captured = captures(**tree)
    old, before = bytes_of(captured), find_relations(captured)
    train(both, *optimizers)
    captured = captures(**tree)
    relations, new = find_relations(captured, before), bytes_of(captured)
    for name in ("actor/0.weight", "critic/1.weight"):
        place = block_at(captured, name)
        assert kinds(relations, place) == [ADAM_WEIGHT, ADAM_WEIGHT]
        assert best(place, relations, old, new) < 0.01


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


def test_tied_weights_count_once() -> None:
    module = Tied()
    captured, relations, old, new = step_apart(live, module, torch.optim.AdamW(module.parameters(), **ADAMW))
    for name in ("first", "third"):
        place = block_at(captured, f"policy/{name}.weight")
        assert len(relations.of(*place[:2])) == 1
        assert best(place, relations, old, new) < 0.01


def test_decay_is_tried_both_ways_only_where_the_group_does_not_say() -> None:
    module = model(layer_count=1)
    captured, relations, old, new = step_apart(
        one_component, module, torch.optim.Adam(module.parameters(), lr=1e-3, weight_decay=0.1)
    )
    place = block_at(captured, "learner/agent/nets/0/0.weight")
    (relation,) = relations.of(*place[:2])
    assert [each.constants[0] for each in relation.models] == [1.0]
    assert share(place, relation, old, new) < 0.01

    def without_the_name(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        tree = one_component(module, optimizer)
        for group in tree["learner"]["algo"]["opt"]["param_groups"]:
            del group["decoupled_weight_decay"]
        return tree

    captured, relations, old, new = step_apart(
        without_the_name, module, torch.optim.AdamW(module.parameters(), **ADAMW)
    )
    (relation,) = relations.of(*place[:2])
    assert [each.constants[0] for each in relation.models] == [1 - 1e-4, 1.0]
    assert share(place, relation, old, new) < 0.01


def test_amsgrad_divides_by_the_largest_second_moment() -> None:
    module = model(layer_count=1)
    captured, relations, old, new = step_apart(
        live, module, torch.optim.AdamW(module.parameters(), amsgrad=True, **ADAMW)
    )
    place = block_at(captured, "policy/0.weight")
    (relation,) = relations.of(*place[:2])
    assert relation.operands[2] == block_at(captured, "optimizer/state/0/max_exp_avg_sq")
    assert share(place, relation, old, new) < 0.01


@pytest.mark.parametrize("is_nesterov", [False, True])
def test_sgd_with_momentum(is_nesterov: bool) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9, nesterov=is_nesterov, weight_decay=0.01)
    captured, relations, old, new = step_apart(live, module, optimizer)
    for number in (0, 1):
        place = block_at(captured, f"policy/{number}.weight")
        assert kinds(relations, place) == [NESTEROV_WEIGHT if is_nesterov else MOMENTUM_WEIGHT]
        assert best(place, relations, old, new) < 0.03
    assert kinds(relations, block_at(captured, "optimizer/state/0/momentum_buffer")) == [FIRST_MOMENT]


def test_dampening_is_in_the_buffer_of_bf16_gradients() -> None:
    module = model(layer_count=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9, dampening=0.3)
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient.bfloat16().float())
    captured, relations, old, new = step_apart(live, module, optimizer)
    buffer, weight = block_at(captured, "optimizer/state/0/momentum_buffer"), block_at(captured, "policy/0.weight")
    assert (kinds(relations, buffer), kinds(relations, weight)) == ([FIRST_MOMENT], [MOMENTUM_WEIGHT])
    (relation,) = relations.of(*buffer[:2])
    assert [each.constants for each in relation.models] == [(0.9, 1 - 0.3)]
    assert share(buffer, relation, old, new) < 0.5
    assert best(weight, relations, old, new) < 0.03


RMSPROP: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "single": ({"foreach": False}, {"square_avg": SQUARES}),
    "foreach": ({"foreach": True}, {"square_avg": SQUARES}),
    "decay": ({"weight_decay": 0.1}, {"square_avg": SQUARES}),
    "momentum": ({"momentum": 0.9}, {"square_avg": SQUARES, "weight": MOMENTUM_WEIGHT}),
    "centered": ({"centered": True}, {"square_avg": SECOND_MOMENT, "weight": CENTERED_STEP}),
    "centered with momentum": (
        {"centered": True, "momentum": 0.9, "foreach": False, "weight_decay": 0.1},
        {"square_avg": SECOND_MOMENT, "momentum_buffer": CENTERED_STEP, "weight": MOMENTUM_WEIGHT},
    ),
}


@pytest.mark.parametrize("is_tf_like", [False, True])
@pytest.mark.parametrize("name", RMSPROP)
def test_rmsprop_predicts_squares_and_what_is_centered(name: str, is_tf_like: bool) -> None:
    options, expected = RMSPROP[name]
    make: Any = torch.optim.RMSprop
    if is_tf_like:
        make = pytest.importorskip("stable_baselines3.common.sb2_compat.rmsprop_tf_like").RMSpropTFLike
        options = {key: value for key, value in options.items() if key != "foreach"} | {"eps": 1e-5}
    module = model(layer_count=1)
    captured, relations, old, new = step_apart(live, module, make(module.parameters(), lr=1e-3, alpha=0.5, **options))
    for leaf, kind in expected.items():
        place = block_at(captured, "policy/0.weight" if leaf == "weight" else f"optimizer/state/0/{leaf}")
        assert kinds(relations, place) == [kind]
        plain, past = (memoryview(each[place.component, place.block][0]) for each in (new, old))
        difference = encode_difference(plain, past, 4, ceiling=len(plain))
        size = len(plain) if difference is None else difference.stored_size
        assert best(place, relations, old, new) < 0.5 * size / len(plain)
    found = {place for place in relations if set(kinds(relations, place)) - {FIRST_MOMENT}}
    assert len(found) == len(expected)


def test_rmsprop_in_bf16_or_of_odd_numbers_has_no_relation_that_the_codec_lacks() -> None:
    module = model(size=2 * SIZE).bfloat16()
    tree = live(module, torch.optim.RMSprop(module.parameters(), centered=True))
    module(torch.ones(1, 2 * SIZE).bfloat16()).sum().backward()
    tree["optimizer"].step()
    relations = find_relations(captures(**tree))
    assert {kind for place in relations for kind in kinds(relations, place)} == {SECOND_MOMENT}
    group = {"lr": 1e-3, "alpha": 0.9, "eps": 1e-8, "centered": False, "momentum": 0.0, "params": [0]}
    slot = {"step": 3, "square_avg": LEAF}
    for odd in ({"alpha": "a"}, {"eps": None}, {"lr": "fast"}):
        tree = {"state": {0: slot}, "param_groups": [group | odd]}
        assert len(find_relations(captures(x={"w": LEAF + 2, "optimizer": tree}))) == 0
    tree = {"state": {0: slot}, "param_groups": [group]}
    assert len(find_relations(captures(x={"w": LEAF + 2, "optimizer": tree}))) == 1


def test_bf16_training_relates_weights_and_second_moments() -> None:
    """First moments need a gradient of half their size, which bf16 ones do not have."""
    module = model(size=2 * SIZE).bfloat16()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    for _ in range(4):
        before = captures(**live(module, optimizer))
        old, known = bytes_of(before), find_relations(before)
        optimizer.zero_grad()
        module(torch.randn(64, 2 * SIZE).bfloat16()).square().mean().backward()
        optimizer.step()
    captured = captures(**live(module, optimizer))
    relations, new = find_relations(captured, known), bytes_of(captured)
    assert sorted(kind for place in relations for kind in kinds(relations, place)) == sorted(
        [SECOND_MOMENT, ADAM_WEIGHT] * 2
    )
    for place in relations:
        assert best(place, relations, old, new) < 0.1


def test_sgd_without_momentum_has_none() -> None:
    module = model()
    _, relations, *_ = step_apart(live, module, torch.optim.SGD(module.parameters(), lr=0.5))
    assert len(relations) == 0


# --- steps and rates ---


SCHEDULED: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any], tuple[str, ...]]] = {
    "rate": (torch.optim.AdamW, ADAMW, torch.optim.lr_scheduler.ExponentialLR, {"gamma": 0.7}, ("exp_avg_sq",)),
    "rate and betas": (
        *(torch.optim.AdamW, ADAMW),
        *(torch.optim.lr_scheduler.OneCycleLR, {"max_lr": 1e-3, "total_steps": 12}),
        ("exp_avg_sq",),
    ),
    "rate and momentum": (
        *(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        *(torch.optim.lr_scheduler.OneCycleLR, {"max_lr": 0.5, "total_steps": 12}),
        (),
    ),
}


@pytest.mark.parametrize("is_before_commit", [False, True])
@pytest.mark.parametrize("name", SCHEDULED)
def test_what_a_scheduler_moves_is_tried_from_both_sides_of_the_step(name: str, is_before_commit: bool) -> None:
    make, options, make_scheduler, schedule, moments = SCHEDULED[name]
    module = model(layer_count=1)
    optimizer = make(module.parameters(), **options)
    scheduler = make_scheduler(optimizer, **schedule)

    def commit(before: Relations | None) -> tuple[Relations, dict[str, Captured]]:
        train(module, optimizer)
        if is_before_commit:
            scheduler.step()
        captured = captures(**live(module, optimizer))
        relations = find_relations(captured, before)
        if not is_before_commit:
            scheduler.step()
        return relations, captured

    before = None
    for _ in range(3):
        before, captured = commit(before)
    old = bytes_of(captured)
    relations, captured = commit(before)
    place = block_at(captured, "policy/0.weight")
    assert len(relations.of(*place[:2])[0].models) == 2
    assert best(place, relations, old, bytes_of(captured)) < 0.01
    for moment in moments:
        place = block_at(captured, f"optimizer/state/0/{moment}")
        assert best(place, relations, old, bytes_of(captured)) < 0.1


@pytest.mark.parametrize("count", [0, 2, 4])
def test_other_than_one_step_apart_is_no_relation(count: int) -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    train(module, optimizer)
    before = find_relations(captures(**live(module, optimizer)))
    assert len(before) == 6
    train(module, optimizer, count=count)
    between = find_relations(captures(**live(module, optimizer)), before)
    assert len(between) == 0
    train(module, optimizer)
    assert len(find_relations(captures(**live(module, optimizer)), between)) == 6


def test_component_of_another_structure_has_no_relation_with_its_past() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    train(module, optimizer)
    before = find_relations(captures(**live(module, optimizer)))
    train(module, optimizer)
    captured = captures(policy={"net": module}, optimizer=optimizer)
    relations = find_relations(captured, before)
    assert {place.component for place in relations} == {"optimizer"}
    assert {place.component for place in find_relations(captures(policy=module), before)} == set()


def test_first_step_has_no_past() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    before = find_relations(captures(**live(module, optimizer)))
    train(module, optimizer)
    relations = find_relations(captures(**live(module, optimizer)), before)
    assert [place for place in relations if place.component == "optimizer"] == []


def test_trees_are_walked_once_and_only_numbers_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    train(module, optimizer)
    captured = captures(**live(module, optimizer))
    relations = find_relations(captured)
    monkeypatch.setattr("casckpt.state.relations.find_optimizers", None)  # would fail if called
    read: list[int] = []
    view = Blocks.view

    def noted(blocks: Blocks, index: int, start: int, stop: int) -> memoryview:
        read.append(stop - start)
        return view(blocks, index, start, stop)

    monkeypatch.setattr(Blocks, "view", noted)
    decoded: list[bytes] = []
    decode = decode_scalars
    monkeypatch.setattr("casckpt.state.relations.decode_scalars", lambda block: decoded.append(block) or decode(block))
    for _ in range(3):
        train(module, optimizer)
        now = live(module, optimizer)
        captured = {name: capture(name, value, previous=captured[name]) for name, value in now.items()}
        relations = find_relations(captured, relations)
        assert len(relations) == 6
    assert decoded == [captured["optimizer"].scalars] * 3
    assert set(read) == {4}  # steps
    assert len(read) == 3 * 4  # weights and biases of two layers


# --- rounded copies ---


def test_bf16_copy_of_a_master_is_its_rounding() -> None:
    masters = {f"layer{number}": torch.randn(300, 300) for number in range(3)}
    copies = {name: tensor.bfloat16() for name, tensor in masters.items()}
    for components in ({"x": {"masters": masters, "model": copies}}, {"optimizer": masters, "policy": copies}):
        captured = captures(**components)
        relations = find_relations(captured)
        new = bytes_of(captured)
        assert len(relations) == 3
        for place in relations:
            (relation,) = relations.of(*place[:2])
            assert relation.kind == ROUNDING
            assert share(place, relation, {}, new) < 0.001


def test_moments_are_no_masters() -> None:
    """bf16 weights with float32 moments: as many, and of the same shapes, but no rounding leads to them."""
    moments = {
        number: {"step": torch.tensor(3.0), "exp_avg": torch.randn(300, 300), "exp_avg_sq": torch.rand(300, 300)}
        for number in range(2)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0, 1]}
    weights = {number: torch.randn(300, 300).bfloat16() for number in range(2)}
    relations = find_relations(captures(policy=weights, optimizer={"state": moments, "param_groups": [group]}))
    found = [kind for place in relations for kind in kinds(relations, place)]
    assert sorted(found) == sorted([SECOND_MOMENT, ADAM_WEIGHT, FIRST_MOMENT] * 2)


def test_other_number_of_copies_or_another_order_is_no_relation() -> None:
    masters = [torch.randn(300, 300) for _ in range(3)]
    assert len(find_relations(captures(x=masters, y=[masters[0].bfloat16()] * 2))) == 0
    assert len(find_relations(captures(x=masters, y=[each.bfloat16().T.contiguous().T for each in masters]))) == 0


def test_master_in_the_optimizers_state_is_a_weight_and_has_a_rounded_copy() -> None:
    slots = {number: SLOT | {"master": LEAF + number} for number in range(2)}
    tree = {"state": slots, "param_groups": [GROUP | {"params": [0, 1]}]}
    captured = captures(policy=[(LEAF + number).bfloat16() for number in range(2)], optimizer=tree)
    relations = find_relations(captured)
    master = block_at(captured, "optimizer/state/1/master")
    (relation,) = relations.of(*master[:2])
    assert relation.kind == ADAM_WEIGHT
    relation, *_ = relations.of("policy", 1)
    assert (relation.kind, relation.operands) == (ROUNDING, (master,))


# --- what is left alone ---


def test_small_leaves_and_views_have_no_relation() -> None:
    base = torch.randn(2, 200, 200)
    halves = {"a": base[0], "b": base[1], "whole": base}  # one block, which the first two do not fill
    small = {"c": torch.randn(50, 50)}
    copies = {name: leaf.bfloat16() for name, leaf in {**halves, **small}.items() if name != "whole"}
    assert len(find_relations(captures(x={**halves, **small}, y=copies))) == 0


ODD = {
    "no groups": {"state": {0: SLOT}, "param_groups": []},
    "groups that are numbers": {"state": {0: SLOT}, "param_groups": [1, 2]},
    "group without parameters": {"state": {0: SLOT}, "param_groups": [{"lr": 1.0}]},
    "parameters that are tensors": {"state": {0: SLOT}, "param_groups": [{"lr": 1.0, "params": [LEAF]}]},
    "parameters that are a number": {"state": {0: SLOT}, "param_groups": [GROUP | {"params": 0}]},
    "parameters that are lists": {"state": {0: SLOT}, "param_groups": [GROUP | {"params": [[0], {1}, None, 2.5]}]},
    "unknown parameters": {"state": {0: SLOT}, "param_groups": [GROUP | {"params": [5]}]},
    "state that is a list": {"state": [SLOT], "param_groups": [GROUP]},
    "slot that is a tensor": {"state": {0: LEAF}, "param_groups": [GROUP]},
    "one beta": {"state": {0: SLOT}, "param_groups": [GROUP | {"betas": (0.9,)}]},
    "betas that are text": {"state": {0: SLOT}, "param_groups": [GROUP | {"betas": ("a", "b")}]},
    "betas that are tensors": {"state": {0: SLOT}, "param_groups": [GROUP | {"betas": (LEAF, LEAF)}]},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_trees_have_no_relation(name: str) -> None:
    assert len(find_relations(captures(x={"w": LEAF + 2, "optimizer": ODD[name]}))) == 0


HALF_ODD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eps that is text": ({}, {"eps": "small"}),
    "rate that is text": ({}, {"lr": "fast"}),
    "rate that is a huge integer": ({}, {"lr": 10**400}),
    "rate that is a matrix": ({}, {"lr": torch.zeros(2, 2)}),
    "step that is missing": ({"step": None}, {}),
    "step that is a matrix": ({"step": LEAF + 3}, {}),
    "step of zero": ({"step": 0}, {}),
    "beta of one": ({}, {"betas": (1.0, 1.0)}),
}


@pytest.mark.parametrize("name", HALF_ODD)
def test_odd_numbers_leave_what_does_not_need_them(name: str) -> None:
    slot, group = HALF_ODD[name]
    tree = {"state": {0: SLOT | slot}, "param_groups": [GROUP | group]}
    relations = find_relations(captures(x={"w": LEAF + 2, "optimizer": tree}))
    found = [kind for place in relations for kind in kinds(relations, place)]
    assert sorted(found) == [SECOND_MOMENT, FIRST_MOMENT]


@pytest.mark.parametrize("name", ["step", "lr"])
def test_numbers_may_be_tensors_or_python_numbers(name: str) -> None:
    expected = None
    for value in (3, 3.0, torch.tensor(3.0), torch.tensor(3), torch.tensor(3.0, dtype=torch.float64)):
        slot, group = (SLOT | {"step": value}, GROUP) if name == "step" else (SLOT, GROUP | {"lr": value})
        relations = find_relations(captures(w=LEAF + 2, optimizer={"state": {0: slot}, "param_groups": [group]}))
        (relation,) = relations.of("w", 0)
        expected = expected or relation.models
        assert relation.models == expected


def test_a_leaf_among_many_of_its_form_has_few_candidates() -> None:
    """However many there are: each costs a trial, and all of them at once would make the search quadratic."""
    for position in (0, 1, 500, 1999):
        found = _candidates(position, 2000, 1000)
        assert 1 <= len(found) <= CANDIDATE_COUNT_MAX + 1
        assert all(0 <= each < 1000 for each in found)
    assert _candidates(7, 10, 10) == [7]
