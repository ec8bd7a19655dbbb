"""Stores written by earlier releases restore, by today's code and by the independent reader, to what was recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.testing.invariants import check_depths
from tests.compat.contents import contents, contents_read
from tests.compat.make_golden import MAKERS, collected_state, trainings
from tests.conformance.independent_reader import read_store
from tests.conformance.sample_states import sample

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
CODECS = {"v1": {0, 1, 2, 3}, "v2": {0, 1, 2, 3, 4, 5}, "v3": {0, 1, 3}}
PREDICTIONS: dict[str, set[int]] = {"v1": set(), "v2": {1, 2, 3, 4, 5, 6}, "v3": set()}  # kinds
DIFFERENCES: dict[str, set[int]] = {"v1": set(), "v2": {0, 1}, "v3": set()}  # methods
KINDS = {"annotate", "commit", "condemn", "create", "generation", "prune", "retire", "seal", "supersede", "tag", "thin"}


def expected_of(version: str) -> dict[str, Any]:
    found = json.loads((GOLDEN / version / "expected.json").read_text())
    assert len(found["snapshots"]) >= 5
    return found  # type: ignore[no-any-return]


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A writable copy, so that nothing of a test ends up in the golden store."""
    return Path(shutil.copytree(GOLDEN / request.param / "store", tmp_path / "store"))


@pytest.mark.parametrize("version", VERSIONS)
def test_independent_reader_restores_the_golden_store(version: str) -> None:
    expected = expected_of(version)
    found = read_store(GOLDEN / version / "store")
    assert [snapshot.id.hex() for snapshot in found.snapshots] == [each["id"] for each in expected["snapshots"]]
    for snapshot, each in zip(found.snapshots, expected["snapshots"], strict=True):
        assert (snapshot.run, snapshot.branch, snapshot.step) == (each["run"], each["branch"], each["step"])
        assert contents_read(snapshot.components) == each["contents"]
    assert {f"{run}/{name}": tagged.hex() for (run, name), tagged in found.tags.items()} == expected["tags"]
    assert [snapshot.id.hex() for snapshot in found.snapshots if snapshot.is_retired] == expected["retired"]
    assert found.codecs == CODECS[version]
    assert {record.params[0] for record in found.records if record.codec == 5} == PREDICTIONS[version]
    assert {record.params[1] for record in found.records if record.codec == 4} == DIFFERENCES[version]


@pytest.mark.few(1)
@pytest.mark.parametrize(("version", "copied"), [(version, version) for version in VERSIONS], indirect=["copied"])
def test_todays_code_restores_the_golden_store(version: str, copied: Path) -> None:
    expected = expected_of(version)
    for each in expected["snapshots"]:
        with casckpt.open(copied, run=each["run"], read_only=True) as store:
            names = each.get("names")  # of what a collection left; none: all
            if names != []:
                found = store.restore(each["id"], only=names, allow_mixed=True, allow_pickle=True)
                assert contents(found) == each["contents"]
            snapshot = store.snapshot(each["id"])
            assert (snapshot.branch, snapshot.step) == (each["branch"], each["step"])
    run = expected["snapshots"][0]["run"]
    with casckpt.open(copied, run=run) as store:
        report = store.verify()
        assert report.ok, report
        assert {f"{run}/{name}": tagged for name, tagged in store.tags().items()} == expected["tags"]
        assert store.snapshot(expected["retired"][0]).is_retired


@pytest.mark.parametrize("copied", ["v3"], indirect=True)
def test_collected_golden_store_has_every_kind_of_entry_and_an_epoch(copied: Path) -> None:
    with casckpt.open(copied) as store:
        timeline = store._timeline
        bodies = [timeline.read(seq).envelope.body for seq in timeline.numbers()]
        assert {body.__struct_config__.tag for body in bodies} == KINDS
        assert timeline.epochs.numbers() == [0]
        assert store.snapshot("seventh").metrics == {"evaluation": 89}
        store.commit(9, collected_state(9))
    assert contents_read(read_store(copied).snapshots[-1].components) == contents(collected_state(9))


@pytest.mark.parametrize("copied", ["v1"], indirect=True)
def test_annotations_of_the_golden_store_are_read(copied: Path) -> None:
    with casckpt.open(copied, run="seed-0", read_only=True) as store:
        assert store.snapshot("best").metrics == {"return": 2.25, "solved": False, "late": 1}


@pytest.mark.full
@pytest.mark.parametrize("copied", ["v2"], indirect=True)
def test_todays_code_continues_the_trainings_of_the_golden_store(copied: Path) -> None:
    """On bases that an earlier release wrote."""
    states = list(trainings("sgd", 5))
    with casckpt.open(copied, run="sgd") as store:
        for step in (4, 5):
            store.commit(step, states[step - 1])
            assert contents(store.restore(step)) == contents(states[step - 1])
    found = read_store(copied)
    assert [contents_read(snapshot.components) for snapshot in found.snapshots[-2:]] == list(map(contents, states[3:]))
    with casckpt.open(copied, run="sgd") as store:
        assert store.verify(read_data=True).ok
        check_depths(store)


@pytest.mark.parametrize("copied", ["v1"], indirect=True)
def test_todays_code_continues_the_golden_store(copied: Path) -> None:
    state = {"counters": {"frames": 1, "x": np.arange(5)}}
    with casckpt.open(copied, run="seed-1") as store:
        store.resume()
        new = store.commit(200, state, drop=list(sample(0).state))
    assert contents_read(read_store(copied).snapshots[-1].components) == contents(state)
    assert new.parent is not None


def test_store_copied_without_its_empty_folders_is_written_to_and_read(tmp_path: Path) -> None:
    with casckpt.open(tmp_path / "store", create=True) as store:
        store.commit(1, {"a": {"x": np.arange(5)}})
    for name in ("tmp", "packs"):
        (tmp_path / "store" / name).rmdir()
    noise = np.random.default_rng(0).bytes(200_000)
    with casckpt.open(tmp_path / "store") as store:
        store.commit(2, {"a": {"x": noise}})
    assert read_store(tmp_path / "store").snapshots[1].components["a"].leaves["a/x"].data == noise


@pytest.mark.parametrize("copied", ["v1"], indirect=True)
def test_memory_shared_in_the_golden_store_is_shared_again(copied: Path) -> None:
    with casckpt.open(copied, run="seed-0", read_only=True) as store:
        shared = store.restore(0, only=["shared"])["shared"]
    base = shared["base"].numpy()
    assert all(np.shares_memory(base, np.asarray(shared[name])) for name in ("part", "even", "as numpy"))
    assert shared["tied"] is shared["again"]
    assert not np.shares_memory(base, shared["copy"].numpy())
    assert torch.equal(shared["part"], shared["base"][2:5])


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_generator_still_makes_what_both_readers_understand(tmp_path: Path, version: str) -> None:
    expected = MAKERS[version](tmp_path / "store")
    found = read_store(tmp_path / "store")
    assert [contents_read(snapshot.components) for snapshot in found.snapshots] == [
        each["contents"] for each in expected["snapshots"]
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_store_names_no_class_or_module_to_import(version: str) -> None:
    """No pickle outside the one opaque leaf, and no dotted path of a library (S29)."""
    found = read_store(GOLDEN / version / "store")
    opaque = [path for snapshot in found.snapshots for each in snapshot.components.values() for path in each.opaque]
    assert opaque == (["unknown"] if version == "v1" else [])
    for path in (GOLDEN / version / "store").rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert b"torch._utils" not in data
        assert b"numpy.core" not in data
        assert b"numpy._core" not in data
