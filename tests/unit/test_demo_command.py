"""`casckpt demo` before and after the training: options, messages, tables, exit codes."""

from __future__ import annotations

import importlib.util
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

pytest.importorskip("gymnasium", reason='needs the extra "demo"')

from casckpt.demo import _drive
from casckpt.demo._drive import Outcome, Phase, Totals
from casckpt.demo._proof import Claim
from casckpt.demo._screen import ProgressScreen, next_commands, print_outcome
from casckpt.demo.command import demo


def commit(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "metrics": {"return": 20.0 + step},
        "logical_bytes": 180_000,
        "new_bytes": 90_000,
        "stored_bytes": 60_000,
        "commit_s": 0.002,
        "torch_save_s": 0.004,
        "torch_save_bytes": 181_000,
    }


def outcome(*, is_identical: bool) -> Outcome:
    said = "a" * 64, ("a" if is_identical else "b") * 64
    phases = [
        Phase("reference", "reference", commits=[commit(step) for step in range(1, 41)]),
        Phase("resumed", "demo", commits=[commit(step) for step in range(21, 41)]),
    ]
    start = SimpleNamespace(id="i", parent=None, branch="main", step=1, metrics={"return": 20.0}, labels={})
    fork = SimpleNamespace(id="j", parent="i", branch="side", step=2, metrics={"return": 21.0}, labels={"reseed": "9"})
    return Outcome(
        phases={phase.name: phase for phase in phases},
        totals={"reference": Totals(40, 1000, 500, 250), "demo": Totals(40, 1000, 0, 0)},
        lines={"main": [start], "side": [fork]},
        claims=[
            Claim("policy", "manifest", {"reference": said[0], "resumed": said[1]}),
            Claim("policy", "values", {"reference, live": said[0], "resumed, live": said[1]}),
            Claim("torch", "next draws", {"reference": "0.25 0.5", "resumed": "0.25 0.5"}),
        ],
        divergence=None if is_identical else "step 31, component 'policy'",
    )


def printed(found: Outcome) -> str:
    stream = io.StringIO()
    print_outcome(Console(file=stream, width=100), found, "my store", elapsed_s=61.2)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--updates", "10", "--kill-at", "10"], "not before the last update"),
        (["--updates", "3"], "3 is not in the range"),
        (["--kill-at", "1"], "1 is not in the range"),
        (["--store", "no/such/folder/store"], "is not there"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_made(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(demo, options)
    assert os.listdir() == []
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_folder_that_holds_something_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    result = CliRunner().invoke(demo, ["--store", str(tmp_path)])
    assert result.exit_code == 2
    assert "already there" in result.output
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_without_gymnasium_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gymnasium" else found(name))
    result = CliRunner().invoke(demo, [])
    assert result.exit_code == 1
    assert 'pip install "casckpt[demo]"' in result.output


@pytest.mark.parametrize(("is_identical", "exit_code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_the_runs_are_identical(
    is_identical: bool, exit_code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_drive, "run_demo", lambda plan, screen: outcome(is_identical=is_identical))
    result = CliRunner().invoke(demo, ["--store", str(tmp_path / "store")])
    assert result.exit_code == exit_code


def test_json_is_one_document_on_standard_output_with_the_progress_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(plan: Any, screen: ProgressScreen) -> Outcome:
        screen.note("progress")
        return outcome(is_identical=False)

    monkeypatch.setattr(_drive, "run_demo", run)
    result = CliRunner().invoke(demo, ["--store", str(tmp_path / "store"), "--updates", "40", "--json"])
    assert result.exit_code == 1, result.output
    document = json.loads(result.stdout)
    assert "progress" in result.stderr
    assert document["is_identical"] is False
    assert document["first_divergence"] == "step 31, component 'policy'"
    assert [claim["holds"] for claim in document["claims"]] == [False, False, True]
    assert document["plan"]["kill_at"] == 20
    assert document["totals"]["reference"]["dedup_ratio"] == 2.0
    assert document["branches"] == {"main": [1], "side": [2]}


def test_an_interrupt_ends_with_its_own_exit_code_and_names_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(plan: Any, screen: Any) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(_drive, "run_demo", interrupted)
    result = CliRunner().invoke(demo, ["--store", str(tmp_path / "store")])
    assert result.exit_code == 130
    assert str(tmp_path / "store") in result.output.replace("\n", "")


def test_a_difference_is_shown_with_what_each_side_says() -> None:
    text = printed(outcome(is_identical=False))
    assert "✗" in text
    assert "reference: aaaaaaaaaaaa" in text
    assert "resumed: bbbbbbbbbbbb" in text
    assert "step 31, component 'policy'" in text
    assert "Bit-identical" not in text


def test_agreement_is_shown_once_with_the_ratios_and_the_next_commands() -> None:
    text = printed(outcome(is_identical=True))
    assert "✗" not in text
    assert "Bit-identical" in text
    assert text.count("aaaaaaaaaaaa") == 2
    assert "2.0×" in text  # 1000 logical ÷ 500 new
    assert "2.00×" in text  # 500 new ÷ 250 stored
    assert "side: steps 2 to 2, return 21.0 to 21.0, from main@1, reseed=9" in text
    assert "casckpt log 'my store'" in text


def test_the_table_shows_a_selection_that_ends_with_the_last_step() -> None:
    rows = [line.split()[0] for line in printed(outcome(is_identical=True)).splitlines() if "181.0 kB" in line]
    assert 8 <= len(rows) <= 16
    assert rows.count("40") == 2


def test_next_commands_name_the_branch() -> None:
    assert any("side" in command for command in next_commands("s", outcome(is_identical=True)))


def test_progress_without_a_terminal_is_plain_lines() -> None:
    stream = io.StringIO()
    with ProgressScreen(Console(file=stream, width=100)) as screen:
        screen.phase("reference", 1, 40)
        for step in range(1, 41):
            screen.committed("reference", commit(step))
        screen.note("[not markup]")
    text = stream.getvalue()
    assert "\x1b" not in text
    assert text.count("of 40: return") == 10
    assert "[not markup]" in text
