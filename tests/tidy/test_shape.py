"""Size and cleanliness of the source: files and functions that a reader can hold, and nothing left lying about."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

import pytest

FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|opt|home|root|Users|mnt)/\w")


def long_files(sources) -> list[str]:
    return [source.path for source in sources if source.text.count("\n") > FILE_LINES_MAX]


def long_functions(sources) -> list[str]:
    return [
        f"{source.path}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]


def matching_lines(sources, pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{source.path}:{number}: {line.strip()}"
        for source in sources
        for number, line in enumerate(source.text.splitlines(), 1)
        if pattern.search(line)
    ]


def without_docstring(sources) -> list[str]:
    return [source.path for source in sources if source.text.strip() and not source.text.startswith('"""')]


def test_no_file_is_longer_than_a_reader_can_hold(all_sources) -> None:
    assert long_files(all_sources) == []


def test_no_function_is_longer_than_a_reader_can_hold(all_sources) -> None:
    assert long_functions(all_sources) == []


def test_nothing_is_marked_as_unfinished(all_sources) -> None:
    assert matching_lines(all_sources, UNFINISHED) == []


def test_no_path_of_somebodys_machine(all_sources) -> None:
    assert matching_lines(all_sources, MACHINE_PATH) == []


def test_every_file_says_what_it_is(all_sources) -> None:
    assert without_docstring(all_sources) == []


def test_shape_checks_complain_about_bad_samples(sample: Callable) -> None:
    longest = sample("m", "x = 1\n" * FILE_LINES_MAX)
    assert long_files([longest]) == []
    assert long_files([sample("m", longest.text + "\n")]) == ["m.py"]
    fits = "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1)
    assert long_functions([sample("m", fits)]) == []
    assert long_functions([sample("m", fits + "    x = 1\n")]) == [f"m.py:1: f has {FUNCTION_LINES_MAX + 1} lines"]
    assert without_docstring([sample("m", '"""Said."""\n'), sample("n", "x = 1\n")]) == ["n.py"]


@pytest.mark.parametrize(
    ("pattern", "line", "is_bad"),
    [
        (UNFINISHED, "# TO" + "DO: later", True),
        (UNFINISHED, "# what is left to do", False),
        (MACHINE_PATH, "open('/ho" + "me/someone/x')", True),
        (MACHINE_PATH, "open('/ro" + "ot/x')", True),
        (MACHINE_PATH, "open('/proc/self/status')", False),
        (MACHINE_PATH, "at work/home", False),
    ],
)
def test_line_patterns_judge_samples_rightly(
    sample: Callable, pattern: re.Pattern[str], line: str, is_bad: bool
) -> None:
    assert bool(matching_lines([sample("m", line)], pattern)) is is_bad
