"""Every test asserts something: by an assert statement, pytest.raises or warns, or a helper that does.

A helper counts when it is in the same file and asserts (directly or through another), when its name says so
(`assert_…`, `check_…`, `expect_…`), or when it is a method whose name says so (`outcome.assert_outcomes`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest

CLAIMING_PREFIXES = ("assert_", "check_", "expect_", "must_")
CLAIMING_CALLS = ("raises", "warns", "deprecated_call", "fail", "fnmatch_lines", "run_state_machine_as_test")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def called_names(function: ast.AST) -> set[str]:
    """Last parts of the names of everything that a function calls or passes on (a decorator's helper, a target)."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def claims(function: ast.AST, asserting: set[str]) -> bool:
    """Whether a function asserts itself or calls what does."""
    if any(isinstance(node, ast.Assert) for node in ast.walk(function)):
        return True
    names = called_names(function)
    return bool(names & (asserting | set(CLAIMING_CALLS))) or any(name.startswith(CLAIMING_PREFIXES) for name in names)


def silent_tests(sources) -> list[str]:
    """Tests that cannot fail by a claim of their own."""
    complaints = []
    for source in sources:
        tree = source.tree
        asserting: set[str] = set()
        while True:
            grown = {function.name for function in functions(tree) if claims(function, asserting)}
            if grown == asserting:
                break
            asserting = grown
        complaints += [
            f"{source.path}:{function.lineno}: {function.name}"
            for function in functions(tree)
            if function.name.startswith("test_") and function.name not in asserting
        ]
    return complaints


def test_every_test_asserts_something(test_sources) -> None:
    assert silent_tests(test_sources) == []


@pytest.mark.parametrize(
    ("text", "is_silent"),
    [
        ("def test_a():\n    f()", True),
        ("def test_a():\n    assert f()", False),
        ("def test_a():\n    with pytest.raises(E):\n        f()", False),
        ("def helper():\n    assert x\ndef test_a():\n    helper()", False),
        ("def inner():\n    assert x\ndef outer():\n    inner()\ndef test_a():\n    outer()", False),
        ("def helper():\n    f()\ndef test_a():\n    helper()", True),
        ("def test_a():\n    check_store(path)", False),
        ("class TestA:\n    def test_a(self):\n        f()", True),
    ],
)
def test_check_judges_samples_rightly(sample: Callable, text: str, is_silent: bool) -> None:
    assert bool(silent_tests([sample("tests.m", text)])) is is_silent
