"""`import casckpt` is light: no numeric library, no optional dependency, no thread, no file."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "numpy", "pyarrow", "fsspec", "safetensors", "gymnasium", "rich", "click", "pickle", "casckpt_gc"}


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a new interpreter has loaded after `code`, beyond those that it starts with."""
    program = f"import sys; before = set(sys.modules); {code}; print(*(set(sys.modules) - before))"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    return {name.split(".")[0] for name in printed.split()}


def test_importing_casckpt_loads_no_heavy_module() -> None:
    loaded = loaded_after("import casckpt")
    assert "casckpt" in loaded
    assert loaded & HEAVY == set()


def test_importing_the_errors_loads_nothing_but_casckpt() -> None:
    assert loaded_after("import casckpt.errors") & (HEAVY | {"blake3", "lmdb", "msgspec", "zstandard"}) == set()


def test_the_check_sees_a_heavy_import() -> None:
    assert "numpy" in loaded_after("import numpy")


def test_importing_casckpt_starts_no_thread() -> None:
    program = "import casckpt, threading; print(threading.active_count())"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert printed.split() == ["1"]


def test_learner_that_plays_nothing_loads_no_gymnasium() -> None:
    """It is what stands between a kill and the first new update of the demo."""
    assert not loaded_after("import casckpt.demo.distributed._learner") & {"gymnasium", "rich", "pyarrow", "casckpt_gc"}
