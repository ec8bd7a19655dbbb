"""A command kept alive: real children, and a judge of silence that sees only numbers."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import casckpt
from casckpt.recovery import (
    Beat,
    FailureInfo,
    HealthServer,
    Settings,
    Supervisor,
    command_probe,
    last_failure,
    supervised_beats,
)
from casckpt.recovery.health import newest_snapshot
from casckpt.recovery.supervisor import LookClock, Silence, Status
from casckpt.storage.process import System
from tests.unit.cli_stores import call
from tests.unit.stores import open_store

FAST = Settings(
    restarts_max=3, backoff_s=0.001, poll_s=0.01, silence_min_s=0.3, probe_period_s=0.0, term_deadline_s=0.3
)

PATIENT = replace(FAST, silence_min_s=1e9)  # a loaded machine pauses a child for long


def shell(script: str, folder: Path) -> list[str]:
    """A command that runs a shell script in a folder."""
    return ["sh", "-c", f"cd {folder} && {script}"]


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_command_that_ends_well_is_not_started_again(tmp_path: Path) -> None:
    supervisor = Supervisor(shell("echo x >> lives", tmp_path), settings=FAST)
    assert supervisor.run() == 0
    assert (tmp_path / "lives").read_text() == "x\n"


@pytest.mark.parametrize(
    ("ending", "code", "kind"),
    [
        ("exit 3", 3, "exception"),
        ("kill -9 $$", 137, "oom-kill"),
        ("exit 137", 137, "oom-kill"),
        ("kill -15 $$", 143, "eviction"),
        ("kill -11 $$", 139, "exception"),
    ],
)
def test_failure_is_told_to_the_next_life_and_the_budget_ends(
    tmp_path: Path, ending: str, code: int, kind: str
) -> None:
    told: list[str] = []
    script = f'echo "$CASCKPT_ATTEMPT $CASCKPT_FAILURE" >> lives; {ending}'
    supervisor = Supervisor(shell(script, tmp_path), settings=FAST, tell=told.append)
    assert supervisor.run() == code
    lives = (tmp_path / "lives").read_text().splitlines()
    assert [line.split(" ")[0] for line in lives] == ["0", "1", "2", "3"]
    assert lives[0] == "0 "
    failures = [last_failure({"CASCKPT_FAILURE": line.split(" ", 1)[1]}) for line in lives[1:]]
    assert [failure and failure.kind for failure in failures] == [kind] * 3
    assert supervisor.status.last_failure is not None
    assert supervisor.status.last_failure.kind == kind
    assert "gave up: 3 restarts" in told[-1]


def test_command_that_recovers_ends_well(tmp_path: Path) -> None:
    supervisor = Supervisor(shell('echo x >> lives; [ "$CASCKPT_ATTEMPT" = 2 ]', tmp_path), settings=FAST)
    assert supervisor.run() == 0
    assert (tmp_path / "lives").read_text() == "x\nx\nx\n"
    assert supervisor.status.restart_count == 2


BEATING = """
import os, signal
from casckpt.recovery import supervised_beats
beats = supervised_beats()
attempt = int(os.environ["CASCKPT_ATTEMPT"])
"""


@pytest.mark.full
def test_hung_command_is_ended_and_started_again() -> None:
    """It says one thing and then nothing, and does not listen to SIGTERM; its second life ends at once."""
    script = """
import os, signal
if os.environ["CASCKPT_ATTEMPT"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from casckpt.recovery import supervised_beats
    beats = supervised_beats()
    beats.beat(2, phase="training")
    signal.pause()
"""
    told: list[str] = []
    supervisor = Supervisor(python(script), settings=replace(FAST, silence_factor=1.0), tell=told.append)
    assert supervisor.run() == 0
    assert any("killed" in line for line in told)
    failure = supervisor.status.last_failure
    assert failure is not None
    assert (failure.kind, failure.step) == ("hang", 2)
    assert "silent for more than 0.3 s after step 2" in failure.message


@pytest.mark.full
def test_progress_renews_the_budget() -> None:
    """One restart in a row is allowed; three lives fail, each a step further than the one before."""
    beat = "for step in range(3): beats.beat(attempt * 10 + step, phase=str(step))\n"
    script = BEATING + beat + "os._exit(0 if attempt == 3 else 1)\n"
    supervisor = Supervisor(python(script), settings=replace(PATIENT, restarts_max=1))
    assert supervisor.run() == 0
    assert (supervisor.status.restart_count, supervisor.status.step) == (3, 32)


def test_child_that_never_beats_is_never_silent(tmp_path: Path) -> None:
    """It ends after many looks, each longer than the silence that is allowed."""
    settings = Settings(poll_s=0.01, silence_min_s=0.0, silence_factor=0.0)
    script = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"
    assert Supervisor(shell(script, tmp_path), settings=settings).run() == 0


def said(counter: int, step: int, *, quiet_s: float = 0.0, file: str = "one") -> dict[str, Beat]:
    return {file: Beat("learner", counter, step=step, quiet_s=quiet_s)}


def test_silence_is_judged_by_the_slowest_step_and_not_before_the_first() -> None:
    silence = Silence(min_s=30, factor=10)
    silence.see(said(0, -1), 0.0)
    assert not silence.is_silent(1e9)  # setting up may take any time
    silence.see(said(1, 0), 100.0)
    assert (silence.is_silent(130.0), silence.is_silent(130.1)) == (False, True)
    for counter, step, now_s in ((2, 1, 101.0), (3, 2, 109.0), (4, 3, 110.0)):
        silence.see(said(counter, step), now_s)
    assert silence.limit_s() == 80.0
    assert (silence.is_silent(190.0), silence.is_silent(190.1)) == (False, True)
    silence.see(said(5, 3), 180.0)  # an announced phase: no step, but a sign of life
    assert not silence.is_silent(260.0)
    silence.see(said(5, 3), 259.0)  # the same beat read again is no sign
    assert silence.is_silent(260.1)
    silence.see({}, 261.0)  # it closed its beats
    assert not silence.is_silent(1e9)
    silence.see(said(5, 3), 300.0)
    assert (silence.is_silent(380.0), silence.is_silent(380.1)) == (False, True)


def test_phase_that_announces_how_long_it_takes_is_waited_for_and_no_longer() -> None:
    silence = Silence(min_s=30, factor=10)
    silence.see(said(1, 5), 0.0)
    silence.see(said(2, 5, quiet_s=600), 1.0)
    assert (silence.is_silent(601.0), silence.is_silent(601.1)) == (False, True)
    silence.see(said(3, 5), 500.0)  # it is over
    assert (silence.is_silent(530.0), silence.is_silent(530.1)) == (False, True)


def test_process_with_two_files_of_beats_is_silent_when_both_are() -> None:
    silence = Silence(min_s=30, factor=10)
    silence.see({**said(1, 5, file="engine"), **said(9, 5, file="own")}, 0.0)
    silence.see({**said(1, 5, file="engine"), **said(10, 5, file="own")}, 20.0)
    for now_s in (21.0, 50.0):  # looked at again and again, as a supervisor does
        silence.see({**said(1, 5, file="engine"), **said(10, 5, file="own")}, now_s)
    assert (silence.is_silent(50.0), silence.is_silent(50.1)) == (False, True)


def test_two_failed_probes_in_a_row_end_the_command(tmp_path: Path) -> None:
    answers = iter([False, True, False, False])
    supervisor = Supervisor(
        shell('[ "$CASCKPT_ATTEMPT" = 1 ] || exec sleep 600', tmp_path),
        settings=FAST,
        probe=lambda: next(answers, True),
    )
    assert supervisor.run() == 0
    assert supervisor.status.last_failure == FailureInfo("hang", None, "2 health probes failed in a row")
    assert list(answers) == []


def test_command_probes_by_exit_code() -> None:
    assert command_probe("true")()
    assert not command_probe("false")()
    assert not command_probe("no-such-command-at-all")()
    assert not command_probe("sleep 600", timeout_s=0.05)()
    with pytest.raises(casckpt.InvalidInputError):
        command_probe(" ")


def test_what_is_left_of_a_command_that_failed_is_ended_before_it_is_started_again(tmp_path: Path) -> None:
    """A worker behind the shell would keep the memory of the device."""
    script = 'if [ "$CASCKPT_ATTEMPT" = 0 ]; then sleep 600 & echo $! > worker; exit 1; fi'
    assert Supervisor(shell(script, tmp_path), settings=FAST).run() == 0
    with contextlib.suppress(FileNotFoundError):  # of the dead, at most a process that nobody waited for is left
        assert Path("/proc", (tmp_path / "worker").read_text().strip(), "cmdline").read_bytes() == b""


def test_learner_that_was_fenced_is_not_started_again(tmp_path: Path) -> None:
    script = """
import sys
from casckpt.recovery import supervised_beats
open(sys.argv[1], "a").write("x")
supervised_beats().beat(7, phase="fenced")
sys.exit(4)
"""
    told: list[str] = []
    command = [*python(script), str(tmp_path / "lives")]
    supervisor = Supervisor(command, settings=PATIENT, tell=told.append, oom_kills=lambda: None)
    assert supervisor.run() == 4
    assert (tmp_path / "lives").read_text() == "x"
    assert supervisor.status.last_failure == FailureInfo("lost-head", 7, "exit code 4; it was fenced")
    assert "another learner has recovered this run" in told[-1]


@pytest.mark.full
def test_end_gives_the_child_its_deadline_and_starts_nothing_again(tmp_path: Path) -> None:
    script = 'trap "echo saved > end; exit 0" TERM; echo ready > ready; while :; do sleep 0.05; done'
    supervisor = Supervisor(shell(script, tmp_path), settings=Settings(poll_s=0.01, term_deadline_s=1e6))
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(supervisor.run()))
    thread.start()
    while not (tmp_path / "ready").exists():
        thread.join(0.01)
        assert thread.is_alive()
    supervisor.end()
    thread.join()
    assert codes == [0]
    assert (tmp_path / "end").read_text() == "saved\n"


def test_end_during_the_pause_before_a_restart_ends_it(tmp_path: Path) -> None:
    settings = replace(FAST, backoff_s=1e6, backoff_max_s=1e6)
    supervisor = Supervisor(shell("echo x >> lives; exit 3", tmp_path), settings=settings, tell=lambda text: end())

    def end() -> None:  # as a handler of SIGTERM does, once it was said that it starts again
        supervisor.end()

    assert supervisor.run() == 3
    assert (tmp_path / "lives").read_text() == "x\n"


def test_folder_of_beats_that_somebody_cleaned_up_ends_no_training(tmp_path: Path) -> None:
    script = """
import os, shutil
from casckpt.recovery import supervised_beats
supervised_beats().beat(5)
shutil.rmtree(os.environ["CASCKPT_BEATS"])
"""
    supervisor = Supervisor(python(script), settings=PATIENT)
    assert supervisor.run() == 0
    assert supervisor.status.restart_count == 0


def test_command_that_cannot_be_started_is_an_error_and_not_a_loop() -> None:
    with pytest.raises(casckpt.InvalidInputError, match="cannot be started"):
        Supervisor(["no-such-command-at-all"]).run()
    with pytest.raises(casckpt.InvalidInputError, match="no command"):
        Supervisor([])


def test_process_without_a_supervisor_has_no_beats_and_no_failure() -> None:
    assert supervised_beats(environment={}) is None
    assert last_failure({}) is None
    with pytest.raises(casckpt.InvalidInputError, match="Unset it"):
        last_failure({"CASCKPT_FAILURE": "[]"})


@contextlib.contextmanager
def served(status: Status, store_path: str | None = None) -> Iterator[http.client.HTTPConnection]:
    with HealthServer(status, store_path=store_path) as server:
        connection = http.client.HTTPConnection(*server.address, timeout=200)
        yield connection
        connection.close()


def get(connection: http.client.HTTPConnection, path: str) -> tuple[int, str]:
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_health_is_that_of_the_command() -> None:
    status = Status()
    with served(status) as connection:
        assert get(connection, "/healthz")[0] == 503
        status.is_running = True
        assert (get(connection, "/healthz")[0], get(connection, "/readyz")[0]) == (200, 503)
        status.step = 3
        assert get(connection, "/readyz")[0] == 200
        status.probe_failures = 1
        assert get(connection, "/healthz") == (503, "probes fail\n")
        assert get(connection, "/other")[0] == 404


@pytest.mark.full
def test_readiness_and_step_are_those_of_the_life_that_runs_now(tmp_path: Path) -> None:
    """The first life comes to step 9 and dies; the second tells of no step until it was looked at, then of step 4."""
    wait = "import time\nwhile not os.path.exists(f'{folder}/{attempt}-looked'): time.sleep(0.01)\n"
    script = f"folder = {str(tmp_path)!r}\n{BEATING}"
    script += (
        f"if attempt == 0:\n    beats.beat(9)\nelse:\n    {wait.replace(chr(10), chr(10) + '    ')}beats.beat(4)\n"
    )
    script += wait.replace("looked", "ready") + "os._exit(1 - attempt)\n"
    seen: list[tuple[int, int, str]] = []

    def look() -> bool:
        life, ready = supervisor.status.restart_count, health.answer("/readyz")[0]
        step = next(line for line in health.answer("/metrics")[1].splitlines() if line.startswith("casckpt_step "))
        seen.append((life, ready, step))
        (tmp_path / f"{life}-looked").touch()
        if ready == 200:
            (tmp_path / f"{life}-ready").touch()
        return True

    supervisor = Supervisor(python(script), settings=PATIENT, probe=look)
    with HealthServer(supervisor.status) as health:
        assert supervisor.run() == 0
        assert health.answer("/readyz")[0] == 503
    second = [each for each in seen if each[0] == 1]
    assert (0, 200, "casckpt_step 9") in seen
    assert second[0] == (1, 503, "casckpt_step -1")
    assert second[-1] == (1, 200, "casckpt_step 4")


def test_saves_that_failed_or_were_postponed_are_counted_over_all_lives() -> None:
    script = (
        "import os, sys; from casckpt.recovery import supervised_beats; beats = supervised_beats(); "
        "beats.beat(1, failed_saves=2, postponed_saves=3, phase='x'); beats.leave(); "
        "sys.exit(os.environ['CASCKPT_ATTEMPT'] == '0')"
    )
    supervisor = Supervisor(python(script), settings=PATIENT)
    assert supervisor.run() == 0
    assert (supervisor.status.failed_saves, supervisor.status.postponed_saves) == (4, 6)


def test_metrics_are_those_of_the_store(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(7, {"w": np.zeros(3)})
    with served(
        Status(True, restart_count=2, step=9, failed_saves=4, postponed_saves=6), str(tmp_path / "store")
    ) as connection:
        code, text = get(connection, "/metrics")
        values = dict(line.split(" ") for line in text.splitlines())
        assert code == 200
        assert (values["casckpt_step"], values["casckpt_restarts_total"]) == ("9", "2")
        assert (values["casckpt_save_failures_total"], values["casckpt_saves_postponed_total"]) == ("4", "6")
        assert values["casckpt_newest_snapshot_step"] == "7"
        assert float(values["casckpt_newest_snapshot_age_seconds"]) >= 0
        assert float(values["casckpt_disk_free_bytes"]) > 0
    with served(Status(), str(tmp_path / "nowhere")) as connection:
        assert "casckpt_store_readable 0\n" in get(connection, "/metrics")[1]


def test_command_line_gives_the_exit_code_of_the_last_life(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    called = call("run", "--restarts", 0, "--", "sh", "-c", "exit 5")
    assert called.code == 5
    assert "gave up" in called.err
    assert call("run", "--", "true").code == 0
    assert call("run").code == 2
    heard = tmp_path / "heard"
    assert (
        call("run", "--restarts", 0, "sh", "-c", f'echo "$@" > {heard}', "sh", "--run", "seven", "--port", "x").code
        == 0
    )
    assert heard.read_text() == "--run seven --port x\n"  # options of the command are its own, without -- too
    assert signal.getsignal(signal.SIGTERM) is before


def test_time_in_which_the_observer_stood_still_is_nobodys_silence() -> None:
    """A job that was suspended for hours between two looks, and a clock that was put back."""
    now_s = [1000.0]
    lived_s = LookClock(lambda: now_s[0], gap_max_s=7.5)
    silence = Silence(min_s=30, factor=10)
    for counter, later_s in ((1, 1.0), (2, 1.0), (3, 3 * 3600.0), (4, -7200.0), (5, 1.0)):
        now_s[0] += later_s
        silence.see(said(counter, counter), lived_s())
        assert not silence.is_silent(lived_s())
    assert silence.limit_s() == 75.0  # ten times a step of 7.5 s, and not of three hours
    for _ in range(75):
        now_s[0] += 1.0
        assert not silence.is_silent(lived_s())
    now_s[0] += 1.0
    assert silence.is_silent(lived_s())


@pytest.mark.full
def test_job_that_was_suspended_for_hours_goes_on(tmp_path: Path) -> None:
    """The clock stands still but for one leap of three hours, once the child was heard; then the child may end."""
    script = BEATING + "beats.beat(5)\nimport sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    now_s, looks = [0.0], [0]

    def clock() -> float:
        if supervisor.status.step == 5:
            looks[0] += 1
            now_s[0] += 3 * 3600.0 if looks[0] == 1 else 0.0
            if looks[0] == 10:
                (tmp_path / "go").touch()
        return now_s[0]

    system = System(monotonic_s=lambda: clock())
    supervisor = Supervisor([*python(script), str(tmp_path / "go")], settings=FAST, system=system)
    assert supervisor.run() == 0
    assert (supervisor.status.restart_count, looks[0] > 10) == (0, True)


def test_longest_announcement_of_one_look_counts_whichever_file_it_is_in() -> None:
    for files in (("engine", "own"), ("own", "engine")):
        silence = Silence(min_s=30, factor=10)
        silence.see({file: Beat("learner", 1, step=5) for file in files}, 0.0)
        quiet_s = {"engine": 600.0, "own": 0.0}
        silence.see({file: Beat("learner", 2, step=5, quiet_s=quiet_s[file]) for file in files}, 1.0)
        assert (silence.is_silent(601.0), silence.is_silent(601.1)) == (False, True)


def test_pause_before_a_restart_doubles_up_to_its_bound_however_many_there_were() -> None:
    settings = Settings(backoff_s=0.5, backoff_max_s=60.0)
    assert [settings.pause_s(row) for row in (1, 2, 3, 7, 8, 9, 2000)] == [0.5, 1.0, 2.0, 32.0, 60.0, 60.0, 60.0]


@pytest.mark.full
def test_failure_tells_the_last_step_of_the_life_that_failed(tmp_path: Path) -> None:
    """A life that fell back to an older step lost few steps, not all that a life before it had made."""
    script = BEATING + "if attempt < 2: beats.beat([900, 520][attempt])\nos._exit(0 if attempt == 3 else 1)\n"
    found: list[int | None] = []

    def tell(text: str) -> None:
        assert supervisor.status.last_failure is not None
        found.append(supervisor.status.last_failure.step)

    supervisor = Supervisor(python(script), settings=PATIENT, tell=tell)
    assert supervisor.run() == 0
    assert found == [900, 520, 520]  # the third died before its first step
    assert supervisor.status.step == -1  # nothing of the fourth


def test_command_that_cannot_be_started_again_at_the_moment_is_tried_again(tmp_path: Path) -> None:
    """As when memory or a network disk is out for a while: it could be started before."""
    program = tmp_path / "program"

    def write(code: int) -> None:
        program.write_text(f"#!/bin/sh\nrm {program}\nexit {code}\n")
        program.chmod(0o700)

    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            write(0)

    write(3)
    assert Supervisor([str(program)], settings=FAST, tell=tell).run() == 0
    assert "exit code 3" in told[0]
    assert "cannot be started: No such file" in told[1]


def test_probe_that_raises_is_a_failed_probe(tmp_path: Path) -> None:
    answers: Iterator[bool | Exception] = iter([ConnectionError("nobody there"), True, KeyError("x"), OSError("y")])

    def probe() -> bool:
        answer = next(answers, True)
        if isinstance(answer, Exception):
            raise answer
        return answer

    told: list[str] = []
    command = shell('[ "$CASCKPT_ATTEMPT" = 1 ] || exec sleep 600', tmp_path)
    supervisor = Supervisor(command, settings=FAST, probe=probe, tell=told.append)
    assert supervisor.run() == 0
    assert supervisor.status.last_failure == FailureInfo("hang", None, "2 health probes failed in a row")
    assert told[0] == "the health probe failed: ConnectionError: nobody there"


@pytest.mark.parametrize(("newest", "restarts"), [(["a", "b", "c", "d"], 3), (["a", None, "b", None, "c"], 1), ([], 1)])
def test_commits_are_progress_of_a_command_that_does_not_beat(
    tmp_path: Path, newest: list[str | None], restarts: int
) -> None:
    """One restart in a row is allowed. What cannot be read at the moment is no progress."""
    answers = iter(newest)
    command = shell('echo x >> lives; [ "$CASCKPT_ATTEMPT" = 3 ]', tmp_path)
    supervisor = Supervisor(command, settings=replace(FAST, restarts_max=1), progress=lambda: next(answers, None))
    assert supervisor.run() == (0 if restarts == 3 else 1)
    assert supervisor.status.restart_count == restarts


def test_store_that_cannot_be_ends_the_supervisor_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for path in (tmp_path / "file", tmp_path / "file" / "store"):
        called = call("run", "--store", path, "--", "touch", tmp_path / "lived")
        assert (called.code, "not a folder" in called.err) == (6, True)
    assert not (tmp_path / "lived").exists()


def test_store_that_is_not_there_yet_is_named_after_a_failure_alone(tmp_path: Path) -> None:
    options = ("run", "--restarts", 0, "--store", tmp_path / "store", "--")
    assert call(*options, "true").err == ""
    assert f"while --store cannot be read: {tmp_path / 'store'}: no store here" in call(*options, "false").err


def test_store_that_cannot_be_read_is_named_at_once_and_only_once(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(1, {"w": np.ones(3)})
    for path in (tmp_path / "store" / "casckpt.json", Path(store._timeline.path(0))):
        path.write_bytes(b"torn")
    for command, code in (("true", 0), ("false", 1)):
        called = call("run", "--restarts", 0, "--store", tmp_path / "store", "--", command)
        assert (called.code, called.err.count("while --store cannot be read")) == (code, 1)


def test_newest_snapshot_of_a_store_and_of_none(tmp_path: Path) -> None:
    assert newest_snapshot(str(tmp_path / "store")) is None
    with open_store(tmp_path / "store") as store:
        first = store.commit(7, {"w": np.zeros(3)})
        assert newest_snapshot(str(tmp_path / "store")) == first
    with open_store(tmp_path / "store", run="other") as store:
        assert newest_snapshot(str(tmp_path / "store")) == first
        assert newest_snapshot(str(tmp_path / "store"), "other") is None
        last = store.commit(2, {"w": np.ones(3)})
    assert newest_snapshot(str(tmp_path / "store")) == last
    assert newest_snapshot(str(tmp_path / "store"), "main") == first
    Path(store._timeline.path(last.seq)).write_bytes(b"torn")  # an entry that cannot be read hides no snapshot
    assert newest_snapshot(str(tmp_path / "store"), "main") == first


@pytest.mark.full
def test_terminal_that_is_gone_ends_no_supervisor(tmp_path: Path) -> None:
    """It has something to say, and nobody reads it any more."""
    reader, writer = os.pipe()
    os.close(reader)
    command = shell('echo x >> lives; [ "$CASCKPT_ATTEMPT" = 2 ]', tmp_path)
    words = [sys.executable, "-m", "casckpt", "run", "--", *command]
    assert subprocess.run(words, stderr=writer, check=False).returncode == 0
    os.close(writer)
    assert (tmp_path / "lives").read_text() == "x\nx\nx\n"


@pytest.mark.full
@pytest.mark.parametrize("is_ignored", [False, True])
def test_hangup_ends_the_command_in_order_unless_it_is_ignored(tmp_path: Path, is_ignored: bool) -> None:
    trap = 'trap "echo saved > end; exit 0" TERM; echo $PPID > ready; while [ ! -e go ]; do sleep 0.05; done; exit 5'
    words = [sys.executable, "-m", "casckpt", "run", "--restarts", "0", "--", *shell(trap, tmp_path)]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        while not (tmp_path / "ready").exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
            assert process.poll() is None
        process.send_signal(signal.SIGHUP)
        if is_ignored:
            (tmp_path / "go").touch()
        assert process.wait() == (5 if is_ignored else 0)
    assert (tmp_path / "end").exists() is not is_ignored


RECOVERING = """
import sys
import casckpt
from casckpt.recovery import RecoveryCoordinator, last_failure, open_generation

hook = sys.excepthook

open(sys.argv[1] + ".lives", "a").write("x")
with casckpt.open(sys.argv[1], create=True) as store, casckpt.open(sys.argv[1]) as other:
    report = RecoveryCoordinator(store).recover({"n": [0]}, last_failure())
    open_generation(other, None)
    assert sys.excepthook is hook  # which is the program's own
    try:
        store.commit(1, {"n": [1]})
    except casckpt.FencedError:  # whatever a program makes of it
        sys.exit(7)
"""


@pytest.mark.full
def test_learner_without_an_engine_that_is_fenced_is_not_started_again_either(tmp_path: Path) -> None:
    supervisor = Supervisor([*python(RECOVERING), str(tmp_path / "store")], settings=PATIENT, oom_kills=lambda: None)
    assert supervisor.run() == 7
    assert (tmp_path / "store.lives").read_text() == "x"
    assert supervisor.status.last_failure == FailureInfo("lost-head", None, "exit code 7; it was fenced")
