"""Every row of the benchmarks runs in miniature: it yields finite figures with the keys that readers of JSON rely on.

Nothing here judges a time: a busy machine must not fail a test.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import casckpt
from benchmarks import __main__ as command
from benchmarks import _restore_child, chains, footprint
from benchmarks._harness import Settings

# The cases that each row must print, counted by hand from docs/benchmarks.md.
CASE_COUNTS = {
    "T1": 3,
    "T2": 4,
    "T3": 10,
    "T3w": 1,
    "T3e": 2,
    "T3we": 1,
    "T4": 4,
    "T5": 18,
    "T5k": 6,
    "T7": 1,
    "T8": 6,
    "T9": 9,
    "T9p": 10,
    "R01": 2,
    "T10": 7,
    "T10r": 4,
    "T11": 1,
    "T12": 2,
}
SLOW_ROWS = (
    "T1",
    "T2",
    "T3",
    "T3w",
    "T3e",
    "T3we",
    "T4",
    "T5",
    "T5k",
    "T8",
    "T9",
    "T9p",
    "R01",
    "T10",
    "T10r",
    "T11",
)  # those that take more than a second each


class Restores:
    """The row's way to time a restore, in a process of its own, the first time; then without one.

    Such a process does little more than import torch, and the row starts some dozens of them.
    """

    def __init__(self) -> None:
        self._by_process = chains.restore_costs
        self._count = 0

    def __call__(self, path: str, step: int) -> tuple[float, float]:
        self._count += 1
        return self._by_process(path, step) if self._count == 1 else _restore_child.restore_costs(path, step)


@pytest.fixture
def tiny(tmp_path: Path) -> Settings:
    return Settings(
        folder=str(tmp_path),
        size_bytes=3 << 20,
        pair_count=1,
        tensor_counts=(3, 40),
        commit_count=4,
        history_count=12,
        stall_count=2,
        training_s=0.2,
        training_pair_count=1,
        full_commit_interval_s=0.05,
        start_count=1,
        warm_up_count=1,
        syncs=False,
    )


def test_every_row_is_covered_here() -> None:
    assert list(command.ROWS) == list(CASE_COUNTS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW_ROWS else []) for name in CASE_COUNTS]
)
def test_row_in_miniature_yields_finite_figures_and_leaves_no_files(
    name: str, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "restore_costs", Restores())
    monkeypatch.setattr(footprint, "MEMORY_CASES", ("commit_async", "restore", "restore_into_streaming"))  # one each
    found = list(command.ROWS[name](tiny))
    assert len(found) == CASE_COUNTS[name]
    for each in found:
        assert each.row == name.rstrip("w")
        assert each.low <= each.value <= each.high
        assert all(math.isfinite(figure) for figure in (each.value, each.low, each.high))
        assert each.unit in ("×", "B", "ms", "s", "MiB", "%", "of raw", "MB/s")
        assert each.unit != "×" or (each.value > 0 and each.subject and each.baseline)
    assert len({each.case for each in found}) == len(found)
    assert list(Path(tiny.folder).iterdir()) == []


def test_command_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.QUICK, "commit_count", 3)
    target = tmp_path / "figures.json"
    assert command.main(["--quick", "--rows", "T7", "--folder", str(tmp_path), "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "T7" in printed and "file system" in printed
    document = json.loads(target.read_text())
    assert set(document) == {"command", "machine", "settings", "rows"}
    assert document["rows"][0]["row"] == "T7"
    assert document["rows"][0]["is_reached"] in (True, False)


def test_unknown_row_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--rows", "T7,T99"]) == 2
    assert "T99" in capsys.readouterr().err


@pytest.mark.full
def test_timed_restore_imports_nothing_of_the_product_after_its_clock_has_begun(tmp_path: Path) -> None:
    """Else both sides of T5 share a constant, and every ratio looks smaller than it is."""
    network = torch.nn.Linear(512, 512)
    optimizer = torch.optim.Adam(network.parameters())
    with casckpt.open(tmp_path / "store", create=True) as store:
        for step in range(1, 4):
            network(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
            store.commit(step, {"network": network, "optimizer": optimizer, "rng": casckpt.RngState()})
    code = (
        "import sys; from benchmarks._restore_child import restore_costs\n"
        "before = set(sys.modules); restore_costs(sys.argv[1], 3)\n"
        "print(sorted(each for each in set(sys.modules) - before if each.startswith('casckpt')))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"
