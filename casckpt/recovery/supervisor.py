"""A command kept alive: started, watched, started again, and told how it ended the last time.

    casckpt run --store runs/walker -- python train.py

The supervisor loads nothing of the training and decides nothing about its state. It judges whether the process is dead:

* it ended: exit code 0 is the end of the training, anything else a failure; SIGKILL (137) counts as an OOM kill, and so
  does any failure during which the kernel killed a process of this cgroup for memory;
* it is *silent*: it beats (an engine does by itself, others with `BeatFile`), and its counter has stood still for the
  largest of `silence_min_s`, `silence_factor` times the longest pause between two of its steps, and what it announced
  itself. Off before the first step, once it closed its beats, and for a child that never beats; output is never judged;
* a health probe failed twice in a row.

Time in which the supervisor itself stood still (a job that was suspended, a machine that slept) is nobody's silence.

A child that says it was *fenced* is not started again: another learner has recovered its run, and two that recover in
turns would fence each other for ever.

The child finds CASCKPT_BEATS (where to beat), CASCKPT_FAILURE (how the last one ended, see `last_failure`) and
CASCKPT_ATTEMPT in its environment; what to restore is the child's decision, made with the store in its hand.

Restarts wait longer each time, and end after `restarts_max` of them without a step beyond the last one known, or a new
snapshot where the store is known. SIGTERM
goes on to the child, which gets `term_deadline_s` to save. It is the head of a process group: what is left of the group
when it ended (workers, the command behind a shell) is killed before it is started again. A supervisor that is killed
itself leaves nothing behind either: see `guard`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from casckpt.arguments import FUNCTION, MAPPING, NUMBER, TEXT, TEXTS, WHOLE, check, checked, maybe, within
from casckpt.engine.beats import FENCED, FOLDER, Beat, BeatFolder
from casckpt.errors import InvalidInputError, StorageError
from casckpt.recovery.decision import FailureInfo
from casckpt.recovery.guard import Guard
from casckpt.recovery.memory_kills import oom_kill_count
from casckpt.storage.process import System

FAILURE, ATTEMPT = "CASCKPT_FAILURE", "CASCKPT_ATTEMPT"
GAVE_UP = 1
_CANNOT_START = 126  # as a shell says it
_DOUBLINGS_MAX = 32  # of a pause; far beyond any bound on it
_KILLED, _TERMINATED = (-signal.SIGKILL, 128 + signal.SIGKILL), (-signal.SIGTERM, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Settings:
    """How patient a supervisor is. Seconds, and counts.

    Attributes:
        restarts_max: restarts in a row without progress before it gives up.
        backoff_s, backoff_max_s: wait before the first restart in a row, doubled for each further one; and at most.
        watch: name of the process whose beats are judged; others are not missed.
        silence_min_s, silence_factor: see the module.
        probe_period_s, probe_failures_max: how often to probe, and how many failures in a row are one too many.
        term_deadline_s: what a child gets to end after SIGTERM, before SIGKILL.
        poll_s: how often to look.
    """

    restarts_max: int = 10
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    watch: str = "learner"
    silence_min_s: float = 30.0
    silence_factor: float = 10.0
    probe_period_s: float = 10.0
    probe_failures_max: int = 2
    term_deadline_s: float = 30.0
    poll_s: float = 0.5

    def __post_init__(self) -> None:
        whole = dict.fromkeys(("restarts_max", "probe_failures_max"), within(WHOLE, 0))
        check({**dict.fromkeys(vars(self), within(NUMBER, 0)), **whole, "watch": TEXT}, vars(self))

    def pause_s(self, row: int) -> float:
        """How long to wait before the `row`-th restart in a row."""
        return min(self.backoff_max_s, self.backoff_s * 2.0 ** min(row - 1, _DOUBLINGS_MAX))


class LookClock:
    """Time as an observer lives through it: between two calls at most `gap_max_s`, whatever the clock says.

    Who stood still as long as the others has not heard them be silent.
    """

    def __init__(self, clock_s: Callable[[], float], gap_max_s: float) -> None:
        self._clock_s, self._gap_max_s = clock_s, gap_max_s
        self._last_s, self._lived_s = clock_s(), 0.0

    def __call__(self) -> float:
        now_s = self._clock_s()
        self._lived_s += min(max(now_s - self._last_s, 0.0), self._gap_max_s)
        self._last_s = now_s
        return self._lived_s


class Silence:
    """Whether a process that beats has been silent for too long. Pure: times are arguments."""

    def __init__(self, min_s: float, factor: float) -> None:
        self._min_s, self._factor = min_s, factor
        self._counters: dict[str, int] = {}
        self._news_s = self._step_s = self._quiet_s = 0.0
        self._slowest_s = 0.0
        self.step = -1

    def see(self, beats: Mapping[str, Beat], now_s: float) -> None:
        """Its last beats by file; a process may have several, an engine's and its own. None: it is not missed."""
        news = [beat for key, beat in beats.items() if self._counters.get(key) != beat.counter]
        for beat in news:
            if beat.step > self.step:
                if self.step >= 0:
                    self._slowest_s = max(self._slowest_s, now_s - self._step_s)
                self.step, self._step_s = beat.step, now_s
        if news:
            self._news_s, self._quiet_s = now_s, max(beat.quiet_s for beat in news)
        self._counters = {key: beat.counter for key, beat in beats.items()}

    def limit_s(self) -> float:
        """How long it may be silent now."""
        return max(self._min_s, self._factor * self._slowest_s, self._quiet_s)

    def is_silent(self, now_s: float) -> bool:
        is_expected = self.step >= 0 and bool(self._counters)
        return is_expected and now_s - self._news_s > self.limit_s()


@dataclass
class Status:
    """How a supervised command is; read by the health server while it runs.

    Attributes:
        step: the furthest that this life told of; -1 before the first.
        failed_saves, postponed_saves: over all lives.
    """

    is_running: bool = False
    pid: int = 0
    restart_count: int = 0
    step: int = -1
    phase: str = ""
    failed_saves: int = 0
    postponed_saves: int = 0
    probe_failures: int = 0
    last_failure: FailureInfo | None = None


class Supervisor:
    """Runs one command until it ends well, or cannot be kept alive.

    Args:
        command: its words; no shell is involved.
        settings: how patient to be.
        probe: called every `probe_period_s`; false, or any error, is a failure. See `command_probe`.
        environment: of the child; None for this process's.
        tell: called with a line of text for each thing that happens.
        progress: asked after each failure; another answer than the last time, None aside, is progress too. For commands
            that do not beat; see `newest_snapshot`.
        oom_kills: how many processes the kernel killed for memory so far; None when it does not tell.
    """

    @checked(
        command=TEXTS,
        settings=maybe(Settings),
        probe=maybe(FUNCTION),
        environment=maybe(MAPPING),
        tell=FUNCTION,
        progress=FUNCTION,
        oom_kills=FUNCTION,
        system=maybe(System),
    )
    def __init__(
        self,
        command: Sequence[str],
        *,
        settings: Settings | None = None,
        probe: Callable[[], bool] | None = None,
        environment: Mapping[str, str] | None = None,
        tell: Callable[[str], None] = lambda text: None,
        progress: Callable[[], str | None] = lambda: None,
        oom_kills: Callable[[], int | None] = oom_kill_count,
        system: System | None = None,
    ) -> None:
        if not command:
            raise InvalidInputError("there is no command to run. Give one after `--`.")
        self.status = Status()
        self._command = list(command)
        self._settings = settings or Settings()
        self._probe = probe
        self._environment = dict(os.environ if environment is None else environment)
        self._tell = tell
        self._progress = progress
        self._oom_kills = oom_kills
        self._now_s = (system or System()).monotonic_s
        self._is_ending = threading.Event()
        self._judging = threading.Lock()
        self._is_patient = False

    def be_patient(self, is_patient: bool) -> None:
        """Whether silence is waited out rather than judged, from now on. Any thread.

        For who makes a process stand still on purpose. What was decided before shows in `status.is_running`.
        """
        with self._judging:
            self._is_patient = is_patient

    def end(self) -> None:
        """Ask for the end: the child gets SIGTERM and its deadline, and is not started again. Safe in a handler."""
        self._is_ending.set()

    def run(self) -> int:
        """Keep the command alive until it ends. Returns its exit code, or 128 + the signal that ended it.

        Raises:
            InvalidInputError: the command cannot be started, not even once.
        """
        with Guard(self._settings.term_deadline_s) as guard:
            return self._run(guard)

    def _run(self, guard: Guard) -> int:
        row, best_step, newest = 0, -1, None
        while True:
            code, failure = self._run_once(self.status.restart_count, guard)
            if failure is None or self._is_ending.is_set():
                return code
            self.status.last_failure = failure
            if self.status.phase == FENCED:
                self._tell("another learner has recovered this run: not started again. `casckpt log` says who")
                return code or GAVE_UP
            before, newest = newest, self._progress() or newest
            row = 1 if self.status.step > best_step or newest != before else row + 1
            best_step = max(best_step, self.status.step)
            if row > self._settings.restarts_max:
                beyond = f" beyond {best_step}" if best_step >= 0 else ""
                self._tell(f"gave up: {row - 1} restarts in a row without a step{beyond}. See `casckpt plan`")
                return code or GAVE_UP
            pause_s = self._settings.pause_s(row)
            self._tell(f"{failure.kind}: {failure.message}; starts again in {pause_s:g} s")
            if self._is_ending.wait(pause_s):
                return code
            self.status.restart_count += 1

    def _run_once(self, attempt: int, guard: Guard) -> tuple[int, FailureInfo | None]:
        """One life of the command: its exit code, and how it failed, if it did."""
        kills_before, saves_before = self._oom_kills(), (self.status.failed_saves, self.status.postponed_saves)
        silence = Silence(self._settings.silence_min_s, self._settings.silence_factor)
        self.status.step, self.status.phase, self.status.probe_failures = -1, "", 0
        with contextlib.ExitStack() as stack:
            try:
                temporary = tempfile.TemporaryDirectory(prefix="casckpt-beats-", ignore_cleanup_errors=True)
                folder = stack.enter_context(temporary)
                child = self._start(attempt, folder)
            except OSError as error:
                message = f"{shlex.join(self._command)}: cannot be started: {error.strerror}. Check its first word."
                if attempt == 0:
                    raise InvalidInputError(message, command=self._command) from error
                return _CANNOT_START, FailureInfo("exception", self._last_step(), message)  # it could, before
            guard.watch(child.pid)
            self.status.pid, self.status.is_running = child.pid, True
            try:
                reason = self._watch(child, silence, BeatFolder(folder), saves_before)
            finally:
                self._end_child(child)
                self.status.is_running = False
                guard.watch(0)
        code = child.returncode if child.returncode >= 0 else 128 - child.returncode
        return code, self._failure(child.returncode, reason, kills_before, self._last_step())

    def _start(self, attempt: int, folder: str) -> subprocess.Popen[bytes]:
        environment = {**self._environment, FOLDER: folder, ATTEMPT: str(attempt)}
        if self.status.last_failure is not None:
            environment[FAILURE] = msgspec.json.encode(self.status.last_failure).decode()
        return subprocess.Popen(self._command, env=environment, start_new_session=True)

    def _last_step(self) -> int | None:
        """The last step that this life told of; where it told of none, the one of the life before."""
        if self.status.step >= 0:
            return self.status.step
        return None if self.status.last_failure is None else self.status.last_failure.step

    def _watch(
        self, child: subprocess.Popen[bytes], silence: Silence, beats: BeatFolder, saves_before: tuple[int, int]
    ) -> str:
        """Wait until it ends, or must be ended: then why, in words."""
        settings = self._settings
        lived_s = LookClock(self._now_s, max(2 * settings.poll_s, settings.silence_min_s / 4))
        probed_s = lived_s()
        while not self._is_ending.is_set():
            try:
                child.wait(settings.poll_s)
                self._see(silence, beats, saves_before, lived_s())  # the last beat says how far it came
                return ""
            except subprocess.TimeoutExpired:
                self._see(silence, beats, saves_before, lived_s())
            now_s = lived_s()
            with self._judging:
                if silence.is_silent(now_s) and not self._is_patient:
                    self.status.is_running = False
                    return f"silent for more than {silence.limit_s():.3g} s after step {silence.step}"
            if self._probe is not None and now_s - probed_s >= settings.probe_period_s:
                probed_s = now_s
                self.status.probe_failures = 0 if self._is_well(self._probe) else self.status.probe_failures + 1
                if self.status.probe_failures >= settings.probe_failures_max:
                    return f"{self.status.probe_failures} health probes failed in a row"
        return ""

    def _is_well(self, probe: Callable[[], bool]) -> bool:
        try:
            return probe()
        except Exception as error:  # noqa: BLE001 - a function of the user's; who cannot be asked is not well
            self._tell(f"the health probe failed: {type(error).__name__}: {error}")
            return False

    def _see(self, silence: Silence, beats: BeatFolder, saves_before: tuple[int, int], now_s: float) -> None:
        watched: dict[str, Beat] = {}
        with contextlib.suppress(StorageError, FileNotFoundError):  # somebody cleaned up the folder: nothing is missed
            pulses = beats.look().items()
            watched = {key: each.beat for key, each in pulses if each.beat.name == self._settings.watch}
        silence.see(watched, now_s)
        self.status.step = silence.step
        for beat in watched.values():
            self.status.phase = beat.phase
        newest = max((beat.generation for beat in watched.values()), default=0)
        if any(beat.phase == FENCED and beat.generation >= newest for beat in watched.values()):
            self.status.phase = FENCED  # and no other handle of the process has recovered the run since
        failed = saves_before[0] + sum(beat.failed_saves for beat in watched.values())
        postponed = saves_before[1] + sum(beat.postponed_saves for beat in watched.values())
        self.status.failed_saves = max(self.status.failed_saves, failed)
        self.status.postponed_saves = max(self.status.postponed_saves, postponed)

    def _end_child(self, child: subprocess.Popen[bytes]) -> None:
        """End it if it runs: SIGTERM, at the deadline SIGKILL. When it failed, what is left of its group goes too."""
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(self._settings.term_deadline_s)
            except subprocess.TimeoutExpired:
                self._tell(f"did not end within {self._settings.term_deadline_s:g} s of SIGTERM: killed")
                child.kill()
                child.wait()
        if child.returncode != 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)

    def _failure(self, code: int, reason: str, kills_before: int | None, step: int | None) -> FailureInfo | None:
        if code == 0 and not reason:
            return None
        kills = self._oom_kills()
        text = reason or (f"ended by signal {-code}" if code < 0 else f"exit code {code}")
        if kills is not None and kills_before is not None and kills > kills_before:
            message = f"{text}; the kernel killed {kills - kills_before} of its cgroup for memory meanwhile"
            return FailureInfo("oom-kill", step, message)
        if reason:
            return FailureInfo("hang", step, reason)
        if self.status.phase == FENCED:
            return FailureInfo("lost-head", step, f"{text}; it was fenced")
        if code in _KILLED:
            why = (
                "as by the kernel when memory is out"
                if kills is None
                else "though its cgroup counts no kill for memory"
            )
            return FailureInfo("oom-kill", step, f"killed by SIGKILL, {why}")
        if code in _TERMINATED:
            return FailureInfo("eviction", step, "ended by SIGTERM")
        return FailureInfo("exception", step, text)


@checked(command=TEXT, timeout_s=NUMBER)
def command_probe(command: str, *, timeout_s: float = 10.0) -> Callable[[], bool]:
    """A probe that runs a command, without a shell: exit code 0 within the time is health."""
    words = shlex.split(command)
    if not words:
        raise InvalidInputError("the probe has no command. Give one such as 'python probe.py'.")

    def probe() -> bool:
        try:
            return subprocess.run(words, timeout=timeout_s, stdout=subprocess.DEVNULL, check=False).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    return probe


# --- the child's side ---


@checked(environment=MAPPING)
def last_failure(environment: Mapping[str, str] = os.environ) -> FailureInfo | None:
    """How the process before this one ended, as its supervisor says; None without one, or at the first start.

    Raises:
        InvalidInputError: CASCKPT_FAILURE holds something else.
    """
    text = environment.get(FAILURE)
    if text is None:
        return None
    try:
        found: dict[str, Any] = msgspec.json.decode(text)
        return FailureInfo(found["kind"], found["step"], found["message"])
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise InvalidInputError(f"{FAILURE}={text!r:.100}: expected what `casckpt run` sets. Unset it.") from error
