"""Commits that keep whatever they do not give: each component with the step of its own capture."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.errors import InvalidInputError
from tests.unit.stores import open_store


def test_rest_of_the_parent_is_kept_with_its_own_step(store_path: Path) -> None:
    with open_store(store_path) as store:
        store.commit(100, {"policy": 1, "counters": 100, "buffer": 0})
        store.commit(200, {"counters": 200}, inherit="*", drop=["buffer"])
        snapshot = store.commit(300, {"counters": 300}, inherit="*")
        assert {name: each.step for name, each in snapshot.components.items()} == {"policy": 100, "counters": 300}
        assert not snapshot.is_consistent


def test_rest_is_that_of_the_save_under_way(store_path: Path) -> None:
    with open_store(store_path) as store:
        store.commit_async(1, {"policy": 1, "counters": 1})
        snapshot = store.commit_async(2, {"counters": 2}, inherit="*", necessity={"policy": "reloadable"}).result()
        assert {name: each.step for name, each in snapshot.components.items()} == {"policy": 1, "counters": 2}
        assert snapshot.is_consistent  # a reloadable component's step does not count
        assert store.restore(2) == {"policy": 1, "counters": 2}


def test_first_commit_has_nothing_to_keep(store_path: Path) -> None:
    with open_store(store_path) as store:
        assert set(store.commit(1, {"policy": 1}, inherit="*").components) == {"policy"}
        with pytest.raises(InvalidInputError, match="list of component names"):
            store.commit(2, {"policy": 2}, inherit="policy")
