"""The command line as a whole: start, errors, exit codes, plug-ins, pipes and terminals."""

from __future__ import annotations

import errno
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest

import casckpt
from casckpt import errors
from casckpt.cli import _exits, _group
from casckpt.cli._screen import plain
from casckpt.cli._text import pairs, plural, ratio, shown, size
from tests.unit.cli_stores import call, make_store

MAIN = [sys.executable, "-c", "from casckpt.cli import main; main()"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("group") / "store"
    make_store(path)
    return path


def loaded_by(*arguments: object) -> set[str]:
    """Top-level modules that a real call has loaded at its end."""
    program = (
        "import sys, atexit; from casckpt.cli import main; sys.argv = ['casckpt', *sys.argv[1:]]\n"
        "atexit.register(lambda: print('LOADED', *{name.split('.')[0] for name in sys.modules}, file=sys.stderr))\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return set(done.stderr.partition("LOADED ")[2].split())


def test_help_loads_neither_the_store_nor_rich() -> None:
    assert loaded_by("--help") & {"torch", "numpy", "rich", "lmdb", "blake3", "zstandard"} == set()


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["log", "show", "du"])
def test_looking_loads_neither_torch_nor_numpy(store: Path, command: str) -> None:
    assert loaded_by(command, store) & {"torch", "numpy", "safetensors"} == set()


def test_help_lists_every_command_and_each_has_help_of_its_own() -> None:
    listed = call("--help").out
    for name in _group.COMMANDS:
        assert f"  {name} " in listed
        assert call(name, "--help").out.startswith(f"Usage: casckpt {name} ")


def test_version_is_the_librarys() -> None:
    assert call("--version").out == f"casckpt {casckpt.__version__}\n"


@pytest.mark.parametrize("arguments", [("nonesuch",), ("log",), ("log", "x", "--nonesuch"), ("diff", "x", "1")])
def test_wrong_usage_is_code_2(arguments: tuple[str, ...]) -> None:
    called = call(*arguments)
    assert called.code == 2
    assert called.out == ""
    assert "Error:" in called.err


@pytest.mark.parametrize("command", ["log", "show", "verify", "du", "audit", "runs", "branches", "dump"])
def test_a_store_that_is_not_there_is_code_3_and_is_not_made(tmp_path: Path, command: str) -> None:
    called = call(command, tmp_path / "typo", *["document"] * (command == "dump"))
    assert (called.code, called.out) == (3, "")
    assert called.err.startswith("casckpt: ")
    assert "typo" in called.err
    assert called.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotFoundError, 3),
        (errors.CorruptionError, 4),
        (errors.BusyError, 5),
        (errors.ConflictError, 5),
        (errors.FencedError, 5),
        (errors.StorageError, 6),
        (errors.OutOfSpaceError, 6),
        (errors.IncompleteError, 7),
        (errors.UnsupportedFormatError, 8),
        (errors.AlreadyExistsError, 9),
        (errors.InvalidInputError, 2),
        (errors.UnsupportedStateError, 2),
        (errors.ReadOnlyError, 2),
    ],
)
def test_each_kind_of_error_has_its_code(
    monkeypatch: pytest.MonkeyPatch, error: type[errors.CasckptError], code: int
) -> None:
    _raising(monkeypatch, error("what failed. What to do."))
    called = call("log", "anywhere")
    assert (called.code, called.out, called.err) == (code, "", "casckpt: what failed. What to do.\n")


def _raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Opening a store raises `error`."""

    def open_store(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("casckpt.store.opening.open_store", open_store)


def test_an_object_that_is_nowhere_is_damage_not_a_wrong_name() -> None:
    assert _exits.code_of(errors.NotFoundError("gone", object_id=bytes(32))) == 4


def test_an_error_of_the_operating_system_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    _raising(monkeypatch, PermissionError(errno.EACCES, "Permission denied", "a/file"))
    called = call("log", "anywhere")
    assert (called.code, called.err) == (6, "casckpt: a/file: Permission denied\n")


def test_a_defect_is_one_message_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    _raising(monkeypatch, ZeroDivisionError("oops"))
    called = call("log", "anywhere")
    assert (called.code, called.out) == (70, "")
    assert called.err.startswith("casckpt: unexpected ZeroDivisionError: oops.")
    assert called.err.count("\n") == 1


@pytest.mark.parametrize("by_environment", [False, True])
def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, by_environment: bool) -> None:
    _raising(monkeypatch, ZeroDivisionError("oops"))
    if by_environment:
        monkeypatch.setenv("CASCKPT_DEBUG", "1")
    result = click.testing.CliRunner().invoke(
        _group.casckpt, [*([] if by_environment else ["--debug"]), "log", "anywhere"]
    )
    assert result.exit_code == 70
    assert "Traceback (most recent call last)" in result.stderr
    assert "ZeroDivisionError: oops" in result.stderr


def test_an_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    _raising(monkeypatch, KeyboardInterrupt())
    called = call("log", "anywhere")
    assert (called.code, called.out, called.err) == (130, "", "casckpt: stopped.\n")


def test_a_real_interrupt_ends_a_process_with_130_and_one_line(store: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "wait")  # a command that waits for ever, without sleeping
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # else as whoever began the tests
        "import casckpt.store.opening as opening\n"
        f"opening.open_store = lambda *a, **k: (print('there', flush=True), open({str(tmp_path / 'wait')!r}))\n"
        "from casckpt.cli import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, "log", str(store)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGINT)
        stderr = process.stderr.read()
    assert process.returncode == 130
    assert stderr == "casckpt: stopped.\n"


def test_a_closed_pipe_ends_a_process_quietly_with_141(store: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [*MAIN, "log", str(store), "--json"], stdout=write_end, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_encoding_without_the_characters_still_prints(store: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*MAIN, "log", str(store)], capture_output=True, env=environment, check=True)
    assert done.stdout.isascii()
    assert b"walker" in done.stdout


def on_terminal(arguments: list[str], **environment: str) -> str:
    """Run a real process on a terminal of 100 columns; returns what it wrote there."""
    master, slave = pty.openpty()
    try:
        variables = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"} | environment
        with subprocess.Popen([*MAIN, *arguments], stdout=slave, stderr=slave, env=variables) as process:
            os.close(slave)
            slave = -1
            text = b"".join(_chunks(master)).decode()
        assert process.returncode in (0, 1)
        return text
    finally:
        os.close(master)
        if slave >= 0:
            os.close(slave)


def _chunks(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # Linux says EIO when the other side is closed
            return
        if not piece:
            return
        yield piece


@pytest.mark.full
def test_colours_come_on_a_terminal_and_not_with_no_color(store: Path) -> None:
    assert "\x1b[32m" in on_terminal(["log", str(store)])
    assert "\x1b[32m" not in on_terminal(["log", str(store)], NO_COLOR="1")


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments", [("log",), ("log", "--all-runs"), ("show", "--leaves"), ("du",), ("doctor",), ("verify",), ("runs",)]
)
def test_nothing_is_wider_than_100_columns(store: Path, arguments: tuple[str, ...]) -> None:
    text = on_terminal([arguments[0], str(store), *arguments[1:]], NO_COLOR="1", TERM="dumb")
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 100
    assert len(lines) >= 3


@pytest.mark.full
def test_progress_is_drawn_on_a_terminal_alone(store: Path) -> None:
    assert "objects read" in on_terminal(["verify", str(store), "--read-data"])
    assert call("verify", store, "--read-data").err == ""


# --- plug-ins ---


def _plugin(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    plugin = EntryPoint("extra", value, _group.PLUGIN_GROUP)
    monkeypatch.setattr(_group, "entry_points", lambda group: [plugin] if group == _group.PLUGIN_GROUP else [])
    monkeypatch.setattr("casckpt.cli._checks.entry_points", lambda group: [plugin])


@click.command()
@click.argument("path")
def extra(path: str) -> None:
    """A command of another package."""
    click.echo(f"extra {path}")


def test_a_command_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    _plugin(monkeypatch, f"{__name__}:extra")
    assert call("extra", "here").out == "extra here\n"
    assert f"extra  Comes from {__name__}" in call("--help").out


@pytest.mark.parametrize("value", ["casckpt_nonesuch.cli:gc", f"{__name__}:nonesuch", f"{__name__}:MAIN"])
def test_a_broken_plug_in_breaks_nothing_but_itself(monkeypatch: pytest.MonkeyPatch, store: Path, value: str) -> None:
    _plugin(monkeypatch, value)
    assert call("--help").code == 0
    assert call("log", store).code == 0
    called = call("extra")
    assert called.code == 1
    assert value in called.err


def test_doctor_reports_a_broken_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    _plugin(monkeypatch, "casckpt_nonesuch.cli:gc")
    findings = [each for each in call("doctor", "--json").json["findings"] if each["topic"] == "plug-in"]
    assert [each["level"] for each in findings] == ["warn"]
    assert "casckpt_nonesuch" in findings[0]["text"]


def test_a_plug_in_cannot_take_a_built_in_name(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    plugin = EntryPoint("runs", f"{__name__}:extra", _group.PLUGIN_GROUP)
    monkeypatch.setattr(_group, "entry_points", lambda group: [plugin])
    assert "walker" in call("runs", store).out


# --- words ---


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1049, "1.05 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (5 * 10**15, "5.00 PB"),
        (10**19, "10000 PB"),
    ],
)
def test_sizes_have_three_digits(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (float("inf"), "–"), (1.0, "1.00×"), (9.996, "10.0×"), (123.4, "123×"), (312_345.0, "312k×")],
)
def test_ratios_have_three_digits(value: float | None, text: str) -> None:
    assert ratio(value) == text


def test_words_are_counted_in_english() -> None:
    assert [plural(n, noun) for n, noun in ((1, "branch"), (2, "branch"), (0, "entry"), (2, "run"), (1, "entry"))] == [
        "1 branch",
        "2 branches",
        "0 entries",
        "2 runs",
        "1 entry",
    ]


def test_stored_text_cannot_steer_a_terminal() -> None:
    assert shown("a\x1b[2Jb\u202ec\ud800ä\nx") == "a\\x1b[2Jb\\u202ec\\ud800ä\nx"


def test_metrics_are_short() -> None:
    assert pairs({"return": 1 / 3, "n": 12, "note": "ok"}) == "return=0.33333 n=12 note=ok"


def test_json_says_what_json_lacks() -> None:
    values = plain({1: float("nan"), "b": [float("-inf"), float("inf"), b"\x01\xff", (None, True)]})
    assert values == {"1": "NaN", "b": ["-Infinity", "Infinity", "01ff", [None, True]]}


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "casckpt", "--version"], capture_output=True, text=True, check=False, timeout=180
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{call('--version').out}"


ARGUMENTS = {  # of commands that take more than a store
    "annotate": ["1", "--metric", "a=1"],
    "coverage": ["--template", "ppo"],
    "diff": ["1", "2"],
    "dump": ["document"],
    "export": ["1", "out"],
    "replay show": ["1", "buffer"],
    "replay export": ["1", "buffer", "rows.parquet"],
    "retire": ["1"],
    "tag": ["name"],
    "untag": ["name"],
}


def with_a_store() -> Iterator[str]:
    """Every command, of groups each one, that takes a store as its argument."""
    context = click.Context(_group.casckpt)
    for name in _group.casckpt.list_commands(context):
        found = _group.casckpt.get_command(context, name)
        parts = found.commands.items() if isinstance(found, click.Group) else [("", found)]
        for part, command in parts:
            if command is not None and any(each.name == "path" for each in command.params):
                yield f"{name} {part}".strip()


def test_path_without_a_store_is_said_in_words_of_the_command_line(tmp_path: Path) -> None:
    """Whatever a path leads to, no message tells a person to pass an argument of Python; and nothing is made."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    for name in ("file", "other/notes.txt"):
        (tmp_path / name).write_text("not a store")
    before = sorted(tmp_path.rglob("*"))
    names = list(with_a_store())
    assert {"plan", "verify", "log", "repair", "gc collect", "replay export"} <= set(names)
    for name in names:
        for place in ("missing", "missing/below", "empty", "other", "file", "file/below"):
            called = call(*name.split(), tmp_path / place, *ARGUMENTS.get(name, ()))
            text = called.out + called.err
            assert called.code in ((1,) if name == "doctor" else (_exits.NOT_FOUND, _exits.STORAGE)), (
                name,
                place,
                text,
            )
            assert str(tmp_path / place) in text
            assert not re.search(r"\w+=(True|False|None)|casckpt\.open", text), (name, place, text)
    assert sorted(tmp_path.rglob("*")) == before
    called = call("repair", tmp_path / "empty", "--from", tmp_path / "missing")
    assert "pass create" not in called.err and "missing: no store here" in called.err
