"""A program that knows docs/format.md alone restores what was committed, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.limits import PREDICTED_SIZE_MIN, SMALL_BLOCK_LIMIT
from casckpt.objects import writer
from tests.compat.contents import contents, contents_read
from tests.conformance import independent_reader as reader
from tests.conformance.sample_states import Sample, Unknown, sample
from tests.format.test_format_doc import examples
from tests.unit.rings import PlainRing


def described(value: Any) -> tuple[str, str, tuple[int, ...], bytes]:
    """(kind, dtype, shape, bytes in C order) of a leaf, by NumPy's and torch's own means."""
    if isinstance(value, bytes):
        return "bytes", "", (len(value),), value
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return "torch", str(value.dtype).removeprefix("torch."), tuple(value.shape), plain
    dtype = value.dtype.str if value.dtype.fields is None else RECORD_DTYPE
    return "numpy", dtype, value.shape, value.tobytes()


RECORD_DTYPE = (
    '{"aligned":false,"fields":[["x",0,">i2",null],["y",4,["<f4",[2]],null]],"itemsize":16}'  # of sample_states.arrays
)


def check_component_contents(found: dict[str, reader.Component], expected: Sample) -> None:
    """Everything in `expected` is found, and nothing else."""
    leaves = {path: leaf for component in found.values() for path, leaf in component.leaves.items()}
    scalars = {path: value for component in found.values() for path, value in component.scalars.items()}
    containers = {path: kind for component in found.values() for path, kind in component.containers.items()}
    for path, value in expected.leaves.items():
        leaf = leaves[path]
        assert (leaf.kind, leaf.dtype, leaf.shape, leaf.data) == described(value), path
    for path, value in expected.scalars.items():
        assert same(scalars[path], value), path
    assert containers == expected.containers
    assert (leaves.keys(), scalars.keys()) == (expected.leaves.keys(), expected.scalars.keys())
    blocks = [{leaves[path].block for path in paths} for paths in expected.shared]
    assert all(len(block) == 1 for block in blocks)


def same(found: Any, expected: Any) -> bool:
    """Equal in type and value; floats by their bits."""
    if isinstance(expected, float):
        return struct.pack(">d", found) == struct.pack(">d", expected)
    return (
        type(found) is type(expected)
        and found == expected
        and getattr(found, "maxlen", 0) == getattr(expected, "maxlen", 0)
    )


def test_every_leaf_scalar_and_container_is_restored(store_path: Path) -> None:
    made = {step: sample(step) for step in (1, 2)}
    with casckpt.open(store_path, create=True) as store:
        for step, each in made.items():
            store.commit(step, each.state)
    found = reader.read_store(store_path)
    assert [snapshot.step for snapshot in found.snapshots] == [1, 2]
    for snapshot in found.snapshots:
        check_component_contents(snapshot.components, made[snapshot.step])
    assert found.codecs == {0, 1, 2, 3}


def test_flags_of_parameters_are_restored(store_path: Path) -> None:
    with casckpt.open(store_path, create=True) as store:
        store.commit(5, sample(5).state)
    leaves = reader.read_store(store_path).snapshots[0].components["shared"].leaves
    flags = [leaves[f"shared/{name}"].flags for name in ("tied", "frozen", "base")]
    assert flags == [3, 1, 0]


@pytest.mark.parametrize("inline_limit", [0, 1 << 20], ids=["all in packs", "all inline"])
def test_large_components_are_restored_from_packs_and_from_entries(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, inline_limit: int
) -> None:
    monkeypatch.setattr(writer, "INLINE_LIMIT", inline_limit)
    rng = np.random.default_rng(0)
    state: dict[str, dict[str, np.ndarray[Any, Any]]] = {
        "net": {
            "weights": rng.normal(size=300_000).astype(np.float32),
            "tail": rng.integers(0, 256, 70_001, dtype=np.uint8),
            "zeros": np.zeros(1_500_000, np.uint8),
        }
    }
    if inline_limit:
        state = {"net": {"weights": state["net"]["weights"][:100_000], "zeros": state["net"]["zeros"]}}
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, state)
    assert bool(list(store_path.glob("packs/*/*"))) == (inline_limit == 0)
    leaves = reader.read_store(store_path).snapshots[0].components["net"].leaves
    assert {path: leaf.data for path, leaf in leaves.items()} == {
        f"net/{name}": value.tobytes() for name, value in state["net"].items()
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("total", [0, 30, 333])
def test_rows_of_rings_are_restored_from_segments_and_groups(store_path: Path, total: int) -> None:
    live = PlainRing(100, width=40)
    ring = live.ring(mutable=("done",))
    with casckpt.open(store_path, create=True) as store:
        for step in range(1, 3 if total < 100 else 100):
            live.add(min(4, total - live.total))
            store.commit(step, {"replay": ring})
    last = reader.read_store(store_path).snapshots[-1].components["replay"]
    first = max(0, live.total - 100)
    expected = live.expected(first, live.total)
    assert last.rows == {name: expected[name].tobytes() for name in ("obs", "action")}
    assert last.leaves["replay/mutable/done"].data == live.done.tobytes()
    assert last.scalars["replay/head"] == live.total % 100


def test_more_chunks_than_a_manifest_holds_are_restored(store_path: Path) -> None:
    ramp = np.arange(1_100 * 4096 // 8 + 5, dtype=np.int64)
    with casckpt.open(store_path, create=True, chunk_size=4096) as store:
        store.commit(1, {"ring": {"ramp": ramp}})
    assert reader.read_store(store_path).snapshots[0].components["ring"].leaves["ring/ramp"].data == ramp.tobytes()


# --- differences and predictions ---


def _train(dtype: torch.dtype, optimizer: str, steps: int) -> Iterator[dict[str, Any]]:
    """A state after every step of a torch optimizer on one large parameter, and arrays that drift."""
    rng = np.random.default_rng(3)
    shape = (100, SMALL_BLOCK_LIMIT // 100 // dtype.itemsize + 1)  # just large enough for chunks of its own
    weight = torch.nn.Parameter(torch.from_numpy(rng.normal(size=shape, scale=0.05)).to(dtype))
    make = {
        "Adam": lambda: torch.optim.Adam([weight], lr=1e-3, weight_decay=0.1, amsgrad=True),
        "AdamW": lambda: torch.optim.AdamW([weight], lr=1e-3),
        "SGD": lambda: torch.optim.SGD([weight], lr=1e-3, momentum=0.9),
        "Nesterov": lambda: torch.optim.SGD([weight], lr=1e-3, momentum=0.9, nesterov=True),
        "RMSprop": lambda: torch.optim.RMSprop([weight], lr=1e-4),
        "RMSprop momentum": lambda: torch.optim.RMSprop([weight], lr=1e-4, momentum=0.9),
        "RMSprop centered": lambda: torch.optim.RMSprop([weight], lr=1e-4, centered=True),
        "RMSprop both": lambda: torch.optim.RMSprop([weight], lr=1e-4, centered=True, momentum=0.9),
    }[optimizer]()
    table, drift = rng.integers(0, 1 << 40, 9000), rng.normal(size=9000)
    frames = np.zeros(PREDICTED_SIZE_MIN, np.uint8)
    target = weight.detach() + torch.from_numpy(rng.normal(size=shape, scale=0.02)).to(dtype)
    for step in range(1, steps + 1):
        gradient = torch.from_numpy(rng.normal(size=shape)).to(torch.bfloat16)
        weight.grad = (weight.detach() + gradient * 0.02).to(torch.bfloat16).to(dtype)
        make.step()
        target.lerp_(weight.detach(), 0.1)
        table[rng.integers(0, 9000, 40)] += step
        drift = drift + rng.normal(size=9000, scale=1e-9)
        copies = {"half": weight.detach().bfloat16()} if dtype == torch.float32 else {}
        yield {
            "policy": {"weight": weight.detach().clone(), **copies},
            "optimizer": copy.deepcopy(make.state_dict()),
            "target": target.clone(),
            "drifting": {"table": table.copy(), "drift": drift.copy(), "tail": table.tobytes()[:-3], "frames": frames},
        }


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk_size", [4096, pytest.param(65536, marks=pytest.mark.full)])
@pytest.mark.parametrize("level", ["fast", "balanced", "small"])
def test_chains_of_every_level_are_restored(store_path: Path, level: str, chunk_size: int) -> None:
    states = list(_train(torch.float32, "AdamW", 4))
    with casckpt.open(store_path, create=True, level=level, chunk_size=chunk_size) as store:
        for step, state in enumerate(states):
            store.commit(step, state)
    found = reader.read_store(store_path)
    for snapshot, state in zip(found.snapshots, states, strict=True):
        assert contents_read(snapshot.components) == contents(state)
    assert 4 in found.codecs
    assert (5 in found.codecs) == (level != "fast")
    assert max(record.depth for record in found.records) >= (1 if level == "fast" else 2)


KINDS_OF = {  # by optimizer: which predictions (docs/format.md section 5) its steps are stored as
    "AdamW": {1, 2, 3, 7},
    "Adam": {1, 2, 7},
    "SGD": {3, 5, 7},
    "Nesterov": {3, 6, 7},
    "RMSprop": {7, 9},
    "RMSprop momentum": {5, 7, 9},
    "RMSprop centered": {1, 7, 10},
    "RMSprop both": {1, 5, 7, 10},
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("level", "dtype", "optimizer"),
    [
        ("small", torch.float32, "AdamW"),
        ("small", torch.bfloat16, "AdamW"),
        ("small", torch.float32, "SGD"),
        ("small", torch.float32, "Nesterov"),
        *(pytest.param("balanced", torch.float32, each, marks=pytest.mark.full) for each in KINDS_OF),
    ],
)
def test_predictions_of_every_optimizer_are_restored(
    store_path: Path, level: str, dtype: torch.dtype, optimizer: str
) -> None:
    states = list(_train(dtype, optimizer, 4))
    with casckpt.open(store_path, create=True, level=level) as store:
        for step, state in enumerate(states):
            store.commit(step, state)
    found = reader.read_store(store_path)
    for snapshot, state in zip(found.snapshots, states, strict=True):
        assert contents_read(snapshot.components) == contents(state)
    stored = {record.params[0] for record in found.records if record.codec == 5}
    assert KINDS_OF[optimizer] - ({3} if dtype == torch.bfloat16 else set()) <= stored


def test_reader_refuses_bases_that_the_document_forbids(store_path: Path) -> None:
    """A depth that does not fall, and a base that lies in an entry alone."""
    states = list(_train(torch.float32, "AdamW", 3))
    with casckpt.open(store_path, create=True) as store:
        for step, state in enumerate(states):
            store.commit(step, state)
    records = reader.read_store(store_path).records
    ids = {record.object_id for record in records}
    reader.decode_all(records, ids)
    based = next(record for record in records if record.depth == 2)
    for depth in (0, 1):
        others = [record for record in records if record is not based]
        with pytest.raises(reader.Damaged, match="depth"):
            reader.decode_all([*others, dataclasses.replace(based, depth=depth)], ids)
    with pytest.raises(reader.Damaged, match="in no pack"):
        reader.decode_all(records, ids - set(based.bases))


def test_lineage_metrics_labels_config_and_opaque_leaves_are_restored(store_path: Path) -> None:
    with casckpt.open(store_path, create=True, run="seed-0") as store:
        first = store.commit(10, {"a": {"x": np.arange(3)}}, metrics={"return": 1.5}, config={"lr": 0.1})
        store.commit(20, {"a": {"x": np.arange(4)}}, labels={"note": "n"}, necessity={"a": "reloadable"})
        store.annotate(10, metrics={"return": 2, "win": True}, labels={"kind": "best"})
        store.tag("best", 10)
        store.tag("gone", 20)
        store.untag("gone")
        store.resume(10)
        branched = store.commit(15, {"a": {"x": np.arange(5)}, "extra": Unknown(4)}, allow_pickle=True)
        store.retire(15)
    found = reader.read_store(store_path)
    by_step = {snapshot.step: snapshot for snapshot in found.snapshots}
    assert list(by_step) == [10, 20, 15]
    assert by_step[10].metrics == {"return": 2, "win": True}
    assert by_step[10].labels == {"kind": "best"}
    assert by_step[10].config == {"lr": 0.1}
    assert by_step[10].id.hex() == first.id
    assert (by_step[20].labels, by_step[20].components["a"].necessity) == ({"note": "n"}, 1)
    assert by_step[15].parent == by_step[20].parent == by_step[10].id
    assert by_step[15].is_retired
    assert found.tags == {("seed-0", "best"): by_step[10].id}
    assert found.heads == {("seed-0", "main"): by_step[20].id, ("seed-0", branched.branch): by_step[15].id}
    assert by_step[15].components["extra"].opaque == ["extra"]


def test_reader_notices_every_flipped_byte_that_the_document_gives_a_meaning(store_path: Path) -> None:
    """The oracle must not be lenient: one bit anywhere in packs and timeline is an error."""
    with casckpt.open(store_path, create=True) as store:
        store.commit(
            1, {"a": {"x": np.arange(1000, dtype=np.float32), "noise": np.random.default_rng(0).bytes(70_000)}}
        )
    reader.read_store(store_path)
    files = sorted([*store_path.glob("packs/*/*"), *store_path.glob("timeline/*/*")])
    assert len(files) >= 3
    for path in files:
        intact = path.read_bytes()
        for at in range(0, len(intact), max(1, len(intact) // 25)):
            path.write_bytes(intact[:at] + bytes([intact[at] ^ 0x10]) + intact[at + 1 :])
            with pytest.raises((reader.Damaged, ValueError, KeyError, struct.error)):
                reader.read_store(store_path)
        path.write_bytes(intact)
    reader.read_store(store_path)


def test_index_is_not_needed(store_path: Path) -> None:
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"a": {"x": np.arange(9)}})
    shutil.rmtree(store_path / "index")
    assert reader.read_store(store_path).snapshots[0].components["a"].leaves["a/x"].data == np.arange(9).tobytes()


def test_reader_understands_the_examples_of_the_document() -> None:
    found = examples()
    record = reader.read_record(found["record, planes, in a pack"], 0, is_aligned=True)
    assert reader.decode(record, {}) == np.array([1, 2, -0.75, -5], np.float32).tobytes()
    assert reader.decode(reader.read_record(found["record, raw"], 0, is_aligned=False), {}) == b"abc"
    assert reader.raise_value(reader.unpack(found["scalar block"])) == [
        *(0.5, None, 2**70, (1, "é"), {b"x"}, 1j),
        ("foreign", "torch.dtype", "bfloat16"),
    ]


def test_reader_imports_only_the_standard_library_blake3_and_zstandard() -> None:
    script = (
        "import sys; before = set(sys.modules); import independent_reader\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    folder = Path(reader.__file__).parent
    found = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    own = ["independent_codecs", "independent_epochs", "independent_reader"]
    assert found.stdout.strip() == str(["blake3", *own, "zstandard"])


def test_reader_lists_a_store_from_the_command_line(store_path: Path) -> None:
    with casckpt.open(store_path, create=True) as store:
        snapshot = store.commit(7, {"a": {"x": np.arange(9)}})
    command = [sys.executable, str(reader.__file__), str(store_path)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"main/main@7 {snapshot.id[:16]}" in listed
