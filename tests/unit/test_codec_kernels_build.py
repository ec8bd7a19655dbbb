"""A library that is not what it must be is not used, whoever built it; what is built, with a compiler and without.

Each library lies in a package of its own, whose files are links to the source, and is loaded in a process of its own:
one that was compiled with -ffast-math changes how its process computes.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import casckpt

PACKAGE = Path(casckpt.__file__).parent
SOURCE = PACKAGE / "codec" / "kernels.c"
FLAGS = ("-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
ON_X86_64 = platform.machine() == "x86_64"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not SOURCE.exists(), reason="an installed package has no source of its kernels"),
    pytest.mark.skipif(os.environ.get("CASCKPT_KERNELS") == "0", reason="kernels are not wanted"),
]
with_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

PROGRAM = """
import json
import numpy as np
from casckpt.codec import changes, formulas, kernels

found = kernels.__file__, kernels.IS_THERE, formulas.has_kernels(), kernels.IS_THERE
base = np.arange(1000, dtype="<u4")
changed = changes.find((base + (base % 9 == 0)).view(np.uint8).data, base.view(np.uint8).data, 4, 1, 500)
out = np.empty(3, "<u4")
half, ones = np.full(3, 0.5, "<f4"), np.ones(3, "<f4")
formulas.predict(formulas.Formula(5, 1, 0, (-0.5,)), [ones, half], out)
print(json.dumps([*found, changed.gaps.tolist() == [1] + [9] * 111, out.view("<f4").tolist()]))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package of links, without a library."""
    ignored = shutil.ignore_patterns("_kernels.so*", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "casckpt", copy_function=os.symlink, ignore=ignored)
    return tmp_path


def library_of(package: Path) -> Path:
    return package / "casckpt" / "codec" / "_kernels.so"


def compile_library(package: Path, *flags: str, edit: Callable[[str], str] = str) -> None:
    source = package / "kernels.c"
    source.write_text(edit(SOURCE.read_text()))
    library = library_of(package)
    done = subprocess.run(["cc", *FLAGS, *flags, source, "-o", library], capture_output=True, text=True, check=False)
    if done.returncode and flags:
        pytest.skip(f"the compiler has no {flags}: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr


def load(package: Path, **environment: str) -> tuple[bool, bool]:
    """Whether a new process finds the library usable when it loads it, and whether it uses it in the end."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env={key: value for key, value in os.environ.items() if key != "CASCKPT_KERNELS"}
        | {"PYTHONPATH": os.pathsep.join([str(package), *filter(None, sys.path)]), **environment},
        cwd=package,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    file, is_loaded, is_used, is_there, is_found, predicted = json.loads(done.stdout)
    assert Path(file) == package / "casckpt" / "codec" / "kernels.py"
    assert is_there == is_used
    assert is_found, "changes are found, whatever the library is"
    assert predicted == [0.75] * 3
    return is_loaded, is_used


USED, REFUSED_WHEN_LOADED, REFUSED_AT_FIRST_USE = (True, True), (False, False), (True, False)


# --- libraries that are not what they must be ---


def test_no_library_is_none(package: Path) -> None:
    assert load(package) == REFUSED_WHEN_LOADED


@with_compiler
def test_library_is_used_unless_it_is_not_wanted(package: Path) -> None:
    compile_library(package)
    assert load(package) == USED
    assert load(package, CASCKPT_KERNELS="1") == USED
    assert load(package, CASCKPT_KERNELS="0") == REFUSED_WHEN_LOADED


@with_compiler
@pytest.mark.parametrize("kind", ["empty", "noise", "text", "cut off", "folder", "dangling link", "unreadable"])
def test_file_that_is_no_library_is_not_used(package: Path, kind: str) -> None:
    library = library_of(package)
    compile_library(package)
    whole = library.read_bytes()
    library.unlink()
    if kind == "folder":
        library.mkdir()
    elif kind == "dangling link":
        library.symlink_to("nothing")
    else:
        content = {"empty": b"", "noise": bytes(range(256)) * 99, "text": b"/* */\n", "cut off": whole[:40]}
        library.write_bytes(content.get(kind, b"\x7fELF"))
        library.chmod(0 if kind == "unreadable" else 0o644)
    assert load(package) == REFUSED_WHEN_LOADED


@with_compiler
def test_library_of_another_machine_is_not_used(package: Path) -> None:
    """Its head says so: e_machine of ELF, at byte 18."""
    compile_library(package)
    library = library_of(package)
    content = bytearray(library.read_bytes())
    if content[:4] != b"\x7fELF":
        pytest.skip("libraries of this platform are no ELF files")
    content[18:20] = (0xF3 if content[18] != 0xF3 else 0x3E).to_bytes(2, "little")
    library.write_bytes(content)
    assert load(package) == REFUSED_WHEN_LOADED


@with_compiler
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kernels_version(void) { return 1; }", "kernels_version(void) { return 2; }"),
        ("int kernels_version(", "int kernels_revision("),
        ("int predict(int kind", "int predicted(int kind"),
        ("void add_changes_##size(", "void add_changed_##size("),
        ("DEFINE_LANES(u64, uint64_t, 8)", ""),
    ],
    ids=["another version", "no version", "no formulas", "no changes", "no lanes of 8 bytes"],
)
def test_library_of_another_version_or_with_a_function_less_is_not_used(package: Path, old: str, new: str) -> None:
    compile_library(package, edit=replacing(old, new))
    assert load(package) == REFUSED_WHEN_LOADED


def replacing(*pairs: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        for old, new in zip(pairs[::2], pairs[1::2], strict=True):
            assert old in text
            text = text.replace(old, new)
        return text

    return edit


# What to replace by what, in pairs. Most of them decode what they encode: only another machine would tell.
WRONG_INTEGERS = {
    "sums with another bias": ("(T)bias", "((T)bias + 1)"),
    "sums by exclusive or": (
        *("new[i] - old[i] + (T)bias", "new[i] ^ old[i] ^ (T)bias"),
        *("new[i] + old[i] - (T)bias", "new[i] ^ old[i] ^ (T)bias"),
    ),
    "lanes from the other end": (
        *("shift = 8 * offset;", "shift = 8 * (int)(sizeof(T) - offset - width);"),
        *("shift = 8 * offsets[at];", "shift = 8 * (int)(sizeof(T) - offsets[at] - widths[at]);"),
    ),
    "constant lanes lost": ("joined[i] = (V)mask", "joined[i] = 0"),
    "changes negated": (
        *("(V)(new[start + i] - old[start + i])", "(V)(old[start + i] - new[start + i])"),
        *("items[place] + differences[i]", "items[place] - differences[i]"),
    ),
    "gaps one wider": (
        *("place - last;", "place - last + (found > 0);"),
        *("place += width == 1", "place -= i > 0; place += width == 1"),
    ),
    "gaps that are not looked at": ("return !has_zero && sum <= total;", "return 1;"),
    "gaps of 0 taken": ("return !has_zero && sum", "return sum"),
    "no word changed": ("return changed;", "return 0;"),
    "no item changed": ("return found;", "return 0;"),
    "the last items left out": ("< GROUP ? stop - start : GROUP", "< GROUP ? 0 : GROUP"),
    "groups passed over for their first items": ("old + start, GROUP * GROUPS)", "old + start, GROUP)"),
    "a group passed over with one that is the same": (
        "start += GROUP * GROUPS; \\",
        "start += GROUP * (GROUPS + 1); \\",
    ),
}


@with_compiler
@pytest.mark.parametrize("name", WRONG_INTEGERS)
def test_library_whose_integers_are_wrong_is_refused_when_it_is_loaded(package: Path, name: str) -> None:
    compile_library(package, edit=replacing(*WRONG_INTEGERS[name]))
    assert load(package) == REFUSED_WHEN_LOADED


WRONG_FORMULAS = {
    "NaNs stay": ("size >= low && size < INFINITE ?", "size >= low ?"),
    "infinities stay": ("size < INFINITE ? bits", "size <= INFINITE ? bits"),
    "no floor": ("size >= low && size < INFINITE ? bits", "size < INFINITE ? bits"),
    "no floor of bf16": ("size >= low && size < INFINITE ? rounded", "size < INFINITE ? rounded"),
    "rounded towards zero": ("bits + 0x7FFF + ((bits >> 16) & 1)", "bits"),
    "halves rounded up": ("bits + 0x7FFF + ((bits >> 16) & 1)", "bits + 0x8000"),
    "NaNs of all payloads": ("(bits & MAGNITUDE) > INFINITE ? BF16_NAN : upper", "upper"),
    "products rounded": ("(float)((double)x * (double)y + (double)z)", "x * y + z"),
    "fused root": ("v[i] * decay;", "v[i] * decay * 1.0000001f;"),
    "gradients of another variant": ("if (variant == 2) {\n        EACH", "if (variant == 1) {\n        EACH"),
    "weights by a reciprocal": ("kept + m[i] * step / divisor", "kept + m[i] * step * (1 / divisor)"),
    "another order": ("kept + root * c * root", "root * root * c + kept"),
    "roots of subnormal numbers": ("at_least(v[i], SMALLEST_NORMAL)", "v[i]"),
    "other variants": ("AVERAGE * 8 + number", "AVERAGE * 8 + (number ^ (number > 3 ? 0 : 1))"),
}


@with_compiler
@pytest.mark.parametrize("name", WRONG_FORMULAS)
def test_library_whose_formulas_are_wrong_is_refused_before_their_first_use(package: Path, name: str) -> None:
    compile_library(package, edit=replacing(*WRONG_FORMULAS[name]))
    assert load(package) == REFUSED_AT_FIRST_USE


LIBERTIES = {
    "-ffast-math": ("-O3", "-ffast-math"),
    "-Ofast": ("-Ofast", "-ffp-contract=off"),
    "-funsafe-math-optimizations": ("-O3", "-funsafe-math-optimizations"),
    "-ffinite-math-only": ("-O3", "-ffinite-math-only"),
    "-fassociative-math": ("-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
}
LIBERTIES_OF_X86 = {
    "-ffp-contract=fast": ("-O3", "-ffp-contract=fast", "-march=x86-64-v3"),
    "-mfpmath=387": ("-O2", "-mfpmath=387"),
    "-mrecip": ("-O3", "-mrecip", "-ffast-math"),
}


@with_compiler
@pytest.mark.parametrize("name", [*LIBERTIES, *(LIBERTIES_OF_X86 if ON_X86_64 else ())])
def test_compiler_that_takes_liberties_is_found_out(package: Path, name: str) -> None:
    compile_library(package, *(LIBERTIES | LIBERTIES_OF_X86)[name])
    assert load(package) == REFUSED_AT_FIRST_USE


HONEST: list[tuple[str, ...]] = [(), ("-O0",), ("-O2",), ("-O3",), ("-Os",), ("-O3", "-funroll-loops", "-flto")]
HONEST_OF_X86: list[tuple[str, ...]] = [
    ("-O3", "-march=x86-64"),
    ("-O3", "-march=x86-64-v2"),
    ("-O3", "-march=x86-64-v3"),
    ("-O3", "-march=x86-64-v4"),
    ("-O3", "-march=native"),
    ("-O3", "-DCASCKPT_CLONES"),
]


def runs_here(flags: tuple[str, ...]) -> bool:
    """Whether this processor has what code for such a generation needs."""
    needed = {"-march=x86-64-v2": "sse4_2", "-march=x86-64-v3": "avx2", "-march=x86-64-v4": "avx512vl"}
    found = Path("/proc/cpuinfo").read_text().split() if ON_X86_64 else []
    return all(needed.get(flag, "fpu") in found for flag in flags if flag.startswith("-march=x86"))


@with_compiler
@pytest.mark.parametrize("flags", [*HONEST, *(HONEST_OF_X86 if ON_X86_64 else ())], ids=" ".join)
def test_library_of_every_optimization_that_keeps_the_rules_is_used(package: Path, flags: tuple[str, ...]) -> None:
    if not runs_here(flags):
        pytest.skip("code for another processor")
    compile_library(package, *flags)
    assert load(package) == USED


# --- building ---

BUILD = """
import json, sys
from casckpt.codec.kernels_build import KernelsHook
hook = KernelsHook(sys.argv[1], {}, None, None, sys.argv[2], "wheel")
data = {"pure_python": True, "force_include": {}}
hook.initialize(sys.argv[3], data)
print(json.dumps([data, hook.finalize(sys.argv[3], data, "")]))
"""


def initialize(package: Path, version: str, compiler: str) -> tuple[dict[str, Any], bool]:
    """Call the hook as hatchling does, with that compiler: what the wheel holds, and whether kernels were compiled."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BUILD, str(package), str(package / "dist"), version],
        env={**os.environ, "CC": compiler, "PYTHONPATH": os.pathsep.join([str(package), *filter(None, sys.path)])},
        cwd=package,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    data, _ = json.loads(done.stdout)
    return data, "built without compiled kernels" not in done.stderr


@pytest.mark.parametrize("version", ["standard", "editable"])
@pytest.mark.parametrize("compiler", ["/nowhere/cc", "no-such-cc -O2", "false", "true", "env false"])
def test_without_a_compiler_a_pure_wheel_is_built(package: Path, version: str, compiler: str) -> None:
    library = library_of(package)
    library.write_bytes(b"of another source")
    assert initialize(package, version, compiler) == ({"pure_python": True, "force_include": {}}, False)
    assert library.exists() == (version != "editable"), "what is left in a source tree is of that source"
    assert not (package / "dist" / "_kernels.so").exists()
    assert load(package) == REFUSED_WHEN_LOADED


@with_compiler
@pytest.mark.parametrize("compiler", ["cc -Ofast -march=native", "env cc"])
def test_editable_install_gets_the_library_beside_the_source(package: Path, compiler: str) -> None:
    """The compiler's own flags are left out; a wrapper's words are not."""
    assert initialize(package, "editable", compiler) == ({"pure_python": True, "force_include": {}}, True)
    assert [path.name for path in library_of(package).parent.glob("_kernels.so*")] == ["_kernels.so"]
    assert load(package) == USED


@with_compiler
def test_process_that_uses_a_library_keeps_it_while_another_is_built(package: Path) -> None:
    """The file is replaced, never written again: what is mapped stays."""
    compile_library(package)
    library = library_of(package)
    with library.open("rb") as used:
        before = used.read()
        library.chmod(0o555)
        initialize(package, "editable", "cc")
        used.seek(0)
        assert used.read() == before
        assert os.fstat(used.fileno()).st_ino != library.stat().st_ino


@with_compiler
@pytest.mark.parametrize("compiler", ["cc", "/nowhere/cc"])
def test_wheel_holds_the_library_or_is_for_every_machine(tmp_path: Path, compiler: str) -> None:
    """Built as .ci/run builds it, from a copy of the source tree."""
    root = PACKAGE.parent
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("casckpt", "gc"):
        shutil.copytree(root / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(root / name, tree / name)
    (tree / "casckpt/codec/_kernels.so").write_bytes(b"left from before")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path / "dist"), str(tree)],
        env={**os.environ, "CC": compiler},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    has_library = compiler == "cc"
    assert sorted(name for name in names if "kernels" in name) == [
        *["casckpt/codec/_kernels.so"] * has_library,
        "casckpt/codec/kernels.py",
    ]
    assert wheel.name.endswith("-py3-none-any.whl") != has_library
    if has_library:
        zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
        assert load(tmp_path / "installed") == USED
