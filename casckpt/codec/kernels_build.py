"""Compiles `kernels.c` into the library that `kernels.py` loads: when a wheel is built, or by hand in a source tree.

    python -m casckpt.codec.kernels_build

Without a C compiler the package is built without the library, works the same, and is slower. Nothing of Python is
needed to compile it, so that one library serves every Python of a platform.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path(__file__).parent
_LIBRARY = "_kernels.so"
_FLAGS = ("-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_CLONES = "-DCASCKPT_CLONES"  # code for several generations of processors, chosen when it is loaded


def build(library: Path) -> bool:
    """Compile the library to this place; whether there was a compiler that can. If not, none is left there.

    Processes that use the one which was there keep it, and those that load it meanwhile get one or the other.
    """
    fresh = library.with_name(f"{library.name}.{os.getpid()}")
    errors = []
    try:
        for command in _commands():
            error = _error_of([*command, "-o", str(fresh)])
            if not error and fresh.exists():
                fresh.replace(library)
                return True
            errors.append(error or f"{command[0]}: no output")
    finally:
        _remove(fresh)
    _remove(library)
    print(*errors, "built without compiled kernels", sep="\n", file=sys.stderr)
    return False


def _remove(library: Path) -> None:
    with suppress(OSError):  # it is not there, or the folder cannot be written
        library.unlink()


def _commands() -> Iterator[list[str]]:
    """What may compile it, the best first: CC's compiler, else Python's own, else cc; their flags are left out."""
    given = os.environ.get("CC")
    for compiler in [given] if given else [sysconfig.get_config_var("CC"), "cc"]:
        words = list(takewhile(lambda word: not word.startswith("-"), shlex.split(compiler or "")))
        for clones in ((_CLONES,), ()) if words else ():
            yield [*words, *_FLAGS, *clones, str(_FOLDER / "kernels.c")]


def _error_of(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{command[0]}: {error}"
    return f"{shlex.join(command)}:\n{done.stderr}" if done.returncode else ""


class KernelsHook(BuildHookInterface[Any]):
    """What hatchling calls before it makes a wheel, editable ones included, which get the library in the source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say what the wheel holds: of an editable one, nothing but a path."""
        if version == "editable":
            build(_FOLDER / _LIBRARY)
            return
        library = self._place()
        library.parent.mkdir(parents=True, exist_ok=True)
        if build(library):
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["force_include"][str(library)] = f"casckpt/codec/{_LIBRARY}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel has it."""
        _remove(self._place())

    def _place(self) -> Path:
        return Path(self.directory) / _LIBRARY


if __name__ == "__main__":
    sys.exit(0 if build(_FOLDER / _LIBRARY) else 1)
