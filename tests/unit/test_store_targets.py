"""Which components a restore into live objects needs, and which it may leave alone when told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.errors import InvalidInputError, MismatchError
from tests.unit.stores import open_store


@pytest.fixture
def path(store_path: Path) -> Path:
    with open_store(store_path) as store:
        store.commit(1, {"policy": torch.ones(3), "buffer": torch.ones(2)})
    return store_path


def test_component_named_in_leave_needs_no_target_and_is_reported(path: Path) -> None:
    policy = torch.zeros(3)
    with open_store(path) as store:
        with pytest.raises(MismatchError, match=r"also has \['buffer'\].*leave="):
            store.resume_into({"policy": policy})
        for leave, message in ((["buffer", "policy"], r"\['policy'\] have targets"), ("buffer", "list of names")):
            with pytest.raises(InvalidInputError, match=message):
                store.resume_into({"policy": policy}, leave=leave)
        assert policy.tolist() == [0, 0, 0]
        report = store.resume_into({"policy": policy}, leave=["buffer"])
    assert policy.tolist() == [1, 1, 1]
    assert report.not_restored == ("buffer",)


def test_target_that_the_snapshot_lacks_is_refused_or_reported_as_asked(path: Path) -> None:
    policy, critic = torch.zeros(3), torch.zeros(3)
    with open_store(path) as store:
        with pytest.raises(MismatchError, match=r"no component \['critic'\]"):
            store.restore_into({"policy": policy, "critic": critic})
        assert policy.tolist() == [0, 0, 0]
        report: casckpt.RestoreReport = store.restore_into({"policy": policy, "critic": critic}, strict=False)
    assert (policy.tolist(), critic.tolist()) == ([1, 1, 1], [0, 0, 0])
    assert report.not_stored == ("critic",)
    assert "not in the snapshot: critic" in str(report)
