"""(E08) The end announced by a signal: saved at a safe point, at the deadline inside a pause, or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.engine.signals import listening
from tests.engine.clocks import Clock, Disk, open_timed

TRAINING = """
import sys
import casckpt

store = casckpt.open(sys.argv[1], create=True, verify="off")
engine = casckpt.CheckpointEngine(store)
counters = {"n": 0}
engine.register("counters", counters, casckpt.SaveStrategy(every_steps=10**9))


def train(step):
    counters["n"] = step
    engine.step(step)


with engine.on_signals(deadline_s=float(sys.argv[2])), engine, store:
    train(1)
    engine.save(async_mode=False)
    train(2)
    print("here", flush=True)
"""
WORKERS = """
    import multiprocessing, time
    worker = multiprocessing.get_context("fork").Process
    workers = [worker(target=time.sleep, args=(1000,), daemon=True) for _ in range(3)]
    for worker in workers: worker.start()
    print("forked", flush=True)
"""
ENDLESS = {
    "steps": "    for step in range(3, 1 << 60): train(step)",
    "evaluation in a pause": "    with engine.pause():\n        print('paused', flush=True)\n        while True: pass",
    "evaluation": "    while True: pass",
    "evaluation in a later pause": """
    sys.stdin.readline()
    with engine.pause():
        while True: pass
""",
    "with workers": WORKERS + "    for step in range(3, 1 << 60): train(step)",
    "ends a worker": WORKERS
    + """
    for worker in workers: worker.terminate()
    for worker in workers: worker.join()
    train(3)
    print(*(worker.exitcode for worker in workers), flush=True)
""",
    "a child leaves the block": """
    import os
    if os.fork() == 0: sys.exit(7)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    for step in range(3, 1 << 60): train(step)
""",
    "ends": """
    sys.stdin.readline()
print("after the block", flush=True)
""",
    "in a save": """
    import os, signal
    def capture():
        if engine.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            while engine._stop == 0: pass
        return {"n": engine.global_step}
    engine.register("late", capture, load=lambda state: None)
    engine.save(3)
    print("after the save", flush=True)
""",
    "a save that hangs": """
    import threading
    def capture():
        if threading.current_thread().name == "casckpt-deadline":
            print("hangs", flush=True)
            threading.Event().wait()
        return {"n": engine.global_step}
    engine.register("late", capture, load=lambda state: None)
    with engine.pause():
        print("paused", flush=True)
        while True: pass
""",
    "a save that fails": """
    import threading
    def capture():
        if threading.current_thread().name == "casckpt-deadline": raise KeyError("the provider's own")
        return {"n": engine.global_step}
    engine.register("late", capture, load=lambda state: None)
    with engine.pause():
        print("paused", flush=True)
        sys.stdin.readline()
    train(3)
""",
    "other signals": """
    import signal
    signal.signal(signal.SIGUSR1, lambda number, frame: print("usr1", flush=True))
    while engine._stop == 0: pass
    signal.raise_signal(signal.SIGUSR1)
    sys.stdin.readline()
    for step in range(3, 1 << 60): train(step)
""",
}


@contextmanager
def training(path: Path, kind: str, deadline_s: float) -> Iterator[subprocess.Popen[str]]:
    """A training in a process of its own, at step 2, of which step 1 is saved."""
    code = TRAINING + ENDLESS[kind]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(deadline_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "here\n"
            yield process
        finally:
            process.kill()


def out(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


@pytest.mark.few(1)
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
        assert out(process) == "paused"
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


@pytest.mark.full
def test_pause_that_begins_after_the_deadline_is_saved_in_too(store_path: Path) -> None:
    with training(store_path, "evaluation in a later pause", 0.01) as process:
        process.send_signal(signal.SIGTERM)
        assert "SIGTERM: saving" in line(process)
        assert "no safe point in 0.01 s and no pause" in line(process)
        _, errors = process.communicate("go on\n")
        assert "saved at the deadline, inside a pause" in errors
        assert process.returncode == 128 + signal.SIGTERM
    with casckpt.open(store_path) as store:
        assert store.steps() == [1, 2]
        assert store.restore() == {"counters": {"n": 2}}


@pytest.mark.full
def test_second_signal_ends_at_once_when_the_save_at_the_deadline_hangs(store_path: Path) -> None:
    with training(store_path, "a save that hangs", 0.01) as process:
        assert out(process) == "paused"
        process.send_signal(signal.SIGTERM)
        assert "SIGTERM: saving" in line(process)
        assert out(process) == "hangs"
        process.send_signal(signal.SIGTERM)
        assert "SIGTERM again: ending now" in line(process)
        assert process.wait() == 128 + signal.SIGTERM
    with casckpt.open(store_path) as store:
        assert store.steps() == [1]
        assert store.verify().ok


@pytest.mark.full
def test_save_that_fails_at_the_deadline_is_made_at_the_next_safe_point(store_path: Path) -> None:
    with training(store_path, "a save that fails", 0.01) as process:
        assert out(process) == "paused"
        process.send_signal(signal.SIGTERM)
        assert "SIGTERM: saving" in line(process)
        assert 'the save at the deadline failed: KeyError: "the provider\'s own"' in line(process)
        process.communicate("go on\n")
        assert process.returncode == 128 + signal.SIGTERM
    with casckpt.open(store_path) as store:
        assert store.steps() == [1, 3]
        assert store.timeline()[-1].labels == {"requested": "SIGTERM"}


@pytest.mark.full
def test_signal_in_the_middle_of_a_save_ends_the_training_when_it_is_durable(store_path: Path) -> None:
    with training(store_path, "in a save", 1000) as process:
        told, _ = process.communicate()
        assert (told, process.returncode) == ("", 128 + signal.SIGTERM)
    with casckpt.open(store_path) as store:
        assert store.steps() == [1, 3]
        assert store.restore() == {"counters": {"n": 2}, "late": {"n": 3}}


def test_signal_to_a_forked_worker_is_no_signal_to_the_training(store_path: Path) -> None:
    """As `terminate()` sends it: the worker ends, and its parent goes on."""
    with training(store_path, "ends a worker", 1000) as process:
        told, errors = process.communicate()
        assert (told.split(), errors, process.returncode) == (["forked", "-15", "-15", "-15"], "", 0)


@pytest.mark.full
def test_interrupt_of_a_terminal_is_one_signal_however_many_workers_hear_it(store_path: Path) -> None:
    with training(store_path, "with workers", 1000) as process:
        assert out(process) == "forked"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
    with casckpt.open(store_path) as store:
        assert store.timeline()[-1].labels == {"requested": "SIGINT"}


@pytest.mark.full
def test_parent_still_listens_when_a_forked_child_left_the_block(store_path: Path) -> None:
    with training(store_path, "a child leaves the block", 1000) as process:
        assert out(process) == "7"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    with casckpt.open(store_path) as store:
        assert store.timeline()[-1].labels == {"requested": "SIGTERM"}


@pytest.mark.full
def test_signal_after_the_last_safe_point_ends_the_process_with_the_block(store_path: Path) -> None:
    with training(store_path, "ends", 1000) as process:
        process.send_signal(signal.SIGTERM)
        assert "SIGTERM: saving" in line(process)
        rest, errors = process.communicate("go on\n")
        assert (rest, process.returncode) == ("", 128 + signal.SIGTERM)
        assert "no safe point came after it" in errors


@pytest.mark.full
def test_other_signals_with_handlers_are_none_of_these(store_path: Path) -> None:
    with training(store_path, "other signals", 1000) as process:
        process.send_signal(signal.SIGTERM)
        assert out(process) == "usr1"
        process.communicate("go on\n")
        assert process.returncode == 128 + signal.SIGTERM
    with casckpt.open(store_path) as store:
        assert store.timeline()[-1].labels == {"requested": "SIGTERM"}


def test_request_in_the_middle_of_another_save_is_kept_for_the_next_safe_point(store_path: Path) -> None:
    """A save of some components is no answer to a request for all of them."""
    with casckpt.open(store_path, create=True) as store, casckpt.CheckpointEngine(store) as engine:

        def capture() -> dict[str, int]:
            if engine.global_step == 2:
                engine.request_stop("SIGTERM", signal.SIGTERM)
            return {"n": engine.global_step}

        engine.register("rare", {"b": 0}, casckpt.SaveStrategy(every_steps=1000))
        engine.register("often", capture, casckpt.SaveStrategy(every_steps=1, necessity="droppable"))
        engine.step(1)
        engine.step(2)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            engine.step(3)
        assert store.timeline()[-1].components["rare"].step == 3


def test_save_by_the_loop_itself_ends_the_training_too(store_path: Path) -> None:
    with casckpt.open(store_path, create=True) as store, casckpt.CheckpointEngine(store, overlap="skip") as engine:
        engine.register("policy", {"a": 1})
        engine.request_stop("SIGTERM", signal.SIGTERM)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            engine.save(1)
        assert store.steps() == [1]


def test_end_is_asked_for_again_when_its_save_failed(store_path: Path, clock: Clock, disk: Disk) -> None:
    with open_timed(store_path, clock, disk) as store, casckpt.CheckpointEngine(store, clock=clock) as engine:
        engine.register("policy", {"a": 1})
        engine.step(1)
        disk.is_full = True
        engine.request_stop("SIGTERM", signal.SIGTERM)
        with pytest.raises(casckpt.SaveFailedError):
            engine.step(2)
        disk.is_full = False
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            engine.step(3)
        assert (store.timeline()[-1].step, store.timeline()[-1].labels) == (3, {"requested": "SIGTERM"})


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


def test_deadline_before_a_restore_saves_nothing_over_what_was_there(store_path: Path) -> None:
    """The state is not that of the run: it would take the place of its newest snapshot."""
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"policy": {"a": 1}})
    with casckpt.open(store_path) as store, casckpt.CheckpointEngine(store) as engine:
        engine.register("policy", {"a": 0})
        with engine.pause():
            assert not engine.save_in_pause("SIGTERM")
        assert store.restore() == {"policy": {"a": 1}}


class Deaf:
    """What a guard needs of an engine; nothing of it is asked here."""

    def request_stop(self, name: str, number: int) -> None:
        pass

    def save_in_pause(self, name: str) -> bool:
        return False


@pytest.mark.skipif(not hasattr(signal, "raise_signal"), reason="no process can signal itself here")
@pytest.mark.parametrize("moment", range(1, 7))
def test_signal_is_lost_at_no_moment_in_which_the_guard_comes_or_goes(
    moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the guard hears it, or the handler of before and after does."""
    outside: list[int] = []
    calls = 0

    def signalled(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            result = real(*arguments, **options)
            calls += 1
            if calls == moment:
                signal.raise_signal(signal.SIGTERM)
            return result

        return call

    before = signal.signal(signal.SIGTERM, lambda number, frame: outside.append(number))
    try:
        with monkeypatch.context() as patch:
            for name in ("signal", "set_wakeup_fd"):
                patch.setattr(signal, name, signalled(getattr(signal, name)))
            try:
                with listening(Deaf(), 1000):
                    pass
                heard = 0
            except SystemExit as ending:
                heard = ending.code
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == 6
    assert outside == [signal.SIGTERM] or heard == 128 + signal.SIGTERM
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.full
def test_job_whose_manager_and_supervisor_both_send_sigterm_is_saved(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One end, announced twice: a manager of jobs tells every process of it, and the supervisor passes its own on."""
    monkeypatch.setenv("CASCKPT_BEATS", str(tmp_path / "beats"))
    with training(store_path, "other signals", 1000) as process:
        process.send_signal(signal.SIGTERM)
        assert out(process) == "usr1"
        process.send_signal(signal.SIGTERM)
        process.communicate("go on\n")
        assert process.returncode == 128 + signal.SIGTERM
    with casckpt.open(store_path) as store:
        assert store.timeline()[-1].labels == {"requested": "SIGTERM"}
