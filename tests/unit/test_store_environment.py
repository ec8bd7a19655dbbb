"""(S14, S22, S24, S29, S43) A store under other releases, on other media, in other processes and float modes."""

from __future__ import annotations

import gc
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

import casckpt
from casckpt.errors import InvalidInputError, NotFoundError, ReadOnlyError, StorageError, UnsupportedFormatError
from casckpt.testing.anatomy import dissect
from casckpt.testing.trees import difference
from tests.unit.stores import open_store

MIB = 1 << 20
STATE = {"policy": {"w": np.arange(50_000, dtype=np.float32)}, "counter": 3}


@pytest.fixture
def store(store_path: Path) -> Iterator[Any]:
    with open_store(store_path) as opened:
        yield opened


def run(code: str, *arguments: str, warnings: str = "error", **environment: str) -> Any:
    """Run Python code in a process of its own; what it printed, decoded."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-W", warnings, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- newer stores ---


def _change_document(store: Any, **fields: Any) -> None:
    path = Path(store.path) / "casckpt.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **fields}))


def test_store_of_a_newer_format_is_refused_before_anything_is_read(store: Any) -> None:
    store.commit(1, STATE)
    _change_document(store, casckpt_format=2)
    for folder in ("packs", "timeline", "index"):
        (Path(store.path) / folder).rename(Path(store.path) / f"{folder}.away")
    for options in ({}, {"read_only": True}, {"create": True}):
        with pytest.raises(
            UnsupportedFormatError, match=r"store format 2, this release reads up to 1. Upgrade casckpt"
        ):
            casckpt.open(store.path, **options)


def test_unknown_feature_for_reading_is_named_and_nothing_opens(store: Any) -> None:
    store.commit(1, STATE)
    _change_document(store, features={"read": ["sealed-epochs"]})
    for read_only in (False, True):
        with pytest.raises(UnsupportedFormatError, match="sealed-epochs") as caught:
            open_store(store.path, create=False, read_only=read_only)
        assert caught.value.facts["features"] == ["sealed-epochs"]


def test_unknown_feature_for_writing_leaves_reading(store: Any) -> None:
    store.commit(1, STATE)
    store.close()
    _change_document(store, features={"write": ["deltas"]})
    with open_store(store.path) as again:
        assert difference(dict(sorted(STATE.items())), again.restore(1)) is None
        assert again.steps() == [1]
        for use in (
            lambda: again.commit(2, STATE),
            lambda: again.commit_async(2, STATE),
            lambda: again.tag("a", 1),
            lambda: again.annotate(1, metrics={"a": 1}),
            lambda: again.retire(1),
            lambda: again.resume(1),
        ):
            with pytest.raises(UnsupportedFormatError, match=r"\['deltas'\] for writing"):
                use()
        assert again.steps() == [1]


def test_unknown_feature_for_collecting_stops_neither_reading_nor_writing(store: Any) -> None:
    store.close()
    _change_document(store, features={"collect": ["leases"]})
    with open_store(store.path) as again:
        assert again.commit(1, STATE).step == 1


# --- media and paths ---


@pytest.mark.parametrize("name", ["with space", "ünï-код-层", "a'b\"c$d", "tab\there", "x" * 200, "index", "packs"])
def test_path_of_any_characters_holds_a_store(tmp_path: Path, name: str) -> None:
    with open_store(tmp_path / name / "store") as store:
        store.commit(1, STATE)
    with open_store(tmp_path / name / "store", read_only=True) as store:
        assert store.restore(1)["counter"] == 3
        assert store.verify().ok


def test_path_is_taken_relative_absolute_or_as_a_path_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_store("runs/one") as store:
        store.commit(1, STATE)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.commit(2, STATE)  # the folder is where it was when the store was opened
    for path in (tmp_path / "runs" / "one", str(tmp_path / "runs" / "one"), "../runs/one"):
        with open_store(path, create=False) as store:
            assert store.steps() == [1, 2]


def test_store_below_a_link_opens(store: Any, tmp_path: Path) -> None:
    store.commit(1, STATE)
    (tmp_path / "link").symlink_to(store.path)
    with open_store(tmp_path / "link", create=False) as linked:
        assert linked.commit(2, STATE).seq == 2


READ_ONLY = """if True:
    import json, os, sys, warnings
    import numpy, casckpt
    with casckpt.open(sys.argv[2], create=True) as store:  # everything is imported: the other user may not read it
        store.commit(1, {"counter": 4, "policy": numpy.arange(100_000)})
        store.restore(1), store.verify(read_data=True)
    if os.getuid() == 0:
        os.setgid(65534), os.setuid(65534)
    errors = []
    for read_only in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", casckpt.StoreWarning)
            with casckpt.open(sys.argv[1], read_only=read_only) as store:
                assert store.restore(1)["counter"] == 3
                assert store.steps() == [1] and store.verify(read_data=True).ok
                try:
                    store.commit(2, {"counter": 4, "policy": numpy.arange(100_000)})
                except casckpt.CasckptError as error:
                    errors.append(type(error).__name__)
    print(json.dumps(errors))
"""


def test_folder_without_write_permission_restores(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("read-only")
    with open_store(folder / "store") as store:
        store.commit(1, STATE)
    for above in (folder, *folder.parents):
        if above.stat().st_uid == os.getuid() and above.stat().st_mode & 0o777 == 0o700:
            above.chmod(0o755)  # the child may be another user
    for path in [folder / "store", *(folder / "store").rglob("*")]:
        path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH | (0o111 if path.is_dir() else 0))
    before = {path: path.stat().st_mtime_ns for path in (folder / "store").rglob("*")}
    try:
        assert run(READ_ONLY, str(folder / "store"), str(folder / "other")) == ["ReadOnlyError", "StorageError"]
        assert {path: path.stat().st_mtime_ns for path in (folder / "store").rglob("*")} == before
    finally:
        for path in [folder / "store", *(folder / "store").rglob("*")]:
            path.chmod(0o700)


def test_read_only_handle_refuses_every_write_and_changes_no_file(store: Any) -> None:
    store.commit(1, STATE)
    store.close()
    before = {path: path.stat().st_mtime_ns for path in Path(store.path).rglob("*") if "index" not in path.parts}
    with open_store(store.path, read_only=True) as reader:
        for use in (
            lambda: reader.commit(2, STATE),
            lambda: reader.commit_async(2, STATE),
            lambda: reader.tag("a", 1),
            lambda: reader.untag("a"),
            lambda: reader.annotate(1, metrics={"a": 1}),
            lambda: reader.retire(1),
            lambda: reader.resume(1),
            lambda: reader.resume_into({"counter": 3}),
        ):
            with pytest.raises(ReadOnlyError, match="read-only"):
                use()
        assert reader.restore(1)["counter"] == 3
        assert reader.verify(read_data=True).ok
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_folder_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    for path in ("/proc/casckpt-store", "/dev/null/store", str(tmp_path / ("x" * 300))):
        with pytest.raises((StorageError, NotFoundError)):
            casckpt.open(path, create=True)


def test_closed_handle_says_so_and_closes_twice(store: Any) -> None:
    store.commit(1, STATE)
    store.close()
    store.close()
    for use in (
        lambda: store.commit(2, STATE),
        store.steps,
        lambda: store.restore(1),
        store.timeline,
        store.stats,
        store.wait,
    ):
        with pytest.raises(InvalidInputError, match=r"closed. Open it again"):
            use()


def test_results_have_a_plain_form_and_print(store: Any) -> None:
    store.commit(1, STATE, metrics={"loss": 0.5})
    store.commit(2, {"policy": {"w": np.ones(50_000, np.float32)}, "counter": 4})
    report = store.restore_into({"policy": {"w": np.zeros(50_000, np.float32)}}, 1)
    results = [
        store.snapshot(1),
        store.diff(1, 2),
        store.stats(),
        store.verify(),
        report,
        store.branches()[0],
        store.context(1),
    ]
    for result in results:
        assert json.loads(json.dumps(result.to_dict()))
        assert str(result)
    assert "main/main@1" in str(store.snapshot(1))
    assert repr(store.timeline()) == "<timeline of 2 snapshots>"
    assert "run 'main', branch 'main', step 2" in repr(store)


def test_diff_names_what_changed_and_by_how_much(store: Any) -> None:
    store.commit(1, {"policy": {"w": torch.zeros(4), "old": 1, "shape": torch.zeros(2)}, "same": {"x": 1}, "gone": 1})
    policy = {"w": torch.tensor([0, 0, 2.5, -3]), "new": 1, "shape": torch.zeros(3)}
    store.commit(2, {"policy": policy, "same": {"x": 1}, "here": 1}, drop=["gone"])
    found = store.diff(1, 2)
    assert {each.name: each.change for each in found.components} == {
        "gone": "removed", "policy": "changed", "same": "equal", "here": "added",
    }  # fmt: skip
    leaves = {leaf.path: leaf for each in found.components for leaf in each.leaves}
    assert (leaves["policy/w"].changed_count, leaves["policy/w"].element_count, leaves["policy/w"].largest_change) == (
        2,
        4,
        3.0,
    )
    changes = {path: leaf.change for path, leaf in leaves.items()}
    assert changes == {
        "policy/w": "changed",
        "policy/old": "removed",
        "policy/new": "added",
        "policy/shape": "reshaped",
    }
    assert store.diff(1, 1).is_equal
    assert not found.is_equal


def test_stats_add_up_to_the_files(store: Any) -> None:
    store.commit(1, STATE)
    store.commit(2, STATE)
    store.annotate(1, metrics={"a": 1})
    found = store.stats()
    sizes = {
        top: sum(path.stat().st_size for path in Path(store.path, top).rglob("*") if path.is_file())
        for top in ("packs", "timeline", "index")
    }
    assert (found.pack_bytes, found.timeline_bytes, found.index_bytes) == (
        sizes["packs"],
        sizes["timeline"],
        sizes["index"],
    )
    assert (found.snapshot_count, found.run_count, found.entry_count) == (2, 1, 4)
    logical = 50_000 * 4 + len(b"\x90") + len(b"\x91\x03")
    assert (found.logical_bytes, found.new_bytes) == (2 * logical, logical)
    assert store.snapshot(2).dedup_ratio == float("inf")


def test_unchanged_commit_adds_less_than_a_kibibyte(store: Any) -> None:
    store.commit(1, STATE)
    before = store.stats()
    snapshot = store.commit(2, STATE)
    after = store.stats()
    assert snapshot.new_bytes == 0
    assert after.pack_bytes == before.pack_bytes
    assert after.timeline_bytes - before.timeline_bytes == snapshot.stored_bytes < 1024


# --- memory ---

MEASURE = """if True:
    import json, sys
    import numpy as np, torch, casckpt
    def high():
        with open("/proc/self/status") as file:
            return int(next(line for line in file if line.startswith("VmHWM")).split()[1]) * 1024
    class Extra:
        # peak memory beyond what is there at the start, and beyond an allowance
        def __init__(self, name, allowance=0):
            self.name, self.allowance = name, allowance
        def __enter__(self):
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            self.before = high()
        def __exit__(self, *error):
            extra[self.name] = high() - self.before - self.allowance
    extra = {}
    path, size = sys.argv[1], int(sys.argv[2])
    words = np.arange(size // 8, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    state = torch.from_numpy(words.view(np.int64))
    target = torch.ones_like(state)
    with casckpt.open(path, create=True) as store:
        store.commit(0, {"policy": torch.arange(1000)})
        with Extra("commit"):
            store.commit(1, {"policy": state})
        for name in ("atomic", "streaming"):
            target.fill_(1)
            with Extra(name):
                store.restore_into({"policy": target}, 1, atomic=name == "atomic")
            assert torch.equal(target, state)
        with Extra("restore", size):
            found = store.restore(1)
        assert torch.equal(found["policy"], state)
        del found, target
        with Extra("background", 2 * size):
            for step in (2, 3, 4):
                state.add_(1)
                store.commit_async(step, {"policy": state})
            store.wait()
    print(json.dumps(extra))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's account of peak memory")
@pytest.mark.full
@pytest.mark.parametrize("size", [160 * MIB, 512 * MIB], ids=["160 MiB", "512 MiB"])
def test_commit_and_restore_stay_inside_their_memory(store_path: Path, size: int) -> None:
    extra = run(MEASURE, str(store_path), str(size))
    assert max(extra.values()) < 128 * MIB, {what: f"{count / MIB:.0f} MiB" for what, count in extra.items()}


# --- no names of code in the bytes ---


def test_bytes_of_a_store_name_no_module_and_no_pickle(store_path: Path) -> None:
    state = {
        "net": {
            "w": torch.nn.Parameter(torch.ones(3)),
            "np": np.arange(3),
            "rng": np.random.default_rng(0),
            "g": torch.Generator(),
        },
        "scalars": {
            "size": torch.Size([1]),
            "dtype": torch.float32,
            "np": np.float64(1),
            "set": {1},
            "nt": {"a": (1, 2)},
        },
    }
    with open_store(store_path) as store:
        store.commit(1, state, config={"lr": 1}, metrics={"loss": 0.1})
        store.tag("good", 1)
    content = list(dissect(str(store_path)).plain.values())
    content += [
        path.read_bytes() for top in ("packs", "timeline") for path in (store_path / top).rglob("*") if path.is_file()
    ]
    for data in content:
        for word in (
            b"builtins",
            b"_reconstruct",
            b"torch._",
            b"torch.nn",
            b"numpy.core",
            b"numpy._core",
            b"collections",
            b"__main__",
        ):
            assert word not in data
        assert not re.search(rb"\x80[\x02-\x05](\x95|c|\}|\x8c)", data), "starts like a pickle"


def test_restore_imports_no_pickle_and_nothing_of_the_writers(store_path: Path) -> None:
    code = """if True:
        import json, sys, numpy
        import casckpt, pickle
        def refuse(*arguments, **options):
            raise AssertionError("pickle was used")
        pickle.loads = pickle.load = pickle.Unpickler = refuse
        with casckpt.open(sys.argv[1], read_only=True) as store:
            found = store.restore(1)
            assert store.verify(read_data=True).ok
        assert "torch" not in sys.modules
        print(json.dumps([found["net"]["w"].tolist(), found["net"]["rng"].random()]))
    """
    with open_store(store_path) as store:
        store.commit(1, {"net": {"w": np.ones(3), "rng": np.random.default_rng(0)}})
    assert run(code, str(store_path)) == [[1, 1, 1], np.random.default_rng(0).random()]


# --- other float environments ---

DISPATCHED = np._core._multiarray_umath.__cpu_dispatch__ if hasattr(np, "_core") else ["AVX2", "AVX512F"]
DECODE = """if True:
    import json, sys
    import numpy as np, torch
    from blake3 import blake3
    import casckpt
    if sys.argv[2] == "flush":
        assert torch.set_flush_denormal(True)
    def digests(store, step):
        found = store.restore(step)["x"]
        return [blake3(np.asarray(leaf).tobytes()).hexdigest() for leaf in found.values()]
    with casckpt.open(sys.argv[1]) as store:
        before = digests(store, 1)
        state = store.restore(1)
        again = store.commit(2, state)
        assert again.new_bytes == 0, again.new_bytes
        print(json.dumps([before, digests(store, 2), again.components["x"].manifest]))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "environment"),
    [
        ("flush", {}),
        pytest.param(
            "plain",
            {"NPY_DISABLE_CPU_FEATURES": " ".join(DISPATCHED), "ATEN_CPU_CAPABILITY": "default"},
            marks=pytest.mark.full,
        ),
    ],
    ids=["flush-to-zero", "without AVX"],
)
def test_decoded_bytes_are_the_same_in_every_float_environment(
    store: Any, mode: str, environment: dict[str, str]
) -> None:
    subnormal = np.arange(1, 60_001, dtype=np.uint32).view(np.float32)  # all below the smallest normal number
    noise = np.random.default_rng(0).integers(0, 1 << 32, 60_000, dtype=np.uint32).view(np.float32)
    state = {
        "x": {"subnormal": torch.from_numpy(subnormal), "noise": noise, "double": np.arange(1, 9_001).view(np.float64)}
    }
    store.commit(1, state)
    expected = [blake3(np.asarray(leaf).tobytes()).hexdigest() for leaf in state["x"].values()]
    store.close()
    # numpy warns of features that this machine does not have anyway
    assert run(DECODE, store.path, mode, warnings="ignore", **environment)[:2] == [expected, expected]


# --- processes ---


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_handle_refuses_to_be_used_in_a_forked_child(store: Any) -> None:
    store.commit(1, STATE)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answers = []
            for use in (lambda: store.restore(1), lambda: store.commit(2, STATE), store.steps):
                try:
                    use()
                    answers.append("worked")
                except InvalidInputError as error:
                    answers.append(str(error))
            store.close()  # must not close what the parent uses
            os.write(write, json.dumps(answers).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    answers = json.loads(os.read(read, 65536))
    os.close(read), os.close(write)
    assert all(f"belongs to process {os.getpid()}" in answer and "Open" in answer for answer in answers)
    assert store.commit(2, STATE).step == 2


def test_store_that_nobody_closed_lets_go_when_it_is_collected(store_path: Path) -> None:
    store = open_store(store_path)
    store.commit(1, STATE)
    del store
    gc.collect()
    with open_store(store_path) as again:
        assert again.commit(2, STATE).step == 2
