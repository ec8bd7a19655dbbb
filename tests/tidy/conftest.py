"""The source files as the tidy tests see them: path, module name, text and syntax tree.

The checks are plain functions from sources to complaints, so that each one is also run on a small bad sample
(`sample`) and shown to complain.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"casckpt": ROOT / "casckpt", "casckpt_gc": ROOT / "gc" / "casckpt_gc"}
OTHER_FOLDERS = ("tests", "benchmarks")


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: str  # relative to the repository
    module: str  # dotted; of a package, without __init__
    text: str

    @property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text, self.path)

    @property
    def is_package(self) -> bool:
        """Whether it is an __init__.py, from which relative imports count one level less."""
        return self.path.endswith("__init__.py")


def _read(base: Path, prefix: str) -> list[Source]:
    found = []
    for path in sorted(base.rglob("*.py")):
        parts = [part for part in (prefix, *path.relative_to(base).with_suffix("").parts) if part != "__init__"]
        found.append(Source(str(path.relative_to(ROOT)), ".".join(parts), path.read_text(encoding="utf-8")))
    return found


@pytest.fixture(scope="session")
def package_sources() -> list[Source]:
    """Every file of casckpt and casckpt_gc."""
    found = [source for name, base in PACKAGES.items() for source in _read(base, name)]
    assert len(found) > 10
    return found


@pytest.fixture(scope="session")
def all_sources(package_sources: list[Source]) -> list[Source]:
    """Those, and the tests and benchmarks."""
    return package_sources + [source for name in OTHER_FOLDERS for source in _read(ROOT / name, name)]


@pytest.fixture(scope="session")
def test_sources(all_sources: list[Source]) -> list[Source]:
    """The files that hold tests."""
    found = [source for source in all_sources if Path(source.path).name.startswith("test_")]
    assert len(found) > 5
    return found


@pytest.fixture(scope="session")
def sample() -> Callable[[str, str], Source]:
    """Makes a source from a module name and a text."""
    return lambda module, text: Source(module.replace(".", "/") + ".py", module, text)
