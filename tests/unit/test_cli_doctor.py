"""`casckpt doctor`: each disease gives its finding, with a level and a next step, and nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import casckpt
from casckpt.cli import _checks
from casckpt.codec import kernels
from casckpt.index.lock import WriteLock
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from tests.unit.cli_stores import call, entry_path, make_store


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("doctor") / "store"
    make_store(path)
    return path


@pytest.fixture
def store(whole: Path, store_path: Path) -> Path:
    """A copy with an index of its own."""
    shutil.copytree(whole, store_path, ignore=shutil.ignore_patterns("index"))
    casckpt.open(store_path).close()
    return store_path


def findings(*arguments: object, code: int = 0) -> list[dict[str, str]]:
    called = call("doctor", *arguments, "--json")
    document = called.json
    assert called.code == code
    assert document["ok"] is (code == 0)
    found: list[dict[str, str]] = document["findings"]
    assert all(set(each) == {"topic", "level", "text", "next_step"} for each in found)
    assert all(each["next_step"] or each["level"] != "warn" or "cannot be written" in each["text"] for each in found)
    return found


def about(found: list[dict[str, str]], topic: str) -> list[tuple[str, str]]:
    return [(each["level"], each["text"]) for each in found if each["topic"] == topic]


def test_this_machine_alone() -> None:
    found = findings()
    assert about(found, "python")[0] == ("ok", f"Python {sys.version.split()[0]}")
    assert any("blake3" in text and f"casckpt {casckpt.__version__}" in text for _, text in about(found, "libraries"))
    assert about(found, "store") == []


def test_doctor_says_whether_kernels_are_used_and_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    level, text = about(findings(), "kernels")[0]
    assert level == ("ok" if kernels.IS_THERE else "warn")
    assert ("are used" in text) == kernels.IS_THERE
    library = tmp_path / "_kernels.so"
    monkeypatch.setattr(kernels, "LIBRARY", library)
    monkeypatch.setattr(kernels, "IS_THERE", False)
    monkeypatch.setattr(kernels, "IS_WANTED", True)
    for reason, next_step in (("no compiled kernels", "C compiler"), (str(library), "Install casckpt again")):
        (found,) = [each for each in findings() if each["topic"] == "kernels"]
        assert (found["level"], found["text"].partition(" is of ")[0].partition(":")[0]) == ("warn", reason)
        assert next_step in found["next_step"]
        library.touch()
    monkeypatch.setattr(kernels, "IS_WANTED", False)
    assert "CASCKPT_KERNELS=0" in about(findings(), "kernels")[0][1]


def test_a_good_store_has_neither_problems_nor_warnings_about_it_and_is_left_as_it_was(store: Path) -> None:
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file() and "index" not in path.parts}
    found = findings(store)
    own = [each for each in found if each["topic"] not in ("platform", "room", "plug-in", "clock", "kernels")]
    assert {each["level"] for each in own} == {"ok"}
    after = {path: path.read_bytes() for path in store.rglob("*") if path.is_file() and "index" not in path.parts}
    assert after == before
    assert "0 problems" in call("doctor", store).out


def test_no_store_is_a_problem(tmp_path: Path) -> None:
    assert "no such folder" in about(findings(tmp_path / "typo", code=1), "store")[0][1]
    assert "a folder without a store" in about(findings(tmp_path, code=1), "store")[0][1]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_index_is_fine_and_stays_missing(store: Path) -> None:
    shutil.rmtree(store / "index")
    ((level, text),) = about(findings(store), "index")
    assert (level, "missing" in text) == ("ok", True)
    assert not (store / "index").exists()


def test_an_index_of_another_boot_is_named_with_its_reason(store: Path) -> None:
    pointer = store / "index" / "current"
    document = json.loads(pointer.read_bytes())
    pointer.write_text(json.dumps({**document, "boot": "another"}))
    ((level, text),) = about(findings(store), "index")
    assert (level, "after reboot" in text) == ("warn", True)


def test_who_holds_the_lock_of_the_index_is_named(store: Path) -> None:
    (path,) = store.glob("index/*/write.lock")
    with WriteLock(str(path)).hold(0):
        found = about(findings(store), "index")
    assert any(level == "warn" and f"process {os.getpid()}" in text for level, text in found)
    assert not any("held by" in text for _, text in about(findings(store), "index"))


def test_leftovers_of_dead_living_and_unknown_writers_are_told_apart(store: Path) -> None:
    tmp = store / "tmp"
    code = "from casckpt.storage.process import System; print(System().temporary_path('x'))"
    name = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    (tmp / os.path.basename(name)).write_bytes(b"dead")
    (tmp / os.path.basename(System().temporary_path("x"))).write_bytes(b"living")
    (tmp / "ffffffff-1-1-00").write_bytes(b"of a copy")
    found = about(findings(store), "leftovers")
    owners = {text.partition("owner ")[2].partition(":")[0]: level for level, text in found}
    assert owners == {"dead": "warn", "running": "ok", "unknown": "warn"}


def test_damage_is_a_problem_with_its_place(store: Path) -> None:
    path = entry_path(store, 4)
    path.write_bytes(path.read_bytes()[:-1])
    pack = next(iter(store.glob("packs/*/*")))
    pack.unlink()
    found = [each for each in findings(store, code=1) if each["level"] == "problem"]
    assert any("timeline entry 4" in each["text"] for each in found)
    assert any(pack.name in each["text"] for each in found)


def test_features_of_the_future_are_named(store: Path) -> None:
    document = json.loads((store / "casckpt.json").read_text())
    features = {"read": [], "write": ["deltas-2"], "collect": []}
    (store / "casckpt.json").write_text(json.dumps({**document, "features": features}))
    found = about(findings(store), "format")
    assert any(level == "warn" and "deltas-2" in text and "committed" in text for level, text in found)
    features = {"read": ["deltas-3"], "write": [], "collect": []}
    (store / "casckpt.json").write_text(json.dumps({**document, "features": features}))
    found = about(findings(store, code=1), "format")
    assert any(level == "problem" and "deltas-3" in text for level, text in found)
    assert call("log", store).code == 8


def test_files_of_others_are_pointed_out(store: Path) -> None:
    (store / "notes.txt").write_text("mine")
    assert about(findings(store), "folder") == [("warn", "not of this store: notes.txt")]


def test_a_full_disk_and_few_inodes_are_warned_of(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=12_000_000))
    monkeypatch.setattr(_checks.os, "statvfs", lambda _: SimpleNamespace(f_files=100, f_favail=3, f_flag=0))
    found = list(_checks._room(str(store)))
    assert [(each.level, each.text.split(" free")[0]) for each in found] == [
        ("warn", "12.0 MB"),
        ("warn", "3 file names (inodes)"),
    ]


def test_a_network_file_system_says_where_the_index_goes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "is_network_path", lambda path: True)
    found = next(iter(_checks.folder(str(store))))
    assert (found.topic, found.level) == ("file system", "warn")
    assert "XDG_CACHE_HOME" in found.next_step


def test_a_store_that_cannot_be_written_is_not_probed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks.os, "access", lambda *_: False)  # root may write everywhere, so the answer is set
    found = list(_checks.folder(str(store)))
    assert [each.text for each in found if each.topic == "abilities"] == ["not tried: tmp/ cannot be written"]
    assert [each.level for each in found if each.topic == "permissions"] == ["warn"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no mode bits")
def test_a_closed_subfolder_is_a_problem(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.access
    monkeypatch.setattr(_checks.os, "access", lambda path, mode: not str(path).endswith("/packs") and real(path, mode))
    found = [each for each in _checks.folder(str(store)) if each.level == "problem"]
    assert [each.text.partition(" cannot")[0] for each in found] == [f"{store}/packs"]


def _abilities(store: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in _checks._abilities(str(store)):
        found.setdefault(each.level, []).append(each.text)
    assert os.listdir(store / "tmp") == []
    return found


def test_a_file_system_without_links_works_by_exclusive_renames(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    found = _abilities(store)
    assert set(found) == {"ok"}
    assert any("no hard links" in text for text in found["ok"])


def test_a_file_system_that_replaces_taken_names_is_a_problem(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFileSystem, "link", lambda *_: None)
    assert "replaced it" in _abilities(store)["problem"][0]


def test_a_failing_disk_and_folder_sync_are_problems(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    assert "Input/output error" in _abilities(store)["problem"][0]
    monkeypatch.setattr(os, "fdatasync", fsync)
    assert "Input/output error" in _abilities(store)["problem"][0]


def test_a_missing_library_and_an_unset_clock_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError, version

    def missing(name: str) -> str:
        if name == "lmdb":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(_checks, "version", missing)
    monkeypatch.setattr(_checks.time, "time_ns", lambda: 10**9)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = {(each.topic, each.level): each.text for each in _checks.environment()}
    assert found["libraries", "problem"] == "not installed: lmdb"
    assert ("clock", "warn") in found
    assert "gymnasium" in found["libraries", "ok"]


def test_what_a_platform_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _checks._platform().level == ("ok" if sys.platform.startswith("linux") else "warn")
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setattr(_checks.sys, "platform", "darwin")
    found = _checks._platform()
    assert found.level == "warn"
    assert "preallocation" in found.text
    assert "write-back" in found.text


def test_the_lock_probe_lets_go_at_once(store: Path) -> None:
    (path,) = store.glob("index/*/write.lock")
    assert list(_checks._locks(str(store / "index"))) == []
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
