"""The layers of the design, checked from the imports: who may import whom, and where each dependency may come in.

Imports inside functions and under TYPE_CHECKING count like any other: a layer that knows a higher one's types knows it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest

# From the bottom up. A module belongs to the longest name that it starts with; parts of one row do not know each other.
LAYERS = (
    ("casckpt.ids", "casckpt.digest", "casckpt.limits", "casckpt.errors", "casckpt.version"),
    ("casckpt.format", "casckpt.arguments"),
    ("casckpt.codec", "casckpt.index", "casckpt.storage"),
    ("casckpt.objects",),
    ("casckpt.state", "casckpt.replay"),
    ("casckpt.store",),
    ("casckpt.engine",),
    ("casckpt.integrations", "casckpt.recovery"),
    ("casckpt",),  # the public names
    (
        "casckpt.cli",
        "casckpt.demo",
        "casckpt.testing",
    ),  # testing: fault doubles, oracles, invariants as a user sees them
    ("casckpt_gc", "casckpt.__main__"),
)
SIDEWAYS = {
    ("casckpt.digest", "casckpt.ids"),
    ("casckpt.index", "casckpt.storage"),  # LMDB's files are found and replaced through the file system's door
    ("casckpt.cli", "casckpt.demo"),  # `casckpt demo`
    ("casckpt.replay", "casckpt.state"),  # a ring's columns are described and filled through state's doors
}
ONLY_FOR_TESTS = "casckpt.testing"

# Where each dependency comes in: one file or folder, and the demo where it is an application of its own. Nowhere else.
DOORS: dict[str, tuple[str, ...]] = {
    "blake3": ("casckpt.digest",),
    "pyarrow": ("casckpt.replay._arrow",),
    "lmdb": ("casckpt.index.lmdb_kv",),
    "zstandard": ("casckpt.codec.zstd",),
    "torch": ("casckpt.state._torch", "casckpt.demo"),
    "numpy": (
        *("casckpt.codec", "casckpt.state", "casckpt.demo", "casckpt.testing"),
        *("casckpt.integrations.gymnasium", "casckpt.integrations.replay"),
    ),
    "mujoco": ("casckpt.integrations.gymnasium._mujoco",),
    "ale_py": ("casckpt.integrations.gymnasium._ale",),
    "safetensors": ("casckpt.cli._safetensors",),
    "click": ("casckpt.cli", "casckpt.demo", "casckpt_gc.command"),
    "rich": ("casckpt.cli", "casckpt.demo"),
    "gymnasium": ("casckpt.integrations", "casckpt.demo"),
    "stable_baselines3": ("casckpt.integrations.sb3",),
    "sb3_contrib": (),
    "yaml": ("casckpt.engine.config",),
    "pickle": ("casckpt.state",),
    "cloudpickle": (),
    "marshal": (),
    "shelve": (),
    "psutil": (),
    "hypothesis": (),
    "pytest": (),
}


def imports(source) -> Iterator[tuple[str, int]]:
    """Every module that a source imports, with the line; `from a import b` gives a.b, whatever b turns out to be."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = source.module.split(".")
                parts = parts[: len(parts) - node.level + (1 if source.is_package else 0)]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif _is_dynamic_import(node):
            yield node.args[0].value, node.lineno


def _is_dynamic_import(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    )


def layer(module: str) -> tuple[int, str] | None:
    """Height and name of the layer that a module belongs to; None for what is not ours."""
    found = [
        (height, name)
        for height, row in enumerate(LAYERS)
        for name in row
        if module == name or module.startswith(name + ".")
    ]
    return max(found, key=lambda each: len(each[1]), default=None)


def wrong_directions(sources) -> list[str]:
    """Imports that go up, or sideways without leave."""
    complaints = []
    for source in sources:
        own = layer(source.module)
        assert own is not None, f"{source.path} belongs to no layer of the table"
        for module, line in imports(source):
            other = layer(module)
            if other is None or other[1] == own[1] or (own[1], other[1]) in SIDEWAYS:
                continue
            if other[0] >= own[0] or other[1] == ONLY_FOR_TESTS:
                complaints.append(f"{source.path}:{line}: {own[1]} may not import {module}")
    return complaints


def wrong_doors(sources) -> list[str]:
    """Imports of a dependency outside its door."""
    complaints = []
    for source in sources:
        for module, line in imports(source):
            top = module.split(".")[0]
            doors = DOORS.get(top, (source.module,))
            if not any(source.module == door or source.module.startswith(door + ".") for door in doors):
                complaints.append(f"{source.path}:{line}: {top} comes in only through {', '.join(doors) or 'tests'}")
    return complaints


def test_layers_only_know_lower_ones(package_sources) -> None:
    assert wrong_directions(package_sources) == []


def test_each_dependency_has_one_door(package_sources) -> None:
    assert wrong_doors(package_sources) == []


@pytest.mark.parametrize(
    ("module", "text", "is_wrong"),
    [
        ("casckpt.format.pack", "from casckpt.limits import MIB", False),
        ("casckpt.format.pack", "from casckpt.storage import FileSystem", True),
        ("casckpt.format.pack", "from ..storage import FileSystem", True),
        ("casckpt.format.pack", "def f():\n    import casckpt.store", True),
        ("casckpt.format.pack", "import importlib\nimportlib.import_module('casckpt.state')", True),
        ("casckpt.codec.raw", "from casckpt.index import tables", True),
        ("casckpt.store.commit", "from casckpt import objects", False),
        ("casckpt.store.commit", "import casckpt", True),
        ("casckpt.store.commit", "from casckpt.testing import FailingFileSystem", True),
        ("casckpt.store.commit", "import casckpt_gc", True),
        ("casckpt.cli.log", "import casckpt_gc.plan", True),
        ("casckpt.cli.log", "import casckpt\nfrom casckpt.store import Store", False),
        ("casckpt.testing.failing", "from casckpt.storage import FileSystem", False),
        ("casckpt.testing.invariants", "import casckpt", False),
        ("casckpt.cli.log", "from casckpt.testing import trees", True),
        ("casckpt_gc.plan", "from casckpt.store import Store", False),
    ],
)
def test_layer_check_judges_samples_rightly(sample: Callable, module: str, text: str, is_wrong: bool) -> None:
    assert bool(wrong_directions([sample(module, text)])) is is_wrong


@pytest.mark.parametrize(
    ("module", "text", "is_wrong"),
    [
        ("casckpt.digest", "from blake3 import blake3", False),
        ("casckpt.format.pack", "from blake3 import blake3", True),
        ("casckpt.store.commit", "def f():\n    import torch.nn", True),
        ("casckpt.store.commit", "import pickle", True),
        ("casckpt.store.commit", "import os", False),
    ],
)
def test_door_check_judges_samples_rightly(sample: Callable, module: str, text: str, is_wrong: bool) -> None:
    assert bool(wrong_doors([sample(module, text)])) is is_wrong


def test_a_module_outside_the_table_is_noticed(sample: Callable) -> None:
    with pytest.raises(AssertionError, match="belongs to no layer"):
        wrong_directions([sample("elsewhere.thing", "import os")])
