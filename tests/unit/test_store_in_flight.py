"""After a process was killed in a large save, it is known which step that was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import casckpt
from casckpt.store import in_flight
from casckpt.store.in_flight import Interrupted
from tests.unit.stores import open_store

KILLED = """
import os, sys, threading, casckpt, numpy as np
from casckpt.storage.process import System
from tests.unit.stores import UnsyncedFileSystem

import casckpt.store.saver as saver
saver.LARGE = 1 << 20

engine = None

class Killing(UnsyncedFileSystem):
    def perform(self, operation, act):
        if operation.name == "rename" and engine and engine.global_step == 500:
            os.kill(os.getpid(), 9)
        return super().perform(operation, act)

store = casckpt.open(sys.argv[1], create=True, system=System(file_system=Killing()))
engine = casckpt.CheckpointEngine(store)
replay = np.random.default_rng(0).random(500_000)
engine.register("replay", replay)
engine.save(400, async_mode=False)
replay += 1
engine.save(500)
engine.wait()
"""


def test_step_that_was_being_saved_by_a_killed_process_is_told_by_the_restore(store_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(store_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    with casckpt.open(store_path) as store:
        (found,) = store.interrupted()
        assert (found.run, found.step, found.components) == ("main", 500, ("replay",))
        engine = casckpt.CheckpointEngine(store)
        engine.register("replay", store.restore()["replay"])
        report = engine.restore()
        assert report.step == 400
        assert "interrupted while it was saved: main step 500 (replay), by pid" in str(report)
    with casckpt.open(store_path, run="other") as other:
        assert other.interrupted() == ()


def test_note_goes_with_the_save_and_that_of_a_living_process_is_none(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(store_path) as store:
        system = store._committer.places[2]
        before = os.listdir(store_path / "tmp")
        with in_flight.noted(str(store_path), system, "main", 7, ["replay"]):
            assert len(os.listdir(store_path / "tmp")) == len(before) + 1
            assert store.interrupted() == ()  # its process lives
            monkeypatch.setattr(in_flight, "owner_of", lambda name: (4711, "dead"))
            assert store.interrupted() == (Interrupted("main", 7, ("replay",), 4711),)
        assert os.listdir(store_path / "tmp") == before


def test_other_files_of_dead_processes_are_no_notes(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "owner_of", lambda name: (4711, "dead"))
    with open_store(store_path) as store:
        for name, content in (("a", b""), ("b", b"CASSAVE1{"), ("c", b"CASPACK1" * 10), ("d", b"CASSAVE1" * 20_000)):
            (store_path / "tmp" / name).write_bytes(content)
        assert store.interrupted() == ()
