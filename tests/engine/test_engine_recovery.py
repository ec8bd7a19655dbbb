"""The whole way, in real processes: killed, started again, decided, restored, checked, and proven to go on exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import casckpt
from casckpt.recovery import list_generations
from tests.unit.cli_stores import call

CHILD = str(Path(__file__).parent / "recovery_child.py")
LAST = 10


def manifests(store: casckpt.Store, ref: object) -> dict[str, str]:
    """What a step is, bit by bit: the address of each component."""
    return {name: each.manifest for name, each in store.snapshot(ref).components.items()}


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_training_that_is_killed_goes_on_from_what_the_coordinator_chose_and_bisect_proves_it(tmp_path: Path) -> None:
    path, marker = tmp_path / "store", tmp_path / "marker"
    called = call("run", "--store", path, "--silence", 1e9, "--", sys.executable, CHILD, path, marker, LAST)
    assert called.code == 0
    assert "killed by SIGKILL" in called.err
    subprocess.run([sys.executable, CHILD, str(tmp_path / "calm"), str(tmp_path / "other"), str(LAST)], check=True)

    with casckpt.open(path, read_only=True) as store, casckpt.open(tmp_path / "calm", read_only=True) as calm:
        assert store.steps() == list(range(1, LAST + 1)) == calm.steps()
        assert [manifests(store, step) == manifests(calm, step) for step in range(1, LAST + 1)] == [True] * LAST
        lost = store.snapshot("main@8")
        assert (lost.labels["diverged"], store.branch) == ("true", "main-6")
        first, second = list_generations(store)
        assert (first.snapshot, second.snapshot) == (None, store.snapshot("main@6").id)
        assert second.reasons[0].startswith("oom-kill at step 8: killed by SIGKILL")
        assert any("step 8: labelled diverged=true" in why for why in second.reasons)

    proof = call("bisect", path)
    assert proof.code == 0
    assert "7–8 bit-identical (2 committed twice)" in proof.out
    mark = json.loads(marker.read_text())
    assert (mark["state"], mark["generation"], mark["attempt"]) == ("restored", 2, 1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["calm", "marker", "other", "store"]
