"""Every disease is diagnosed by name, costs what it must, and leaves the rest alone."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.errors import CasckptError, CorruptionError, IncompleteError, NotFoundError
from casckpt.testing.trees import difference
from tests.broken.diseases import DISEASES, STEPS, Disease, make_healthy, state
from tests.unit.stores import open_store

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # that is how damage is told


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("healthy") / "store"
    make_healthy(path)
    return path


@pytest.fixture(params=DISEASES)
def sick(request: pytest.FixtureRequest, healthy: Path, tmp_path: Path) -> Iterator[tuple[Path, Disease]]:
    path = tmp_path / "store"
    shutil.copytree(healthy, path)
    disease = DISEASES[request.param]
    disease.infect(path)
    yield path, disease


@pytest.mark.few(8)
def test_disease_is_diagnosed_and_costs_what_it_must(sick: tuple[Path, Disease]) -> None:
    path, disease = sick
    if disease.refused:
        for read_only in (True, False):
            with pytest.raises(CasckptError) as caught:
                open_store(path, create=False, read_only=read_only)
            assert type(caught.value).__name__ == disease.refused
            assert disease.says in str(caught.value)
        return
    for read_only in (True, False):
        with open_store(path, create=False, read_only=read_only) as store:
            _check_listing(store, disease)
            _check_restores(store, disease)
            _check_report(store, disease)
            _check_latest(store, disease)
    with open_store(path, create=False) as store:
        _check_training_goes_on(store)


def _check_listing(store: Any, disease: Disease) -> None:
    listed = [step for step in STEPS if step not in disease.unlisted]
    assert store.steps() == listed
    assert [snapshot.step for snapshot in store.timeline()] == listed
    assert [snapshot.metrics for snapshot in store.timeline(all_runs=True)] == [{"step": step} for step in listed]


def _check_restores(store: Any, disease: Disease) -> None:
    for step in STEPS:
        if step in disease.lost:
            with pytest.raises((CorruptionError, IncompleteError, NotFoundError)) as caught:
                store.restore(step)
            assert str(step) in str(caught.value)
        else:
            assert difference(state(step), store.restore(step)) is None


def _check_report(store: Any, disease: Disease) -> None:
    report = store.verify(read_data=True)
    assert {problem.kind for problem in report.problems} <= disease.kinds
    assert report.ok == (not disease.kinds)
    assert disease.says in str(report)
    named = {user[2] for problem in report.problems for user in problem.snapshots}
    assert named == set(disease.lost) - set(disease.unlisted)


def _check_latest(store: Any, disease: Disease) -> None:
    newest = max(step for step in STEPS if step not in disease.lost)
    assert store.restore()["counter"] == {"step": newest}


def _check_training_goes_on(store: Any) -> None:
    found = store.resume()
    assert found is not None
    snapshot = store.commit(9, state(9))
    assert difference(state(9), store.restore(9)) is None
    with open_store(store.path, create=False, read_only=True) as again:
        assert difference(state(9), again.restore()) is None
        assert again.snapshot().id == snapshot.id


def test_diseases_differ_and_healthy_means_no_complaint(healthy: Path, tmp_path: Path) -> None:
    assert len(DISEASES) > 20
    shutil.copytree(healthy, tmp_path / "store")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with casckpt.open(tmp_path / "store", read_only=True) as store:
            assert store.verify(read_data=True).ok
