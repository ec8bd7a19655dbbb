"""The table of cases names every case once, and only tests that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS.parent / "docs" / "design" / "cases.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([A-Z]\d\d) \| (.+?) \| (.+) \|$", TABLE, flags=re.MULTILINE)


@cache
def names_in(path: str) -> frozenset[str]:
    return frozenset(re.findall(r"^ *(?:async )?def (\w+)\(", (TESTS / path).read_text("utf-8"), flags=re.MULTILINE))


def test_every_case_has_a_row_and_a_test() -> None:
    cases = [case for case, _, _ in ROWS]
    assert [case for case in cases if case.startswith("S")] == [f"S{number:02d}" for number in range(1, 44)]
    assert len(set(cases)) == len(cases)
    assert [case for case, _, shown in ROWS if "::test_" not in shown] == []


def test_every_test_that_the_table_names_exists() -> None:
    named = [(path, name) for _, _, shown in ROWS for path, name in re.findall(r"`([\w/.]+)::(\w+)`", shown)]
    assert len(named) > 80
    assert [(path, name) for path, name in named if name not in names_in(path)] == []
