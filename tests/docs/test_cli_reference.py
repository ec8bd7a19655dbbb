"""docs/cli.md says what the commands have: each option, each JSON key, each exit code, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest

from casckpt.cli import _exits
from casckpt.cli._group import COMMANDS
from casckpt.cli._group import casckpt as group
from tests.unit.cli_stores import call, make_store
from tests.unit.rings import make_ring_store

TEXT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
OWN_REFERENCE = {"demo", "drill", "run"}  # what its options do is its own `--help`
RUNS = {  # a call of each command with --json on the store of `make_store`
    "log": ["log", "STORE"],
    "show": ["show", "STORE", "good", "--run", "walker", "--leaves"],
    "diff": ["diff", "STORE", "main@1", "main@2", "--run", "walker"],
    "bisect": ["bisect", "STORE", "main@4", "side@3", "--run", "walker"],
    "runs": ["runs", "STORE"],
    "branches": ["branches", "STORE"],
    "du": ["du", "STORE"],
    "export": ["export", "STORE", "good", "OUT", "--run", "walker"],
    "replay": ["replay", "show", "RING", "1", "replay"],
    "dump": ["dump", "STORE", "1"],
    "verify": ["verify", "STORE"],
    "doctor": ["doctor", "STORE"],
    "audit": ["audit", "STORE"],
    "plan": ["plan", "STORE", "--run", "walker"],
    "coverage": ["coverage", "STORE", "good", "--template", "ppo", "--run", "walker"],
    "tag": ["tag", "STORE", "new", "main@1", "--run", "walker"],
    "untag": ["untag", "STORE", "good", "--run", "walker"],
    "annotate": ["annotate", "STORE", "good", "-m", "a=1", "--run", "walker"],
    "retire": ["retire", "STORE", "good", "--run", "walker"],
}


def sections() -> dict[str, str]:
    """The text of each command's section."""
    parts = re.split(r"^### (\w+)$", TEXT, flags=re.MULTILINE)
    return {
        name: re.split(r"^## ", body, flags=re.MULTILINE)[0]
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def options_in(text: str) -> set[str]:
    """Options in the first column of a section's table."""
    rows = re.findall(r"^\| (`-[^|]*)\|", text, flags=re.MULTILINE)
    return {option for row in rows for option in re.findall(r"`(-{1,2}[a-z-]+)", row)}


def keys_in(text: str) -> set[str]:
    """Keys in the row of --json."""
    (row,) = re.findall(r"^\| `--json` \| keys: (.*) \|$", text, flags=re.MULTILINE)
    return set(re.findall(r"`([a-z_]+)`", row))


def command(name: str) -> click.Command:
    found = group.get_command(click.Context(group), name)
    assert found is not None
    return found


def test_every_command_has_a_section_in_the_order_of_the_help() -> None:
    assert list(sections()) == list(COMMANDS)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in OWN_REFERENCE])
def test_the_options_of_a_command_are_those_of_its_section(name: str) -> None:
    options = {
        option
        for each in (command(name), *getattr(command(name), "commands", {}).values())
        for parameter in each.params
        if isinstance(parameter, click.Option)
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert options_in(sections()[name]) == options


@pytest.mark.parametrize("name", COMMANDS)
def test_every_section_has_an_example(name: str) -> None:
    assert re.search(rf"^casckpt {name}\b", sections()[name], flags=re.MULTILINE)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in OWN_REFERENCE])
def test_every_command_has_json_and_its_keys_are_documented(name: str, tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    if name == "replay":
        make_ring_store(tmp_path / "ring")
    places = {"STORE": tmp_path / "store", "RING": tmp_path / "ring", "OUT": tmp_path / "out"}
    called = call(*[places.get(word, word) for word in RUNS[name]], "--json")
    assert called.err == ""
    document: dict[str, Any] = called.json
    assert document.pop("command") == name
    assert document.pop("json_version") == 1
    listed = {"run", "tags"} if name == "tag" else set()
    assert keys_in(sections()[name]) == set(document) | listed


def test_the_exit_codes_are_those_of_the_code() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", TEXT, flags=re.MULTILINE)}
    assert documented == {value for name, value in vars(_exits).items() if name.isupper() and isinstance(value, int)}


def test_the_group_options_are_in_the_synopsis() -> None:
    options = {option for parameter in group.params for option in parameter.opts}
    assert set(re.findall(r"\[(--\w+)\]", TEXT.partition("Every command")[0])) == options


def test_the_checks_see_a_missing_option_and_key() -> None:
    sample = "| option | |\n|---|---|\n| `-n`, `--count N` | so `--many` |\n| `--json` | keys: `a`, `b_c` |\n"
    assert options_in(sample) == {"-n", "--count", "--json"}
    assert keys_in(sample) == {"a", "b_c"}
