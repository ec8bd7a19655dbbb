"""Capturing: what is refused and where, what is shared, what is copied, and what it costs to ask again."""

from __future__ import annotations

import collections
import dataclasses
import enum
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from casckpt.errors import NotFoundError, UnsupportedStateError
from casckpt.state import Assembly, StoredEnum, capture, leaf_places


def restore(value: Any, **options: Any) -> Any:
    captured = capture("c", value)
    assembly = Assembly(captured.structure, "c", **options)
    for block, memory in assembly.blocks.items():
        memory[:] = captured.blocks.view(block, 0, len(memory))
    return assembly.tree(captured.scalars)


class Plain(torch.Tensor):
    pass


@dataclasses.dataclass
class Config:
    rate: float = 0.1


def cycle() -> Any:
    inner: dict[str, Any] = {"t": torch.ones(1)}
    inner["back"] = [inner, torch.ones(1)]
    return inner


def deep(levels: int) -> Any:
    value: Any = torch.ones(1)
    for _ in range(levels):
        value = [value]
    return value


REFUSED = {
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qint8"),
    "sparse": (lambda: torch.ones(2, 2).to_sparse(), "sparse"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    "meta": (lambda: torch.ones(2, device="meta"), "meta"),
    "lazy": (lambda: torch.nn.LazyLinear(2).weight, "cannot be stored"),
    "subclass": (lambda: torch.ones(2).as_subclass(Plain), "cannot be stored"),
    "object array": (lambda: np.array([None, "x"]), "object"),
    "masked": (lambda: np.ma.masked_array([1, 2], [True, False]), "cannot be stored"),
    "object": (object, "allow_pickle"),
    "dataclass": (Config, "Config"),
    "function": (lambda: len, "cannot be stored"),
    "class": (lambda: Config, "cannot be stored"),
    "set of objects": (lambda: {object()}, "object"),
    "lambda factory": (lambda: collections.defaultdict(lambda: 3, a=1), "default factory"),
    "enum key": (lambda: {enum.Enum("E", "A").A: 1}, "dict keys"),
    "numpy key": (lambda: {np.int64(3): 1}, "dict keys"),
    "long key": (lambda: {"k" * 5000: 1}, "4096"),
    "cycle": (cycle, "contains itself"),
    "depth": (lambda: deep(257), "256"),
    "dict subclass": (lambda: type("D", (dict,), {})(a=1), "cannot be stored"),
    "system random": (random.SystemRandom, "cannot be stored"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's, at making such tensors
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stored_is_refused_with_its_path(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(UnsupportedStateError, match=reason) as caught:
        capture("agent", {"parts": [torch.ones(1), make()]})
    assert caught.value.path.startswith("agent/parts/1")
    assert str(caught.value).startswith(caught.value.path)


class Reduced:
    """An object whose own code raises when it is pickled."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> str:
        raise self.error


def test_object_that_cannot_be_pickled_is_refused_with_what_its_own_code_raised() -> None:
    error = KeyError("handle")
    with pytest.raises(
        UnsupportedStateError, match=r"^agent/x: .*Reduced cannot be pickled \(KeyError: 'handle'\)"
    ) as caught:
        capture("agent", {"x": Reduced(error)}, allow_pickle=True)
    assert caught.value.__cause__ is error
    with pytest.raises(MemoryError):  # no fault of the object
        capture("agent", {"x": Reduced(MemoryError())}, allow_pickle=True)


def test_the_deepest_tree_that_is_allowed_comes_back() -> None:
    back = restore(deep(256))
    for _ in range(256):
        (back,) = back
    assert back.item() == 1.0


def test_tied_and_overlapping_tensors_are_stored_once_and_equal_ones_separately() -> None:
    weight = torch.arange(8.0)
    state = {"a": weight, "b": weight, "view": weight[2:5], "np": weight.numpy()[6:], "copy": weight.clone()}
    captured = capture("c", state)
    assert captured.structure.blocks == [(32, 4), (32, 4)]
    back = restore(state)
    assert back["a"] is back["b"]
    back["a"][:] = 0
    assert back["view"].tolist() == [0, 0, 0] and back["np"].tolist() == [0, 0]
    assert back["copy"].tolist() == list(range(8))


def test_disjoint_views_of_one_storage_are_stored_apart_and_only_the_touched_part() -> None:
    big = torch.arange(1000.0)
    captured = capture("c", {"x": big[10:20], "y": big[20:30]})
    assert [size for size, _ in captured.structure.blocks] == [40, 40]
    back = restore({"x": big[10:20], "y": big[20:30]})
    assert back["x"].untyped_storage().data_ptr() != back["y"].untyped_storage().data_ptr()


def test_a_lone_column_is_captured_contiguous_and_two_together_as_they_lie() -> None:
    table = torch.arange(20.0).reshape(4, 5)
    assert capture("c", table[:, 1]).structure.blocks == [(16, 4)]
    assert capture("c", [table[:, 1], table[:, 3]]).structure.blocks == [((3 * 5 + 3) * 4, 4)]
    back = restore([table[:, 1], table[:, 3]])
    assert back[0].stride() == (5,) and back[1].tolist() == [3.0, 8.0, 13.0, 18.0]


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (torch.ones(1).expand(1000, 7), 4),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), 480),
        (torch.arange(6.0).reshape(2, 3).t(), 24),
        (torch.arange(10.0).unfold(0, 4, 1), 40),
        (torch.tensor(3.0), 4),
    ],
)
def test_a_layout_without_holes_is_kept_with_its_strides(tensor: torch.Tensor, size: int) -> None:
    assert capture("c", tensor).structure.blocks == [(size, 4)]
    back = restore(tensor)
    assert back.stride() == tensor.stride() and torch.equal(back, tensor)


def test_a_tensor_of_more_than_two_gibibytes_is_viewed_without_being_touched() -> None:
    size = (2 << 30) + 12
    memory = np.zeros(size, np.uint8)  # untouched pages: costs address space only
    memory[-3:] = [1, 2, 3]
    captured = capture("c", {"big": torch.from_numpy(memory), "same": memory})
    assert captured.structure.blocks == [(size, 1)]
    assert bytes(captured.blocks.view(0, size - 3, size)) == b"\x01\x02\x03"


def test_pieces_of_a_strided_leaf_are_bounded_copies_of_the_right_bytes() -> None:
    array = np.arange(7 * 6 * 5, dtype=np.int32).reshape(7, 6, 5)[:, ::2, 1::3]
    expected = array.tobytes()
    for value in (array, torch.from_numpy(np.arange(7 * 6 * 5, dtype=np.int32)).reshape(7, 6, 5)[:, ::2, 1::3]):
        blocks = capture("c", value).blocks
        assert blocks.size(0) == len(expected)
        for start in range(0, len(expected), 5):
            for stop in (start, start + 1, start + 4, start + 37, len(expected)):
                stop = min(max(stop, start), len(expected))
                assert bytes(blocks.view(0, start, stop)) == expected[start:stop]


def test_a_restored_value_never_aliases_what_it_came_from() -> None:
    source = {"t": torch.zeros(3), "n": np.zeros(3), "l": [1]}
    back = restore(source)
    back["t"][:], back["n"][:], back["l"][0] = 1, 1, 2
    assert source["t"].tolist() == [0, 0, 0] and source["n"].tolist() == [0, 0, 0] and source["l"] == [1]


def test_version_counters_name_the_tensor_that_moved() -> None:
    model = torch.nn.Linear(2, 2)
    captured = capture("policy", {"net": model, "x": torch.ones(1)})
    assert captured.moved() == []
    with torch.no_grad():
        model.bias.add_(1)
    assert captured.moved() == ["policy/net/bias"]


def test_the_structure_is_equal_between_steps_and_reused_when_nothing_changed_its_shape() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": 1, "returns": [1.0]}
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    first = capture("c", state)
    optimizer.step()
    state |= {"step": 2, "returns": [1.0, 2.0]}
    second = capture("c", state, previous=first)
    assert second.structure_bytes is first.structure_bytes
    assert capture("c", state).structure_bytes == first.structure_bytes
    assert second.scalars != first.scalars
    state["extra"] = np.ones(2)
    third = capture("c", state, previous=second)
    assert third.structure_bytes == capture("c", state).structure_bytes != first.structure_bytes


CHANGES = {
    "nothing": lambda row, key: None,
    "transposed in place": lambda row, key: row[key].t_(),
    "resized in place": lambda row, key: row[key].resize_(3, 2),
    "other memory": lambda row, key: setattr(row[key], "data", torch.full((4, 3), 5.0)),
    "gradient": lambda row, key: row[key].requires_grad_(),
    "parameter": lambda row, key: row.__setitem__(key, torch.nn.Parameter(row[key], requires_grad=False)),
    "dtype of the same memory": lambda row, key: row.__setitem__(key, row[key].view(torch.int32)),
    "column": lambda row, key: row.__setitem__(key, row[key][:, 1]),
    "tied": lambda row, key: row.__setitem__(key, row["2"]),
    "an array": lambda row, key: row.__setitem__(key, row[key].numpy()),
    "conjugate": lambda row, key: row.__setitem__(key, torch.ones(2, dtype=torch.complex64).conj()),
    "negative": lambda row, key: row.__setitem__(key, torch.ones(2, dtype=torch.complex64).conj().imag),
    "gone": lambda row, key: row.pop(key),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_capture_that_knows_an_earlier_one_says_what_one_without_it_says(change: str) -> None:
    row: dict[str, Any] = {str(number): torch.full((4, 3), float(number)) for number in range(12)}
    before = capture("c", row)
    CHANGES[change](row, "7")
    known, fresh = capture("c", row, previous=before), capture("c", row)
    assert known.structure_bytes == fresh.structure_bytes
    assert known.blocks.sizes == fresh.blocks.sizes
    for block in range(len(fresh.blocks)):
        size = fresh.blocks.size(block)
        assert known.blocks.view(block, 0, size) == fresh.blocks.view(block, 0, size)
    assert (known.structure_bytes is before.structure_bytes) == (change in ("nothing", "other memory"))
    row["0"].add_(1)
    assert known.moved() == ["c/0"]


def test_a_state_without_torch_and_numpy_imports_neither() -> None:
    code = (
        "import sys; from casckpt.state import *\n"
        "from random import Random\n"
        "c = capture('c', {'a': [1, 2.0], 'b': b'x' * 9000, 'r': Random(1), 's': RngState()})\n"
        "a = Assembly(c.structure, 'c')\n"
        "for i, m in a.blocks.items(): m[:] = c.blocks.view(i, 0, len(m))\n"
        "t = Target('c', {'a': [0], 'b': b'', 'r': Random(2), 's': RngState()}, c.structure)\n"
        "for i, m in t.blocks.items(): m[:] = c.blocks.view(i, 0, len(m))\n"
        "t.finish(c.scalars); assert a.tree(c.scalars)['a'] == [1, 2.0]\n"
        "s = Staging(); k = s.stage([c]); assert bytes(k[0].blocks.view(0, 0, 9)) == b'x' * 9\n"
        "print(sorted({'torch', 'numpy', 'pickle'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_an_unknown_path_in_only_is_an_error_that_names_it() -> None:
    captured = capture("c", {"a": torch.ones(1), "ab": 1})
    with pytest.raises(NotFoundError, match="c/b"):
        Assembly(captured.structure, "c", only=["c/a", "c/b"])
    assert Assembly(captured.structure, "c", only=["c/a"]).leaf_paths == ["c/a"]


def test_only_allocates_the_blocks_it_needs_and_splits_no_generator() -> None:
    state = {"big": torch.zeros(1 << 16), "rng": np.random.default_rng(1), "pair": (1, torch.ones(2))}
    captured = capture("c", state)
    assembly = Assembly(captured.structure, "c", only=["c/pair/1"])
    assert [len(memory) for memory in assembly.blocks.values()] == [8]
    assert {place.path for place in leaf_places(captured.structure, "c")} == {"c/big", "c/rng", "c/pair/0", "c/pair/1"}
    rng = Assembly(captured.structure, "c", only=["c/rng"]).tree(captured.scalars)["rng"]
    assert rng.random() == np.random.default_rng(1).random()


def test_an_enum_member_without_its_class_is_a_stored_enum_that_can_be_stored_again() -> None:
    colour = enum.IntFlag("Colour", "RED GREEN")
    back = restore({"c": colour.RED | colour.GREEN, "l": colour.RED})
    assert back["l"] == StoredEnum("Colour", "RED", 1)
    assert back["c"].resolve(colour) == colour.RED | colour.GREEN
    assert restore(back) == back


def test_a_module_directory_of_five_thousand_leaves_is_described_by_one_look_at_each() -> None:
    """With a description of the last step; the first takes some thirty calls for each leaf."""
    state = {f"layer.{number}": torch.zeros(4) for number in range(5000)}
    first = capture("c", state)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        capture("c", state, previous=first)
    finally:
        sys.setprofile(None)
    assert 5000 <= sum(event in ("call", "c_call") for event in calls) < 2 * 5000
