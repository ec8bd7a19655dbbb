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
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path(__file__).parent
_LIBRARY = "_kernels.so"
_FLAGS = ("-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_CLONES = "-DCASCKPT_CLONES"  # code for several generations of processors, chosen when it is loaded


def build(library: Path) -> bool:
    """Compile the library to this place; whether there was a compiler that can."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[:1]
    for clones in ((_CLONES,), ()):
        command = [*compiler, *_FLAGS, *clones, str(_FOLDER / "kernels.c"), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            print(f"{compiler[0]}: {error}; built without compiled kernels", file=sys.stderr)
            return False
        if done.returncode == 0:
            return True
    print(f"{' '.join(command)}:\n{done.stderr}built without compiled kernels", file=sys.stderr)
    return False


class KernelsHook(BuildHookInterface[Any]):
    """What hatchling calls before it makes a wheel, editable ones included, which get the library in the source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say what the wheel holds."""
        is_editable = version == "editable"
        library = (_FOLDER if is_editable else Path(self.directory)) / _LIBRARY
        library.parent.mkdir(parents=True, exist_ok=True)
        if not build(library):
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        if not is_editable:
            build_data["force_include"][str(library)] = f"casckpt/codec/{_LIBRARY}"


if __name__ == "__main__":
    sys.exit(0 if build(_FOLDER / _LIBRARY) else 1)
