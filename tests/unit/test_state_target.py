"""Restore in place: real modules, optimizers, schedulers, generators and nested values."""

from __future__ import annotations

import copy
import enum
import random
from collections import OrderedDict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from casckpt.errors import MismatchError, UnsupportedStateError
from casckpt.format.structure import decode_structure
from casckpt.state import Captured, RngState, StoredEnum, Target, capture

Pair = namedtuple("Pair", "left right")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Snapshot:
    """A component as stored: bytes only, nothing of the live object."""

    def __init__(self, component: str, value: Any, **options: Any) -> None:
        captured: Captured = capture(component, value, **options)
        self.component = component
        self.structure_bytes = captured.structure_bytes
        self.scalars = captured.scalars
        self.blocks = [bytes(captured.blocks.view(i, 0, captured.blocks.size(i))) for i in range(len(captured.blocks))]

    def target(self, live: Any, **options: Any) -> Target:
        return Target(self.component, live, decode_structure(self.structure_bytes), **options)

    def restore(self, live: Any, **options: Any) -> Target:
        target = self.target(live, **options)
        target.check(self.scalars)
        for block, memory in target.blocks.items():
            memory[:] = self.blocks[block]
        target.finish(self.scalars)
        return target


def state_bytes(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: bytes(t.contiguous().view(-1).view(torch.uint8).tolist()) for name, t in module.state_dict().items()}


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    torch.nn.utils.parametrizations.weight_norm(model[0])
    model(torch.randn(16, 4))
    return model


def test_a_module_is_streamed_into_its_own_memory_without_a_second_copy() -> None:
    source, live = network(1), network(2)
    parameters = list(live.parameters())
    expected = state_bytes(source)
    assert expected != state_bytes(live)
    target = Snapshot("policy", source).restore(live)
    assert state_bytes(live) == expected
    assert all(a is b for a, b in zip(live.parameters(), parameters, strict=True))
    assert sorted(path for paths in target.direct_paths.values() for path in paths) == sorted(
        f"policy/{name}" for name in expected
    )
    assert sorted(target.leaf_paths_touched) == sorted(f"policy/{name}" for name in expected)
    x = torch.randn(3, 4)
    source.eval(), live.eval()
    assert torch.equal(source(x), live(x)), "the parametrization sees the restored tensors"


def test_streaming_into_a_tensor_tells_autograd() -> None:
    live = torch.nn.Linear(2, 2)
    snapshot = Snapshot("m", torch.nn.Linear(2, 2))
    loss = live.weight.pow(2).sum()
    snapshot.restore(live)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def tied() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def test_tied_weights_are_one_block_and_stay_tied() -> None:
    source, live = tied(), tied()
    snapshot = Snapshot("m", source)
    assert sorted(map(len, snapshot.blocks)) == [12, 12, 36]
    snapshot.restore(live)
    assert live[1].weight is live[0].weight
    assert torch.equal(live[0].weight, source[0].weight)


@pytest.mark.parametrize("stored_tied", [True, False])
def test_a_tie_on_one_side_only_is_refused(stored_tied: bool) -> None:
    free = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    source, live = (tied(), free) if stored_tied else (free, tied())
    before = state_bytes(live)
    target = Snapshot("m", source).target(live)
    with pytest.raises(MismatchError, match="memory") as caught:
        target.check(b"\x90")
    assert caught.value.differences[0][0] == "m/1.weight"
    assert state_bytes(live) == before


def test_all_differences_are_reported_together_and_nothing_is_touched() -> None:
    source = {"a": torch.ones(2), "b": np.zeros(3), "c": 1, "gone": torch.ones(1)}
    live = {"a": torch.zeros(3), "b": np.zeros(3, np.float32), "c": torch.zeros(1), "extra": 2}
    snapshot = Snapshot("x", source)
    target = snapshot.target(live)
    assert sorted(d.path for d in target.differences) == ["x/a", "x/b", "x/extra", "x/gone"]
    assert target.blocks == {}
    with pytest.raises(MismatchError, match="4 differences"):
        target.raise_differences()
    with pytest.raises(MismatchError, match="5 differences") as caught:
        target.check(snapshot.scalars)
    assert ("x/c", "a number", "a torch.Tensor") in caught.value.differences


def test_without_strict_all_stored_names_are_restored_and_the_rest_left_alone() -> None:
    live: dict[str, Any] = {"a": torch.zeros(2), "extra": 5, "n": 0}
    target = Snapshot("x", {"gone": [1, torch.ones(1)], "a": torch.ones(2), "n": 7}).restore(live, strict=False)
    assert live["extra"] == 5 and live["n"] == 7 and live["a"].tolist() == [1, 1]
    assert live["gone"][0] == 1 and live["gone"][1].tolist() == [1]
    assert sorted(target.leaf_paths_touched) == ["x/a", "x/gone/0", "x/gone/1", "x/n"]


def test_a_dtype_change_needs_cast_and_reports_the_largest_change() -> None:
    source = torch.arange(12, dtype=torch.float32).reshape(4, 3) / 7
    live = {"w": torch.zeros(4, 3, dtype=torch.bfloat16)}
    snapshot = Snapshot("m", {"w": source})
    assert [d.path for d in snapshot.target(live).differences] == ["m/w"]
    target = snapshot.restore(live, cast=True)
    rounded = source.to(torch.bfloat16)
    assert torch.equal(live["w"], rounded)
    expected = max(abs(a - b) for a, b in zip(source.flatten().tolist(), rounded.flatten().tolist(), strict=True))
    assert target.casts == [("m/w", "float32", "bfloat16", expected)]


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
def test_an_optimizer_goes_on_as_the_original_does(kind: str) -> None:
    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 2)
        options = {"momentum": 0.9} if kind == "SGD" else {}
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1 * seed, **options)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(8.0).reshape(2, 4)).pow(2).sum().backward()
        optimizer.step()

    source, source_optimizer = make(1)
    step(source, source_optimizer)
    model_snapshot, snapshot = Snapshot("m", source), Snapshot("opt", source_optimizer)
    live, optimizer = make(2)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    model_snapshot.restore(live)
    snapshot.restore(optimizer)
    now = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(now, parameters, strict=True))
    for parameter in parameters if kind != "SGD" else []:
        assert optimizer.state[parameter]["step"].dtype == torch.float32
        assert optimizer.state[parameter]["step"].device.type == "cpu"
    step(source, source_optimizer), step(live, optimizer)
    assert state_bytes(live) == state_bytes(source)


def test_optimizer_state_wider_than_its_parameter_keeps_its_bits() -> None:
    def make() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        return parameter, torch.optim.SGD([parameter], lr=0.1)

    parameter, optimizer = make()
    optimizer.state[parameter]["master"] = torch.tensor([1.0009765625, 2.5, -0.0])
    live, live_optimizer = make()
    Snapshot("o", optimizer).restore(live_optimizer)
    restored = live_optimizer.state[live]["master"]
    assert restored.dtype == torch.float32
    assert restored.tolist() == [1.0009765625, 2.5, -0.0] and str(restored[2].item()) == "-0.0"


def test_an_optimizer_over_other_parameters_is_refused_before_anything_is_touched() -> None:
    one = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
    two = torch.optim.Adam(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).parameters())
    snapshot = Snapshot("o", one)
    target = snapshot.target(two)
    with pytest.raises(MismatchError, match="groups"):
        target.check(snapshot.scalars)


def schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    lr = torch.optim.lr_scheduler
    return [
        lr.StepLR(optimizer, 2),
        lr.MultiStepLR(optimizer, [1, 1, 3]),
        lr.CosineAnnealingLR(optimizer, 10),
        lr.OneCycleLR(optimizer, 0.5, 20),
        lr.ReduceLROnPlateau(optimizer, patience=0),
        lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.5)], [2]),
        lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    ]


@pytest.mark.parametrize("which", range(7))
def test_a_scheduler_comes_back_with_its_whole_state(which: int) -> None:
    def make() -> Any:
        return schedulers(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))[which]

    source, live = make(), make()
    arguments = (1.0,) if which == 4 else ()
    for _ in range(3):
        source.optimizer.step()
        source.step(*arguments)
    expected = copy.deepcopy(source.state_dict())
    assert live.state_dict() != expected
    Snapshot("s", source).restore(live)
    assert live.state_dict() == expected
    assert type(live.state_dict().get("milestones")) is type(expected.get("milestones"))


def test_a_grad_scaler_comes_back() -> None:
    source = torch.amp.GradScaler("cpu", init_scale=8.0)
    live = torch.amp.GradScaler("cpu", init_scale=2.0)
    Snapshot("scaler", source).restore(live)
    assert live.state_dict() == source.state_dict() and live.get_scale() == 8.0


def test_extra_state_of_a_module_goes_through_the_module() -> None:
    class Counting(torch.nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)
            self.count = count

        def get_extra_state(self) -> dict[str, Any]:
            return {"count": self.count, "mask": torch.full((2,), self.count)}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.count = state["count"] + int(state["mask"].sum()) - 2 * state["count"]

    source, live = Counting(7), Counting(1)
    Snapshot("m", source).restore(live)
    assert live.count == 7
    assert torch.equal(live.inner.weight, source.inner.weight)


def test_plain_containers_keep_their_identity_and_take_the_values() -> None:
    def make(value: float) -> dict[str, Any]:
        base = np.full(10, value)
        return {
            "tensor": torch.full((2, 2), value),
            "column": torch.full((3, 4), value)[:, 1],
            "base": base,
            "view": base[2:5],
            "back": np.full(4, value)[::-2],
            "pair": Pair(torch.full((1,), value), value),
            "history": [value, value],
            "recent": deque([value], maxlen=3),
            "names": {str(value)},
            "ordered": OrderedDict(a=value),
            "colour": Colour.RED if value else Colour.BLUE,
            "nested": [{"x": np.array(value)}, value],
            "long": bytes([int(value)]) * 5000,
        }

    source, live = make(1.0), make(0.0)
    kept = {key: value for key, value in live.items() if isinstance(value, (list, deque, set, dict, np.ndarray))}
    kept |= {"tensor": live["tensor"], "column": live["column"]}
    before = {key: id(value) for key, value in kept.items()}
    Snapshot("s", source).restore(live)
    assert {key: id(live[key]) for key in kept} == before
    assert live["colour"] is Colour.RED
    assert live["history"] == [1.0, 1.0] and live["recent"] == deque([1.0]) and live["names"] == {"1.0"}
    assert live["pair"].left.item() == 1.0 and live["pair"].right == 1.0 and type(live["pair"]) is Pair
    assert live["base"].tolist() == [1.0] * 10 and live["view"].base is live["base"]
    assert live["column"].tolist() == [1.0] * 3 and live["back"].tolist() == [1.0] * 2
    assert live["nested"][0]["x"] == 1.0 and live["nested"][1] == 1.0 and live["ordered"] == {"a": 1.0}
    assert live["long"] == b"\x01" * 5000


def test_memory_between_strided_leaves_that_is_not_part_of_the_state_is_never_written() -> None:
    table, live_table = np.ones((4, 3)), np.zeros((4, 3))
    snapshot = Snapshot("s", {"a": table[:, 0], "c": table[:, 2]})
    snapshot.restore({"a": live_table[:, 0], "c": live_table[:, 2]})
    assert live_table.tolist() == [[1.0, 0.0, 1.0]] * 4


def test_a_read_only_array_and_an_immutable_root_are_refused() -> None:
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    assert [d.path for d in Snapshot("s", [np.ones(2), None]).target([fixed, None]).differences] == ["s/0"]
    assert Snapshot("s", 5).target(4).differences[0].path == "s"
    assert Snapshot("s", (torch.ones(1), 2)).target((torch.zeros(1), 3)).differences[0].path == "s"
    live = (torch.zeros(1), {"n": 3})
    Snapshot("s", (torch.ones(1), {"n": 2})).restore(live)
    assert live[0].item() == 1.0 and live[1] == {"n": 2}


def test_generators_take_their_state_in_place_and_after_everything_else() -> None:
    def make(seed: int) -> dict[str, Any]:
        torch_generator = torch.Generator()
        torch_generator.manual_seed(seed)
        return {
            "python": random.Random(seed),
            "numpy": np.random.default_rng(seed),
            "philox": np.random.Generator(np.random.Philox(seed)),
            "bits": np.random.SFC64(seed),
            "legacy": np.random.RandomState(seed),
            "torch": torch_generator,
        }

    def draw(generators: dict[str, Any]) -> list[Any]:
        return [
            generators["python"].random(),
            generators["python"].gauss(0, 1),
            generators["numpy"].standard_normal(3).tolist(),
            generators["philox"].integers(0, 100, 3).tolist(),
            generators["bits"].random_raw(),
            generators["legacy"].standard_normal(3).tolist(),
            torch.randn(3, generator=generators["torch"]).tolist(),
        ]

    source, live = make(1), make(2)
    draw(source)
    snapshot = Snapshot("rng", source)
    before = {name: id(generator) for name, generator in live.items()}
    target = snapshot.restore(live)
    assert target.restore_last
    assert draw(live) == draw(source)
    assert {name: id(generator) for name, generator in live.items()} == before


def test_another_algorithm_is_refused_before_anything_is_touched() -> None:
    snapshot = Snapshot("rng", {"g": np.random.Generator(np.random.PCG64(1)), "t": torch.ones(1)})
    live = {"g": np.random.Generator(np.random.Philox(1)), "t": torch.zeros(1)}
    with pytest.raises(MismatchError, match="Philox"):
        snapshot.target(live).check(snapshot.scalars)
    assert live["t"].item() == 0.0


def test_rng_state_brings_back_every_global_generator_and_the_extra_ones() -> None:
    mine = np.random.default_rng(3)
    bundle = RngState(mine=mine)

    def draw() -> list[Any]:
        return [random.random(), np.random.rand(), torch.rand(2).tolist(), mine.random()]

    snapshot = Snapshot("rng", bundle)
    expected = draw()
    assert draw() != expected
    assert snapshot.restore(bundle).restore_last
    assert draw() == expected


def test_an_enum_member_comes_back_as_the_member_of_the_live_class_or_as_a_stored_enum() -> None:
    stored = StoredEnum("Colour", "BLUE", 2)
    assert stored.resolve(Colour) is Colour.BLUE
    with pytest.raises(MismatchError):
        StoredEnum("Colour", "GREEN", 2).resolve(Colour)
    with pytest.raises(MismatchError):
        StoredEnum("Other", "BLUE", 2).resolve(Colour)


def test_an_opaque_leaf_is_refused_before_anything_is_touched() -> None:
    snapshot = Snapshot("s", {"a": torch.ones(1), "o": Colour}, allow_pickle=True)
    live = {"a": torch.zeros(1), "o": None}
    with pytest.raises(UnsupportedStateError, match="s/o"):
        snapshot.target(live).check(snapshot.scalars)
    target = snapshot.target(live)
    target.check(snapshot.scalars, allow_pickle=True)
    for block, memory in target.blocks.items():
        memory[:] = snapshot.blocks[block]
    target.finish(snapshot.scalars, allow_pickle=True)
    assert live["o"] is Colour and live["a"].item() == 1.0


@pytest.mark.parametrize("value", ["text", 3, None, {"a": 1}, [1.0]])
def test_value_where_a_module_has_a_tensor_is_refused_before_anything_is_touched(value: Any) -> None:
    stored = Snapshot("policy", {"bias": torch.ones(2), "weight": value})
    target = stored.target(torch.nn.Linear(4, 2))
    assert [each.path for each in target.differences] == ["policy/weight"]


def test_scalar_for_a_whole_module_is_refused_before_anything_is_touched() -> None:
    assert [each.path for each in Snapshot("policy", 3).target(torch.nn.Linear(4, 2)).differences] == ["policy"]
