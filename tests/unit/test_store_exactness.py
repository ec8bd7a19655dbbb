"""(S11, S12, S13, S18, S19, S23, S25, S28, S31) What was committed comes back, bit for bit and shared as it was."""

from __future__ import annotations

import collections
import enum
import math
import pickle
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import casckpt
from casckpt.codec import zstd
from casckpt.errors import InvalidInputError, MismatchError, StoreWarning, UnsupportedStateError
from casckpt.storage.process import System
from casckpt.testing.anatomy import dissect
from casckpt.testing.trees import difference
from casckpt.testing.wrapping import Operation
from tests.unit.stores import UnsyncedFileSystem, open_store

CHUNK = 4096


@pytest.fixture
def store(store_path: Path) -> Iterator[Any]:
    with open_store(store_path, chunk_size=CHUNK) as opened:
        yield opened


# --- special values and layouts ---


def specials(dtype: torch.dtype) -> Any:
    """Every bit pattern of a small type, or random ones with NaN payloads, infinities,
    -0.0 and subnormals among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    if size == 1:
        plain = np.arange(256, dtype=np.uint8)
        plain = plain % 2 if dtype == torch.bool else plain
    else:
        plain = np.random.default_rng(size).integers(0, 256, 4096 * size, dtype=np.uint8)
        if dtype.is_floating_point:
            quiet = {2: "<H", 4: "<I", 8: "<Q"}[size]
            top = {
                torch.float16: 0x7C01,
                torch.bfloat16: 0x7F81,
                torch.float32: 0x7F800001,
                torch.float64: 0x7FF0 << 48 | 1,
            }
            marks = [
                top[dtype],
                1 << size * 8 - 1,
                1,
                top[dtype] - 1,
            ]  # signalling NaN, -0.0, smallest subnormal, infinity
            head = b"".join(struct.pack(quiet, mark) for mark in marks)
            plain[: len(head)] = np.frombuffer(head, np.uint8)
    return torch.from_numpy(plain.astype(np.uint8).copy()).view(dtype)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2,
    *(getattr(torch, name) for name in ("uint16", "uint32", "uint64", "float8_e4m3fnuz",
    "float8_e5m2fnuz") if hasattr(torch, name)),
]  # fmt: skip


def test_every_bit_pattern_of_every_dtype_comes_back(store: Any) -> None:
    state = {str(dtype).replace("torch.", ""): {"x": specials(dtype)} for dtype in DTYPES}
    store.commit(1, state)
    assert difference(dict(sorted(state.items())), store.restore(1)) is None
    targets = {name: {"x": torch.zeros_like(tree["x"])} for name, tree in state.items()}
    for atomic in (True, False):
        store.restore_into(targets, 1, atomic=atomic)
        assert difference(state, targets) is None


def test_every_layout_comes_back(store: Any) -> None:
    base = torch.randn(4, 6, 8, 10)
    state = {
        "layouts": {
            "0-d": torch.tensor(3.5), "empty": torch.empty(0), "empty 2-d": torch.empty(3, 0),
            "transposed": base.mT.clone().mT,
            "channels last": base.to(memory_format=torch.channels_last), "expanded": torch.tensor([1.0,
            2.0]).expand(5, 2),
            "strided": torch.arange(100)[::3], "column": torch.arange(100).view(10, 10)[:, 3],
            "numpy 0-d": np.array(2), "reversed": np.arange(50)[::-1],
            "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
            "big endian": np.arange(5, dtype=">f8"), "structured": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b",
            ">f8")]),
            "text": np.array(["a", "ö", ""]), "bytes": np.array([b"ab", b""]), "time": np.array(["2026-01-01"],
            "M8[D]"),
            "bool": np.array([True, False]), "no elements": np.zeros((0, 7), np.float16),
            "long bytes": bytes(range(256)) * 40,
        }
    }  # fmt: skip
    store.commit(1, state)
    found = store.restore(1)["layouts"]
    assert difference(state["layouts"], found) is None
    assert found["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert found["transposed"].stride() == state["layouts"]["transposed"].stride()
    assert found["expanded"].stride() == (0, 1)


class Point(NamedTuple):
    x: int
    y: Any


class Mode(enum.Enum):
    TRAIN = "train"


def test_every_container_and_scalar_comes_back(store: Any) -> None:
    state = {
        "scalars": {
            "big": 2**200, "negative": -(2**100), "zero": -0.0, "nan": math.nan, "inf": math.inf,
            "text": "é\ud800\0", "bytes": b"\x80",
            "none": None, "yes": True, "complex": complex(-0.0, math.inf), "empty": {}, "list": [], "tuple": (),
            "nested": [(1, [2.0])],
            "set": {1, "a", (2, 3)}, "frozen": frozenset({b"x"}), "deque": collections.deque([1, 2], maxlen=5),
            "ordered": collections.OrderedDict(b=1, a=2), "default": collections.defaultdict(list, {"k": [1]}),
            7: "int key",
            (1, "t"): "tuple key", "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
            "np": np.float32(1.5), "np int": np.int64(3), "counter": collections.Counter("aab"),
        }
    }  # fmt: skip
    store.commit(1, state)
    found = store.restore(1)["scalars"]
    assert difference(state["scalars"], found) is None
    assert list(found) == list(state["scalars"])
    store.commit(2, {"scalars": {"point": Point(1, torch.ones(2)), "mode": Mode.TRAIN}})
    found = store.restore(2)["scalars"]
    assert (found["point"]._fields, found["point"].x, found["mode"].name) == (("x", "y"), 1, "TRAIN")


@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 64 * 1024 - 1, 64 * 1024, 64 * 1024 + 1])
def test_zeros_of_every_size_come_back(store: Any, count: int) -> None:
    state = {"zeros": {"bytes": bytes(count), "array": np.zeros(count, np.uint8), "floats": torch.zeros(count)}}
    store.commit(1, state)
    assert difference({"zeros": dict(state["zeros"])}, store.restore(1)) is None


def test_runs_of_zeros_inside_noise_come_back(store: Any) -> None:
    noise = np.random.default_rng(0).integers(1, 256, 600_000, dtype=np.uint8)
    at = 0
    for length in (1, 2, 3, 7, 8, 63, 64, 65, 255, 256, 4095, 4096, 4097, 65536, 100_000):
        noise[at + 10 : at + 10 + length] = 0
        at += 10 + length
    store.commit(1, {"noise": {"x": noise}})
    assert difference({"noise": {"x": noise}}, store.restore(1)) is None


@pytest.mark.full
def test_tensor_of_more_than_two_gib_comes_back(store_path: Path) -> None:
    count = (1 << 31) + 5 * CHUNK + 3
    state = np.zeros(count, np.uint8)  # untouched pages: the source costs no memory
    marks = [0, CHUNK, (1 << 31) - 1, 1 << 31, count - 1]
    state[marks] = [1, 2, 3, 4, 5]
    with open_store(store_path) as store:
        snapshot = store.commit(1, {"ring": {"x": state}})
        assert snapshot.logical_bytes > 1 << 31
        assert store.stats().pack_bytes + store.stats().timeline_bytes < 1 << 20
        state[marks] = 0
        target = np.zeros(count, np.uint8)
        store.restore_into({"ring": {"x": target}}, 1, atomic=False)
        assert target[marks].tolist() == [1, 2, 3, 4, 5]
        assert int(np.count_nonzero(target)) == 5
        assert store.commit(2, {"ring": {"x": target}}).new_bytes == 0


# --- sizes and shapes of trees ---


def test_state_without_leaves_comes_back(store: Any) -> None:
    state = {"a": {}, "b": [], "c": None, "d": {"x": {}}, "e": ()}
    assert store.commit(1, state).logical_bytes > 0
    assert store.restore(1) == state
    assert store.commit(2, state).new_bytes == 0


@pytest.mark.full
def test_ten_thousand_leaves_come_back(store: Any) -> None:
    state = {"net": {f"layer.{i}": torch.full((3,), float(i)) for i in range(10_000)}}
    store.commit(1, state)
    assert difference(state, store.restore(1)) is None
    assert store.restore(1, only=["net/layer.9999"])["net"]["layer.9999"].tolist() == [9999.0] * 3
    state["net"]["layer.5000"] += 1
    assert store.commit(2, state).new_bytes == CHUNK


def test_deep_trees_come_back_and_deeper_ones_are_refused_by_path(store: Any) -> None:
    def nested(depth: int) -> Any:
        tree: Any = {"leaf": np.arange(3)}
        for _ in range(depth):
            tree = {"k": tree}
        return tree

    store.commit(1, {"deep": nested(250)})
    assert difference({"deep": nested(250)}, store.restore(1)) is None
    for depth in (300, 10_000):
        with pytest.raises(UnsupportedStateError, match="levels deep") as caught:
            store.commit(2, {"deep": nested(depth)})
        assert caught.value.facts["path"].startswith("deep/k/k")
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        store.commit(2, {"deep": loop})


@pytest.mark.full
def test_component_of_more_chunks_than_a_manifest_holds_comes_back(store: Any) -> None:
    """1025 chunks and more are named by nodes; one changed chunk costs that chunk and one node."""
    for step, count in enumerate((1023, 1024, 1025, 2048, 2049)):
        array = np.random.default_rng(7).integers(0, 256, count * CHUNK, dtype=np.uint8)
        store.commit(step, {"ring": {"x": array}})
        assert difference({"ring": {"x": array}}, store.restore(step)) is None
    array[5] ^= 1
    assert store.commit(9, {"ring": {"x": array}}).new_bytes == CHUNK
    assert difference({"ring": {"x": array}}, store.restore(9)) is None
    with open_store(store.path) as again:
        assert again.commit(10, {"ring": {"x": array}}).new_bytes == 0
        assert again.verify(read_data=True).ok


# --- sharing ---


def test_tied_weights_are_stored_once_and_come_back_tied(store: Any) -> None:
    weight = torch.randn(300, 300)
    once = store.commit(1, {"net": {"a": weight}}).logical_bytes
    tied = store.commit(2, {"net": {"embedding": weight, "head": weight, "part": weight[2:5], "view": weight.view(-1)}})
    assert tied.logical_bytes - once < 100
    found = store.restore(2)["net"]
    assert found["embedding"] is found["head"]
    found["embedding"][2, 0] = 7
    assert found["part"][0, 0] == 7 == found["view"][600]


def test_equal_but_separate_tensors_share_bytes_and_come_back_separate(store: Any) -> None:
    weight = torch.randn(300, 300)
    snapshot = store.commit(1, {"net": {"a": weight, "b": weight.clone()}})
    assert snapshot.new_bytes < snapshot.logical_bytes / 1.9
    found = store.restore(1)["net"]
    found["a"].zero_()
    assert torch.equal(found["b"], weight)


def test_tie_that_the_target_lacks_is_named(store: Any) -> None:
    weight = torch.randn(3)
    store.commit(1, {"net": {"a": weight, "b": weight}})
    with pytest.raises(MismatchError, match="memory shared with net/a"):
        store.restore_into({"net": {"a": torch.zeros(3), "b": torch.zeros(3)}}, 1)
    tied = torch.zeros(3)
    store.restore_into({"net": {"a": tied, "b": tied}}, 1)
    assert torch.equal(tied, weight)


@pytest.mark.full  # the first step of a torch optimizer imports its compiler: seconds
def test_module_and_optimizer_continue_exactly(store: Any) -> None:
    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        return net, torch.optim.AdamW(net.parameters(), lr=1e-2)

    def train(net: Any, optimizer: Any, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            net(torch.arange(4.0) + step).square().sum().backward()
            optimizer.step()

    net, optimizer = make()
    train(net, optimizer, 3)
    store.commit(3, {"policy": net, "optimizer": optimizer})
    train(net, optimizer, 2)
    fresh, fresh_optimizer = make()
    before = [parameter.data_ptr() for parameter in fresh.parameters()]
    report = store.resume_into({"policy": fresh, "optimizer": fresh_optimizer})
    assert [parameter.data_ptr() for parameter in fresh.parameters()] == before
    train(fresh, fresh_optimizer, 2)
    assert difference(dict(net.state_dict()), dict(fresh.state_dict())) is None
    assert report.step == 3


# --- dtypes are never changed in silence ---


def test_other_dtype_is_refused_unless_a_cast_is_asked_for_and_then_told(store: Any) -> None:
    weight = torch.linspace(-1, 1, 12).view(4, 3)
    store.commit(1, {"policy": {"w": weight}})
    target = torch.zeros(4, 3, dtype=torch.bfloat16)
    with pytest.raises(MismatchError, match=r"policy/w: .*float32.*bfloat16"):
        store.restore_into({"policy": {"w": target}}, 1)
    assert not target.any()
    report = store.restore_into({"policy": {"w": target}}, 1, cast=True)
    assert torch.equal(target, weight.bfloat16())
    assert report.casts == {"policy/w": (weight.bfloat16().float() - weight).abs().max().item()}
    assert "cast policy/w" in str(report)


def test_all_differences_of_all_components_come_in_one_error(store: Any) -> None:
    store.commit(1, {"policy": {"w": torch.ones(3), "b": torch.ones(2)}, "value": {"v": torch.ones(1)}})
    targets = {"policy": {"w": torch.zeros(4), "b": torch.zeros(2)}, "value": {"x": torch.zeros(1)}}
    with pytest.raises(MismatchError) as caught:
        store.restore_into(targets, 1)
    assert {path for path, _, _ in caught.value.facts["differences"]} == {"policy/w", "value/v", "value/x"}
    assert not any(tensor.any() for tree in targets.values() for tensor in tree.values())


# --- what is handed out is the caller's ---


def test_restored_values_may_be_changed_without_changing_the_store(store: Any) -> None:
    state = {"a": {"t": torch.ones(50_000), "n": np.ones(50_000), "small": torch.ones(3), "l": [1, [2]]}}
    store.commit(1, state)
    for _ in range(2):
        found = store.restore(1)["a"]
        assert difference(state["a"], found) is None
        found["t"].zero_()
        found["n"][:] = 0
        found["small"].zero_()
        found["l"][1].append(3)


# --- encodings are proved ---


def test_compressor_that_corrupts_is_caught_before_anything_is_published(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress = zstd.compress
    calls = []

    def flipping(plain: Any, profile: Any) -> bytes:
        frame = bytearray(compress(plain, profile))
        calls.append(len(frame))
        if len(frame) > 40:
            frame[len(frame) // 2] ^= 1
        return bytes(frame)

    monkeypatch.setattr(zstd, "compress", flipping)
    state = {
        "text": {"x": np.frombuffer(b"the same words again and again, " * 4000, np.uint8)},
        "ints": {"x": torch.arange(50_000)},
    }
    with pytest.warns(StoreWarning, match="did not decode"):
        store.commit(1, state)
    assert len(calls) > 10
    monkeypatch.undo()
    assert difference({"ints": state["ints"], "text": state["text"]}, store.restore(1)) is None
    assert store.verify(read_data=True).ok


@pytest.mark.full
def test_sixteen_threads_restore_the_same_bytes(store: Any) -> None:
    """Decompressors are per thread."""
    state = {"a": {"x": torch.arange(20_000), "y": np.repeat(np.arange(100), 300)}}
    store.commit(1, state)
    with ThreadPoolExecutor(16) as threads:
        for found in threads.map(lambda _: store.restore(1), range(32)):
            assert difference(state, found) is None


def test_small_leaves_share_chunks(store_path: Path) -> None:
    class Counting(UnsyncedFileSystem):
        writes = 0

        def perform(self, operation: Operation, act: Any) -> Any:
            self.writes += operation.name == "write"
            return super().perform(operation, act)

    disk = Counting()
    with open_store(store_path, system=System(file_system=disk)) as store:
        biases = {f"bias.{i}": torch.randn(64) for i in range(5000)}
        disk.writes = 0
        store.commit(1, {"net": biases})
        assert disk.writes <= 4  # a pack and an entry
    chunks = [plain for plain in dissect(str(store_path)).plain.values() if len(plain) > 200_000]
    assert sorted(map(len, chunks))[-1] == 1 << 20  # 1.28 MB of biases in two chunks
    assert len(dissect(str(store_path)).plain) <= 8


# --- no code in data ---

EXECUTED: list[str] = []


def execute(name: str) -> str:
    EXECUTED.append(name)
    return name


class Hostile:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return execute, ("hostile",)


@pytest.fixture(autouse=True)
def nothing_was_executed() -> Iterator[None]:
    EXECUTED.clear()
    yield
    assert EXECUTED == []


PLACES: dict[str, Any] = {
    "root": lambda evil: evil,
    "dict": lambda evil: {"x": evil},
    "list": lambda evil: [1, evil],
    "tuple": lambda evil: (evil, 1),
    "set": lambda evil: {evil},
    "deque": lambda evil: collections.deque([evil]),
    "ordered": lambda evil: collections.OrderedDict(x=evil),
    "default": lambda evil: collections.defaultdict(list, {"x": evil}),
    "namedtuple": lambda evil: Point(1, evil),
    "array": lambda evil: np.array([evil], dtype=object),
    "structured": lambda evil: np.array([(1, evil)], dtype=[("a", "i4"), ("b", object)]),
    "key": lambda evil: {evil: 1},
    "deep": lambda evil: {"a": [{"b": (evil,)}]},
}


def test_object_that_only_pickle_could_store_is_refused_by_path(store: Any) -> None:
    for name, put in PLACES.items():
        with pytest.raises(UnsupportedStateError) as caught:
            store.commit(1, {"good": 1, "bad": put(Hostile())})
        assert caught.value.facts["path"].startswith("bad"), name
    assert store.steps() == []
    assert store.commit(1, {"good": 1}).step == 1


def test_pickle_is_read_only_where_both_sides_allow_it(store: Any) -> None:
    store.commit(1, {"good": {"x": 1}, "bad": {"x": Hostile(), "y": 2}}, allow_pickle=True)
    assert store.opaque_leaves(1) == ["bad/x"]
    for use in (lambda: store.restore(1), lambda: store.restore(1, only=["bad"]), lambda: store.resume(1)):
        with pytest.raises(UnsupportedStateError, match=r"bad/x: stored as a pickle"):
            use()
    assert store.restore(1, only=["good", "bad/y"]) == {"good": {"x": 1}, "bad": {"y": 2}}
    target = {"x": Hostile(), "y": 0}
    with pytest.raises(UnsupportedStateError):
        store.restore_into({"bad": target}, 1)
    store.diff(1, 1), store.verify(read_data=True), store.snapshot(1), store.stats()
    assert EXECUTED == []
    assert store.restore(1, allow_pickle=True)["bad"] == {"x": "hostile", "y": 2}
    assert EXECUTED == ["hostile"]
    EXECUTED.clear()


def test_bytes_that_happen_to_be_a_pickle_stay_bytes(store: Any) -> None:
    attack = pickle.dumps(Hostile()) * 300
    for value in (
        attack,
        attack[:40],
        np.frombuffer(attack, np.uint8),
        torch.frombuffer(bytearray(attack), dtype=torch.uint8),
    ):
        state = {"payload": {"x": value}}
        store.commit(1, state) if not store.steps() else store.commit(store.steps()[-1] + 1, state)
        assert difference(state, store.restore("latest", allow_pickle=True)) is None


def test_device_and_ref_arguments_that_make_no_sense_are_refused(store: Any) -> None:
    store.commit(1, {"a": torch.ones(2)})
    with pytest.raises(InvalidInputError):
        casckpt.open(store.path, verify="perhaps")
    for size in (0, 4095, 4097, 1 << 30):
        with pytest.raises(InvalidInputError, match="chunk_size"):
            open_store(store.path + "-other", chunk_size=size)
    assert store.restore(1, device="cpu")["a"].device.type == "cpu"
