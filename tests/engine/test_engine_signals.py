"""(E08) The end announced by a signal: saved at a safe point, at the deadline inside a pause, or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import casckpt

TRAINING = """
import sys
import casckpt

store = casckpt.open(sys.argv[1], create=True, verify="off")
engine = casckpt.CheckpointEngine(store)
counters = {"n": 0}
engine.register("counters", counters)


def train(step):
    counters["n"] = step
    engine.step(step)


with engine.on_signals(deadline_s=float(sys.argv[2])), engine, store:
    train(1)
    engine.save(async_mode=False)
    train(2)
    print("here", flush=True)
"""
ENDLESS = {
    "steps": "    for step in range(3, 1 << 60): train(step)",
    "evaluation in a pause": "    with engine.pause():\n        while True: pass",
    "evaluation": "    while True: pass",
}


@contextmanager
def training(path: Path, kind: str, deadline_s: float) -> Iterator[subprocess.Popen[str]]:
    """A training in a process of its own, at step 2, of which step 1 is saved."""
    code = TRAINING + ENDLESS[kind]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(deadline_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "here\n"
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_saves_at_the_next_safe_point_and_ends_the_training(store_path: Path, number: int) -> None:
    with training(store_path, "steps", 1000) as process:
        process.send_signal(number)
        assert process.wait() == 128 + number
    with casckpt.open(store_path) as store:
        newest = store.timeline()[-1]
        assert newest.step >= 2 and newest.labels == {"requested": signal.Signals(number).name}
        assert store.restore() == {"counters": {"n": newest.step}}


def test_deadline_in_an_evaluation_saves_there_and_ends_the_process(store_path: Path) -> None:
    with training(store_path, "evaluation in a pause", 0.05) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    with casckpt.open(store_path) as store:
        assert store.steps() == [1, 2]
        assert store.restore() == {"counters": {"n": 2}}


def test_deadline_outside_of_a_pause_says_so_and_the_second_signal_ends_at_once(store_path: Path) -> None:
    with training(store_path, "evaluation", 0.05) as process:
        process.send_signal(signal.SIGTERM)
        assert "SIGTERM: saving at the next safe point, or in 0.05 s" in line(process)
        assert "no safe point in 0.05 s and no pause" in line(process)
        process.send_signal(signal.SIGTERM)
        assert "SIGTERM again: ending now" in line(process)
        assert process.wait() == 128 + signal.SIGTERM
    with casckpt.open(store_path) as store:
        assert store.steps() == [1]
        assert store.verify().ok


def test_handlers_are_what_they_were_once_the_block_is_left(store_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with casckpt.open(store_path, create=True) as store, casckpt.CheckpointEngine(store) as engine:
        with engine.on_signals():
            assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] != before
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
        with engine.pause():
            engine.register("policy", {"a": 1})
            assert engine.save_in_pause("test")
        assert not engine.save_in_pause("test")
        assert store.timeline()[-1].labels == {"requested": "test"}
