"""Who is alive, by a simulated clock of the observer; and the same over a real socket."""

from __future__ import annotations

import http.client
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import casckpt
from casckpt.engine.beats import Beat, decode_beat
from casckpt.recovery import BeatClient, BeatFile, BeatFolder, BeatServer, HealthServer, Version
from casckpt.recovery.supervisor import Status
from casckpt.storage.process import System
from tests.unit.cli_stores import call

TOKEN = "0123456789abcdef"


class Clock:
    """Monotonic seconds that only a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_process_is_dead_after_the_timeout_of_the_observers_clock_and_not_before(tmp_path: Path) -> None:
    own, observers = Clock(), Clock()
    beats = BeatFile(str(tmp_path), "actor-1", system=System(monotonic_s=own))
    folder = BeatFolder(str(tmp_path), system=System(monotonic_s=observers))
    (pulse,) = folder.look().values()
    assert (pulse.is_alive, pulse.beat.name) == (True, "actor-1")
    observers.now_s += 29.9
    assert [each.is_alive for each in folder.look().values()] == [True]
    observers.now_s += 0.2
    assert [each.is_alive for each in folder.look().values()] == [False]
    own.now_s += 5
    beats.beat(7, generation=2, phase="training")
    (pulse,) = folder.look().values()
    assert (pulse.is_alive, pulse.still_s) == (True, 0.0)
    assert (pulse.beat.step, pulse.beat.generation, pulse.beat.phase) == (7, 2, "training")
    beats.close()
    assert folder.look() == {}


def test_pulse_during_which_a_fence_is_told_puts_no_older_phase_over_it(tmp_path: Path) -> None:
    """The one that is told meanwhile is the last that was said, at whatever moment of the pulse that is."""

    def now_s() -> float:
        if acts:
            acts.pop()()
        return 0.0

    acts: list[Callable[[], None]] = []
    beats = BeatFile(str(tmp_path), "learner", period_s=0.0, system=System(monotonic_s=now_s))
    folder = BeatFolder(str(tmp_path))
    beats.beat(1, phase="saving")
    acts.append(lambda: beats.beat(1, phase="fenced"))
    beats.pulse()
    (pulse,) = folder.look().values()
    assert not acts and (pulse.beat.phase, pulse.beat.counter) == ("fenced", 3)
    beats.close()


def test_beats_are_written_once_a_period_and_news_at_once(tmp_path: Path) -> None:
    clock = Clock()
    beats = BeatFile(str(tmp_path), "learner", period_s=5, system=System(monotonic_s=clock))
    folder = BeatFolder(str(tmp_path))
    counters = []
    for step in range(20):
        clock.now_s += 1
        beats.beat(step)
        counters.append(next(iter(folder.look().values())).beat.counter)
    assert counters == [1] * 5 + [2] * 5 + [3] * 5 + [4] * 5  # the first step is news
    beats.beat(20, phase="saving")
    assert next(iter(folder.look().values())).beat.counter == 5
    beats.close()


def test_long_work_beats_by_itself_and_what_was_said_last_outlives_a_process_that_leaves(tmp_path: Path) -> None:
    clock = Clock()
    beats = BeatFile(str(tmp_path), "learner", period_s=1, system=System(monotonic_s=clock))
    folder = BeatFolder(str(tmp_path))
    beats.beat(3, generation=2, phase="saving", failed_saves=1)
    for later_s, counter in ((0.0, 1), (0.5, 1), (0.5, 2), (1.0, 3)):
        clock.now_s += later_s
        beats.pulse()
        assert next(iter(folder.look().values())).beat == Beat("learner", counter, 2, 3, "saving", 1)
    beats.leave()
    (pulse,) = folder.look().values()
    assert (pulse.beat.step, pulse.beat.phase) == (3, "closed")
    assert pulse.beat.quiet_s >= 1e9


FORKING = """
import os, sys
from casckpt.recovery import BeatFile
beats = BeatFile(sys.argv[1], "learner", period_s=0)
beats.beat(1)
if os.fork() == 0:
    beats.beat(9)
    os._exit(0)
os.wait()
"""


def test_forked_child_does_not_beat_for_its_parent(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKING, str(tmp_path)], check=True)
    assert [pulse.beat for pulse in BeatFolder(str(tmp_path)).look().values()] == [Beat("learner", 1, step=1)]


def test_process_that_is_gone_from_this_machine_is_dead_at_once(tmp_path: Path) -> None:
    script = f"from casckpt.recovery import BeatFile; BeatFile({str(tmp_path)!r}, 'actor')"
    subprocess.run([sys.executable, "-c", script], check=True)
    (pulse,) = BeatFolder(str(tmp_path)).look().values()
    assert not pulse.is_alive


def test_beat_that_is_half_written_is_no_news(tmp_path: Path) -> None:
    beats = BeatFile(str(tmp_path), "actor")
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    folder = BeatFolder(str(tmp_path))
    assert len(folder.look()) == 1
    for cut in range(1, 80):
        assert decode_beat(whole[:cut]) is None
        path.write_bytes(bytes(byte ^ (at == cut) for at, byte in enumerate(whole)))
        assert next(iter(folder.look().values())).beat == Beat("actor", 0)
    beats.close()


@pytest.mark.parametrize("name", ["", "a/b", "..", "a@b", "x" * 201])
def test_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(casckpt.InvalidInputError):
        BeatFile(str(tmp_path), name)


def test_actor_learns_the_version_over_http_and_sees_a_recovery() -> None:
    versions = [Version(0, 900)]
    clock = Clock()
    with BeatServer(lambda: versions[-1], token=TOKEN, system=System(monotonic_s=clock)) as server:
        client = BeatClient(*server.address, name="actor-1", token=TOKEN)
        assert client.beat(3, phase="rollout") == Version(0, 900)
        versions.append(Version(1, 500))
        assert client.beat(4) == Version(1, 500)
        assert server.pulses()["actor-1"].beat == Beat("actor-1", 2, 0, 4, "")
        clock.now_s += 31
        assert not server.pulses()["actor-1"].is_alive
        client.beat()
        assert server.pulses()["actor-1"].is_alive
        client.close()


def test_nobody_is_heard_without_the_token() -> None:
    with BeatServer(lambda: Version(0, 0), token=TOKEN) as server:
        client = BeatClient(*server.address, name="stranger", token="another-token-of-16")
        with pytest.raises(casckpt.StorageError, match="403"):
            client.beat()
        client.close()
        assert server.pulses() == {}
        connection = http.client.HTTPConnection(*server.address, timeout=200)
        for method, path, body, code in [
            ("GET", "/pulses", b"", 403),
            ("POST", "/beat", b"{", 400),
            ("POST", "/other", b"{}", 404),
            ("POST", "/beat", b"x" * 5000, 413),
            ("POST", "/beat", b"", 413),
        ]:
            connection.request(method, path, body)
            response = connection.getresponse()
            assert (response.read(), response.status) == (b"{}", code)
        connection.request("GET", "/pulses", headers={"X-Casckpt-Token": TOKEN})
        response = connection.getresponse()
        assert (response.read(), response.status) == (b"{}", 200)
        connection.close()


@pytest.mark.parametrize("token", ["", "short"])
def test_token_that_anybody_could_guess_is_refused_on_both_sides(token: str) -> None:
    with pytest.raises(casckpt.InvalidInputError, match="16 characters"):
        BeatServer(lambda: Version(0, 0), token=token)
    with pytest.raises(casckpt.InvalidInputError, match="16 characters"):
        BeatClient("127.0.0.1", 1, name="actor", token=token)


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_port_that_cannot_be_is_refused_before_a_client_connects(port: int) -> None:
    with pytest.raises(casckpt.InvalidInputError, match=f"port={port}: expected an integer from 1 to 65535"):
        BeatClient("127.0.0.1", port, name="actor", token=TOKEN)


def test_learner_that_is_gone_is_a_storage_error_and_is_found_again() -> None:
    server = BeatServer(lambda: Version(0, 1), token=TOKEN)
    host, port = server.address
    client = BeatClient(host, port, name="actor", token=TOKEN)
    assert client.beat() == Version(0, 1)
    client.close()
    server.close()
    with pytest.raises(casckpt.StorageError, match="did not answer"):
        client.beat()
    with BeatServer(lambda: Version(1, 0), token=TOKEN, port=port):
        assert client.beat() == Version(1, 0)
        client.close()


def test_server_that_is_closed_answers_nobody_not_even_on_a_connection_that_is_kept() -> None:
    with BeatServer(lambda: Version(2, 900), token=TOKEN) as server:
        client = BeatClient(*server.address, name="actor", token=TOKEN)
        assert client.beat() == Version(2, 900)
    for _ in range(2):
        with pytest.raises(casckpt.StorageError, match="Hold samples"):
            client.beat()
    client.close()


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_port_that_cannot_be_is_refused_by_name(port: int) -> None:
    with pytest.raises(casckpt.InvalidInputError, match="expected 0 to 65535"):
        BeatServer(lambda: Version(0, 0), token=TOKEN, port=port)
    with pytest.raises(casckpt.InvalidInputError, match="expected 0 to 65535"):
        HealthServer(Status(), port=port)
    assert call("run", f"--port={port}", "--", "true").code == 2


def test_port_in_use_and_an_address_of_another_machine_are_told_apart() -> None:
    with BeatServer(lambda: Version(0, 0), token=TOKEN) as server:
        port = server.address[1]
        with pytest.raises(casckpt.BusyError, match=f"{port}: cannot listen.*another port"):
            BeatServer(lambda: Version(0, 0), token=TOKEN, port=port)
        with pytest.raises(casckpt.BusyError, match="another port"):
            HealthServer(Status(), port=port)
        called = call("run", "--port", port, "--", "true")
        assert (called.code, "another port" in called.err) == (5, True)
    with pytest.raises(casckpt.StorageError, match="address of this machine"):
        BeatServer(lambda: Version(0, 0), token=TOKEN, host="192.0.2.1")  # reserved for documentation


def test_first_step_is_told_at_once_for_from_then_on_a_hang_must_be_found(tmp_path: Path) -> None:
    clock = Clock()
    beats = BeatFile(str(tmp_path), "learner", period_s=5, system=System(monotonic_s=clock))
    folder = BeatFolder(str(tmp_path))
    for said, told in ((-1, -1), (0, 0), (1, 0)):  # the second step is no news yet
        beats.beat(said)
        assert next(iter(folder.look().values())).beat.step == told
    beats.close()


@pytest.mark.parametrize("token", [TOKEN + "\n", TOKEN + "\r\nX: y", "token of the training", "gehéim-gehéim-gehéim"])
def test_token_that_cannot_stand_in_a_header_is_refused_on_both_sides(token: str) -> None:
    with pytest.raises(casckpt.InvalidInputError, match="printable"):
        BeatServer(lambda: Version(0, 0), token=token)
    with pytest.raises(casckpt.InvalidInputError, match="printable"):
        BeatClient("127.0.0.1", 1, name="actor", token=token)


def test_process_of_another_container_is_not_dead_because_its_id_is_unknown_here(tmp_path: Path) -> None:
    """Same machine, same boot; who it is there, nobody here can know. Its counter alone decides."""
    beats = BeatFile(str(tmp_path), "actor")
    (path,) = tmp_path.iterdir()
    where = path.name.split("@")[1].split("-")[0]
    there = f"{where[:16]}{int(where[16:], 16) ^ 1:08x}"
    path.rename(tmp_path / f"actor@{there}-999999999-1-{'0' * 16}")  # an id that no process here has
    clock = Clock()
    folder = BeatFolder(str(tmp_path), system=System(monotonic_s=clock))
    assert [each.is_alive for each in folder.look().values()] == [True]
    clock.now_s += 30.1
    assert [each.is_alive for each in folder.look().values()] == [False]
    beats.close()


@pytest.mark.parametrize("hours", [-9, 9])
def test_wall_clock_that_is_set_moves_no_pulse(tmp_path: Path, hours: int) -> None:
    """Neither that of who beats nor that of who looks: only counters and the observer's own seconds count."""
    wall_ns, clock = [10**18], Clock()
    system = System(time_ns=lambda: wall_ns[0], monotonic_s=clock)
    beats = BeatFile(str(tmp_path), "learner", period_s=1, system=system)
    folder = BeatFolder(str(tmp_path), system=system)
    with BeatServer(lambda: Version(0, 0), token=TOKEN, system=system) as server:
        server.take(TOKEN, Beat("actor", 1))
        assert [each.is_alive for each in (*folder.look().values(), *server.pulses().values())] == [True, True]
        wall_ns[0] += hours * 3600 * 10**9
        clock.now_s += 29.0
        assert [each.is_alive for each in (*folder.look().values(), *server.pulses().values())] == [True, True]
        wall_ns[0] -= 2 * hours * 3600 * 10**9
        clock.now_s += 2.0
        assert [each.is_alive for each in (*folder.look().values(), *server.pulses().values())] == [False, False]
        beats.beat(1)
        server.take(TOKEN, Beat("actor", 2))
        assert [each.is_alive for each in (*folder.look().values(), *server.pulses().values())] == [True, True]
    beats.close()


@pytest.mark.parametrize(
    "phase", ["x" * 5000, "\0" * 300, "\ud800 torn", "\N{SEEDLING}" * 300, '"\\' * 300, "one\ntwo"]
)
def test_beat_takes_the_numbers_and_words_that_a_training_has(tmp_path: Path, phase: str) -> None:
    """Counters of numpy, and any text: what cannot be written would end the training, or make it unheard."""
    name = "é" * 90
    beats = BeatFile(str(tmp_path), name)
    beats.beat(np.int64(7), generation=np.uint8(2), phase=phase, quiet_s=np.float32(0.5))
    (pulse,) = BeatFolder(str(tmp_path)).look().values()
    assert (pulse.beat.step, pulse.beat.generation, pulse.beat.quiet_s) == (7, 2, 0.5)
    assert pulse.beat.phase.isprintable()
    beats.close()
    with BeatServer(lambda: Version(np.int64(3), np.int32(4)), token=TOKEN) as server:
        client = BeatClient(*server.address, name=name, token=TOKEN)
        assert client.beat(np.int64(9), phase=phase) == Version(3, 4)
        assert server.pulses()[name].beat.step == 9
        client.close()
