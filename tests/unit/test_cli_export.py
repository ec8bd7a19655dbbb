"""`casckpt export`: what safetensors and JSON readers, which know nothing of casckpt, find in the files."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections import OrderedDict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import casckpt
from casckpt.cli import _safetensors
from casckpt.cli._safetensors import form_of
from casckpt.cli._tree import scalar_node
from casckpt.cli.export import stems_of
from casckpt.errors import StorageError
from tests.unit.cli_stores import call

TORCH_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in C order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def exported(state: dict[str, Any], tmp_path: Path, *options: str, **more: Any) -> Path:
    """Commit `state` as step 7 and export it; returns the folder of the step."""
    with casckpt.open(tmp_path / "store", create=True) as store:
        store.commit(7, state, **more)
    called = call("export", tmp_path / "store", 7, tmp_path / "out", *options)
    assert (called.code, called.err) == (0, "")
    return tmp_path / "out" / "step_0000000007"


def tree_of(folder: Path, component: str) -> Any:
    return json.loads((folder / f"{component}.json").read_text())


def test_every_dtype_comes_back_bit_exactly(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    noise[:64] = torch.tensor([1, 0, 0xC0, 0x7F] * 16)  # NaN payloads among them
    tensors = {str(dtype): (noise > 127 if dtype is torch.bool else noise.view(dtype)) for dtype in TORCH_DTYPES}
    folder = exported({"net": tensors}, tmp_path)
    found = safetensors.torch.load_file(folder / "net.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {str(dtype): dtype for dtype in TORCH_DTYPES}
    assert all(bits(found[name]) == bits(tensors[name]) for name in tensors)


def test_shapes_strides_and_empty_ones_come_back(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "transposed": base.permute(2, 0, 1).clone(memory_format=torch.preserve_format),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "column": torch.arange(12.0).reshape(3, 4)[:, 1],
    }
    folder = exported({"net": tensors}, tmp_path)
    found = safetensors.torch.load_file(folder / "net.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_numpy_arrays_come_back_and_numpy_reads_them(tmp_path: Path) -> None:
    arrays = {
        "f8": np.linspace(0, 1, 7),
        "i2": np.arange(6, dtype="<i2").reshape(2, 3),
        "flag": np.array([True, False]),
        "reversed": np.arange(5, dtype=np.float32)[::-1],
    }
    folder = exported({"env": arrays}, tmp_path)
    found = safetensors.numpy.load_file(folder / "env.safetensors")
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_types_that_the_format_lacks_are_bytes_or_real_pairs_and_the_json_says_so(tmp_path: Path) -> None:
    state = {
        "big": np.arange(4, dtype=">f4"),
        "text": np.array(["ab", "c"]),
        "when": np.array(["2024-01-01"], "M8[D]"),
        "record": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
        "wave": torch.tensor([1 + 2j, 3 - 4j]),
        "odd8": torch.arange(3, dtype=torch.uint8).view(torch.float8_e4m3fnuz),
    }
    folder = exported({"env": state}, tmp_path)
    found = safetensors.torch.load_file(folder / "env.safetensors")
    facts = tree_of(folder, "env")["tensors"]
    assert {name: each["stored_as"] for name, each in facts.items()} == {
        "wave": "real pairs",
        **dict.fromkeys(("big", "text", "when", "record", "odd8"), "bytes"),
    }
    assert torch.equal(torch.view_as_complex(found["wave"]), state["wave"])
    for name in ("big", "text", "when", "record"):
        assert bits(found[name]) == state[name].tobytes()
    assert bits(found["odd8"]) == bits(state["odd8"])
    assert facts["big"]["dtype"] == ">f4"
    assert facts["text"]["shape"] == [2]


def test_tied_leaves_are_written_once_and_the_json_names_both_paths(tmp_path: Path) -> None:
    shared = torch.arange(10_000.0)
    folder = exported(
        {"net": {"a": shared, "b": shared, "alias": shared.view(10_000), "equal": shared.clone()}}, tmp_path
    )
    found = safetensors.torch.load_file(folder / "net.safetensors")
    assert set(found) == {"a", "equal"}
    document = tree_of(folder, "net")
    assert document["tensors"]["a"]["paths"] == ["net/a", "net/b", "net/alias"]
    assert dict(document["tree"]["dict"])["b"] == {"tensor": "a"}
    assert (folder / "net.safetensors").stat().st_size < 2 * 40_000 + 2000


def test_views_that_overlap_in_part_are_each_readable_and_their_place_is_told(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    folder = exported(
        {"net": {"base": base, "part": base[20:30], "every": base[::2], "other": torch.ones(3)}}, tmp_path
    )
    found = safetensors.torch.load_file(folder / "net.safetensors")
    assert torch.equal(found["part"], base[20:30])
    assert torch.equal(found["every"], base[::2])
    facts = tree_of(folder, "net")["tensors"]
    assert facts["part"]["overlaps"] == {"with": ["base", "every"], "block": 0, "offset_bytes": 80, "strides": None}
    assert facts["every"]["overlaps"]["strides"] == [2]
    assert "overlaps" not in facts["other"]


def test_the_tree_keeps_containers_keys_and_every_bit_of_scalars(tmp_path: Path) -> None:
    Point = namedtuple("Point", "x y")
    state = {
        "list": [1, 2.5, "text", None, True],
        "tuple": (1, (2,)),
        "deque": deque([1], maxlen=3),
        "ordered": OrderedDict(b=1, a=2),
        5: "int key",
        (1, "x"): "tuple key",
        "point": Point(1, np.zeros(2)),
        "big": 1 << 80,
        "nan": float("nan"),
        "minus_zero": -0.0,
        "bytes": b"\x00\xff",
        "complex": 1 - 2j,
        "set": {3},
    }
    items = [(key, node) for key, node in tree_of(exported({"s": state}, tmp_path), "s")["tree"]["dict"]]
    nodes = {json.dumps(key): node for key, node in items}
    assert [key for key, _ in items][:4] == ["list", "tuple", "deque", "ordered"]
    assert nodes['"list"'] == {"list": [1, 2.5, "text", None, True]}
    assert nodes['"tuple"'] == {"tuple": [1, {"tuple": [2]}]}
    assert nodes['"deque"'] == {"deque": [1], "maxlen": 3}
    assert nodes['"ordered"'] == {"dict": [["b", 1], ["a", 2]], "class": "OrderedDict"}
    assert nodes["5"] == "int key"
    assert nodes['{"tuple": [1, "x"]}'] == "tuple key"
    assert nodes['"point"'] == {"namedtuple": "Point", "fields": {"x": 1, "y": {"tensor": "point/y"}}}
    assert nodes['"big"'] == {"scalar": "int", "value": str(1 << 80)}
    assert struct.unpack(">d", bytes.fromhex(nodes['"nan"']["bits"]))[0] != 0
    assert str(nodes['"minus_zero"']) == "-0.0"
    assert base64.b64decode(nodes['"bytes"']["base64"]) == b"\x00\xff"
    assert struct.unpack(">dd", bytes.fromhex(nodes['"complex"']["bits"])) == (1.0, -2.0)
    assert nodes['"set"'] == {"set": [3]}


@pytest.mark.parametrize(
    ("value", "node"),
    [
        (2**53, 2**53),
        (2**53 + 1, {"scalar": "int", "value": str(2**53 + 1)}),
        (float("inf"), {"scalar": "float", "bits": "7ff0000000000000"}),
        ("\ud800", {"scalar": "str", "utf8": "eda080"}),
        (frozenset([2, 1]), {"frozenset": [1, 2]}),
        (deque([1], maxlen=2), {"deque": [1], "maxlen": 2}),
    ],
)
def test_scalars_beyond_json_say_their_type(value: Any, node: Any) -> None:
    assert scalar_node(value) == node


@pytest.mark.full
def test_modules_optimizers_and_generators_are_exported(tmp_path: Path) -> None:
    net = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    rng = np.random.default_rng(5)
    folder = exported({"net": net, "opt": optimizer, "rng": {"numpy": rng, "torch": torch.Generator()}}, tmp_path)
    found = safetensors.torch.load_file(folder / "net.safetensors")
    assert torch.equal(found["weight"], net.weight)
    moments = safetensors.torch.load_file(folder / "opt.safetensors")
    assert torch.equal(moments["state/0/exp_avg"], optimizer.state[net.weight]["exp_avg"])
    tree = dict(tree_of(folder, "rng")["tree"]["dict"])
    assert tree["numpy"]["rng"] == "numpy.Generator"
    assert dict(tree["numpy"]["state"]["dict"])["bit_generator"] == "PCG64"
    assert tree["torch"]["rng"] == "torch"


def test_pickles_are_exported_as_bytes_and_not_run(tmp_path: Path) -> None:
    folder = exported({"odd": {"p": slice(1, 2)}}, tmp_path, allow_pickle=True)
    document = tree_of(folder, "odd")
    assert dict(document["tree"]["dict"])["p"] == {"pickle": "builtins.slice", "tensor": "p"}
    assert document["tensors"]["p"]["kind"] == "pickle"
    assert safetensors.torch.load_file(folder / "odd.safetensors")["p"].dtype == torch.uint8


def test_snapshot_json_says_what_was_exported(tmp_path: Path) -> None:
    folder = exported({"a": {"n": 1}, "b": {"n": 2}}, tmp_path, metrics={"return": 2.5}, config={"lr": 1})
    document = json.loads((folder / "snapshot.json").read_text())
    assert document["snapshot"]["step"] == 7
    assert document["snapshot"]["metrics"] == {"return": 2.5}
    assert document["context"]["config"] == {"lr": 1}
    assert set(document["files"]) == {"a", "b"}
    for facts in document["files"].values():
        assert (folder / facts["tensors"]).stat().st_size == facts["bytes"]
        assert (folder / facts["tree"]).is_file()
    assert sorted(os.listdir(folder)) == ["a.json", "a.safetensors", "b.json", "b.safetensors", "snapshot.json"]


def test_only_exports_components_and_leaves(tmp_path: Path) -> None:
    state = {"a": {"x": np.ones(2), "y": {"z": np.zeros(3), "n": 1}}, "b": {"n": 2}}
    folder = exported(state, tmp_path, "--only", "a/y")
    assert sorted(os.listdir(folder)) == ["a.json", "a.safetensors", "snapshot.json"]
    assert set(safetensors.numpy.load_file(folder / "a.safetensors")) == {"y/z"}
    assert dict(tree_of(folder, "a")["tree"]["dict"])["x"] == {"left_out": True}
    for wrong in ("c", "a/nonesuch"):
        called = call("export", tmp_path / "store", 7, tmp_path / "other", "--only", wrong)
        assert called.code == 3
        assert wrong in called.err
        assert not list((tmp_path / "other").glob("*"))


# --- the folder ---


def test_an_existing_folder_is_refused_and_untouched(tmp_path: Path) -> None:
    folder = exported({"a": {"n": 1}}, tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    called = call("export", tmp_path / "store", 7, tmp_path / "out")
    assert called.code == 9
    assert "step_0000000007" in called.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path / "out") == ["step_0000000007"]


def test_a_failing_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported({"a": {"n": 1}, "b": {"n": 2}}, tmp_path)
    real, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    called = call("export", tmp_path / "store", 7, tmp_path / "again")
    assert called.code == 6
    assert "No space left" in called.err
    assert os.listdir(tmp_path / "again") == []


def test_every_file_is_synced_before_the_folder_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported({"a": {"n": 1}, "b": {"n": 2}}, tmp_path)
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def rename(source: Any, target: Any) -> None:
        if "step_" in str(target):
            events.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    assert call("export", tmp_path / "store", 7, tmp_path / "again").code == 0
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert {"a.safetensors", "a.json", "b.safetensors", "b.json", "snapshot.json"} <= set(before)
    assert before[-1].startswith(".step_0000000007")
    assert after == ["again"]


@pytest.mark.parametrize("name", ["../up", "/abs", "..", ".hidden", "a\x00b", "a:b", "snapshot", "Ünï", "x" * 200, ""])
def test_file_names_stay_in_the_folder(name: str) -> None:
    stem = stems_of([name])[name]
    assert stem == os.path.basename(stem)
    assert stem.isascii() and stem.isprintable()
    assert not stem.startswith(".")
    assert stem.casefold() != "snapshot"
    assert 0 < len(f"{stem}.safetensors") <= 255


def test_file_names_differ_where_names_do() -> None:
    names = ["a", "A", "%61", "a%", "x" * 200, "x" * 199 + "y", "snapshot", "SNAPSHOT"]
    stems = list(stems_of(names).values())
    assert len({stem.casefold() for stem in stems}) == len(names)


def test_components_with_awkward_names_are_exported(tmp_path: Path) -> None:
    state = {"snapshot": {"n": 1}, "Net": {"n": 2}, "net": {"n": 3}, "größe": {"w": np.ones(2)}}
    folder = exported(state, tmp_path)
    files = json.loads((folder / "snapshot.json").read_text())["files"]
    assert set(files) == set(state)
    assert len({facts["tensors"].casefold() for facts in files.values()}) == 4
    assert set(safetensors.numpy.load_file(folder / files["größe"]["tensors"])) == {"w"}


def test_tensor_names_never_collide(tmp_path: Path) -> None:
    state = {"net": {1: torch.zeros(1), "1": torch.ones(2), "__metadata__": torch.ones(3), "a~2": torch.ones(4)}}
    folder = exported(state, tmp_path)
    found = safetensors.torch.load_file(folder / "net.safetensors")
    assert sorted(tensor.numel() for tensor in found.values()) == [1, 2, 3, 4]
    nodes = {json.dumps(key): node["tensor"] for key, node in tree_of(folder, "net")["tree"]["dict"]}
    assert (found[nodes["1"]].numel(), found[nodes['"1"']].numel()) == (1, 2)
    assert found[nodes['"__metadata__"']].numel() == 3


def test_a_component_that_is_one_tensor_has_its_own_name(tmp_path: Path) -> None:
    folder = exported({"weights": torch.arange(3.0)}, tmp_path)
    assert set(safetensors.torch.load_file(folder / "weights.safetensors")) == {"weights"}
    assert tree_of(folder, "weights")["tree"] == {"tensor": "weights"}


def test_json_names_the_files(tmp_path: Path) -> None:
    exported({"a": {"w": np.ones(3)}}, tmp_path)
    document = call("export", tmp_path / "store", "latest", tmp_path / "again", "--json").json
    assert document["folder"].endswith("step_0000000007")
    assert document["components"]["a"]["tensors"] == "a.safetensors"


# --- the file format ---


def test_components_are_written_in_the_memory_of_one(tmp_path: Path) -> None:
    import tracemalloc

    state = {f"net{i}": {f"w{j}": np.full(1_000_000, 4 * i + j, np.float32) for j in range(4)} for i in range(4)}
    with casckpt.open(tmp_path / "store", create=True) as store:
        store.commit(1, state)  # 64 MB in components of 16 MB
    tracemalloc.start()
    try:
        assert call("export", tmp_path / "store", 1, tmp_path / "out").code == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24e6
    for i in range(4):
        found = safetensors.numpy.load_file(tmp_path / "out" / "step_0000000001" / f"net{i}.safetensors")
        assert all((found[f"w{j}"] == 4 * i + j).all() for j in range(4))


def test_one_memory_under_two_types_is_written_for_each(tmp_path: Path) -> None:
    numbers = torch.arange(24, dtype=torch.int32)
    tensors = {"flat": numbers, "table": numbers.view(4, 6), "bits": numbers.view(torch.float32)}
    found = safetensors.torch.load_file(exported({"net": tensors}, tmp_path) / "net.safetensors")
    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
        name: (each.dtype, each.shape) for name, each in tensors.items()
    }
    assert all(bits(found[name]) == bits(tensors[name]) for name in tensors)


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_whoever_may_read_the_folder_may_read_its_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = exported({"a": {"w": np.ones(2)}}, tmp_path)
    finally:
        os.umask(before)
    assert {path.suffix: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        ".json": 0o640,
        ".safetensors": 0o640,
    }


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("torch", "bfloat16", ("bfloat16", "exact")),
        ("numpy", "<f2", ("float16", "exact")),
        ("numpy", "|b1", ("bool", "exact")),
        ("numpy", "|S3", ("uint8", "bytes")),
        ("numpy", ">i4", ("uint8", "bytes")),
        ("numpy", "<f16", ("uint8", "bytes")),
        ("numpy", "<c8", ("float32", "real pairs")),
        ("torch", "complex32", ("float16", "real pairs")),
        ("bytes", "", ("uint8", "exact")),
    ],
)
def test_forms(kind: str, dtype: str, expected: tuple[str, str]) -> None:
    form = form_of(kind, dtype, (2,), 8)
    assert (form.dtype, form.meaning) == expected


def test_a_type_that_an_old_release_cannot_write_is_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(tensors: dict[str, torch.Tensor]) -> bytes:
        for each in tensors.values():
            if each.dtype == torch.uint32:
                raise KeyError(each.dtype)  # what 0.4.5 does
        return b""

    monkeypatch.setattr(safetensors.torch, "save", save)
    _safetensors._is_writable.cache_clear()
    try:
        assert form_of("numpy", "<u4", (2,), 8) == ("uint8", (8,), "bytes")
        assert form_of("numpy", "<i4", (2,), 8) == ("int32", (2,), "exact")
    finally:
        _safetensors._is_writable.cache_clear()


def test_a_file_that_cannot_be_written_is_a_storage_error_that_names_it(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "net.safetensors")
    with pytest.raises(StorageError, match=r"missing/net\.safetensors: .*No such file") as caught:
        _safetensors.write(path, {"x": torch.ones(1)}, {})
    assert caught.value.facts["path"] == path
