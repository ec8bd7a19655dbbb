"""Public names: `__all__` of each package is sorted and true; errors can be told apart and sent between processes."""

from __future__ import annotations

import ast
import importlib
import pickle
from collections.abc import Callable, Iterator

import pytest

import casckpt
from casckpt import errors

BUILTIN_TWINS = {
    "NotFoundError": LookupError,
    "InvalidInputError": ValueError,
    "UnsupportedStateError": TypeError,
    "StorageError": OSError,
    "OutOfSpaceError": OSError,
}


def error_classes() -> Iterator[type[errors.CasckptError]]:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.CasckptError):
            yield value


def stated_all(source) -> list[str] | None:
    """The literal `__all__` of a source."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if [ast.unparse(target) for target in targets] == ["__all__"] and node.value is not None:
                return list(ast.literal_eval(node.value))
    return None


def unsorted_all(sources) -> list[str]:
    return [source.path for source in sources if (names := stated_all(source) or []) != sorted(set(names))]


def test_every_stated_all_is_sorted_and_without_repeats(package_sources) -> None:
    assert unsorted_all(package_sources) == []


def test_check_of_sorting_complains_about_bad_samples(sample: Callable) -> None:
    names = {"a": ["b", "a"], "b": ["a", "a"], "c": ["a", "b"]}
    bad = [sample(module, f"__all__ = {stated}") for module, stated in names.items()]
    assert unsorted_all(bad) == ["a.py", "b.py"]


def test_every_stated_name_exists(package_sources) -> None:
    stated = {source.module: names for source in package_sources if (names := stated_all(source)) is not None}
    assert "casckpt" in stated
    missing = [
        f"{module}.{name}"
        for module, names in stated.items()
        for name in names
        if not hasattr(importlib.import_module(module), name)
    ]
    assert missing == []


def test_every_error_and_warning_is_public() -> None:
    public = {name for name in vars(errors) if name.endswith(("Error", "Warning"))}
    assert public - set(casckpt.__all__) == set()
    assert len(public) > 15


def test_all_is_what_dir_shows_at_least() -> None:
    assert set(casckpt.__all__) - set(dir(casckpt)) == set()


@pytest.mark.parametrize("error", list(error_classes()), ids=lambda error: error.__name__)
def test_error_comes_back_from_pickle_with_its_facts(error: type[errors.CasckptError]) -> None:
    original = error("what failed. What to do next.", path="/a/b", step=7)
    back = pickle.loads(pickle.dumps(original))  # noqa: S301 - our own bytes
    assert type(back) is error
    assert (str(back), back.path, back.step) == ("what failed. What to do next.", "/a/b", 7)


def test_every_kind_of_error_has_a_name_of_its_own() -> None:
    kinds = [error.__dict__.get("kind") for error in error_classes()]
    assert None not in kinds
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("name", BUILTIN_TWINS)
def test_standard_code_catches_the_errors_it_would_expect(name: str) -> None:
    assert issubclass(getattr(errors, name), BUILTIN_TWINS[name])
