"""Heartbeats: who of a training is alive, told by counters, never by comparing clocks.

Each process has a file in a folder that all can see, and writes into it how far it is: a counter that every beat
raises, its generation, step and phase. An observer calls it dead when the counter has stood still for `timeout_s` of
the observer's *own* monotonic clock, or at once when the process is gone from this machine. For hosts that share no
folder, the same beats go over HTTP (`beat_server`).

This is the run's own state: nothing of it is part of the store, and nothing is synced. A beat that is read while it is
written counts as no news.

Under a supervisor (`casckpt run`) the environment names the folder; an engine then beats by itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Protocol

import msgspec

from casckpt.arguments import MAPPING, NUMBER, TEXT, WHOLE, checked, maybe
from casckpt.digest import check16
from casckpt.errors import StorageError, cut
from casckpt.limits import BEAT_PERIOD_S, BEAT_TIMEOUT_S
from casckpt.storage.fs import read_file
from casckpt.storage.process import System, owner_of
from casckpt.store.catalog import check_name
from casckpt.store.generations import own_generation
from casckpt.store.store import Store

_fences: dict[tuple[int, str, str], Fence] = {}  # by process, store and run
FENCED = "fenced"  # the phase of a process whose run somebody else has recovered
FOLDER = "CASCKPT_BEATS"  # in the environment: where a supervisor looks for beats
_SIZE = 1024  # of a file, padded, so that a beat is one write
_PHASE_LENGTH_MAX = 100  # characters, of four bytes at most; with a name of 200 bytes a beat is smaller than its file
_FOR_EVER_S = 1e9
_SUPERVISED_PERIOD_S = 1.0  # here a beat costs a write into a page; the step that a failure names is then nearly true


class Beat(msgspec.Struct, frozen=True):
    """What a process says of itself.

    Attributes:
        phase: for people: "training", "saving"; FENCED when it may not commit any more.
        failed_saves, postponed_saves: how many of its saves failed, or had to wait for the budget.
        quiet_s: how long nothing may be heard of it from now on, for a phase that is known to be long.
    """

    name: str
    counter: int
    generation: int = 0
    step: int = -1
    phase: str = ""
    failed_saves: int = 0
    quiet_s: float = 0.0
    postponed_saves: int = 0


def said(
    name: str,
    counter: int,
    step: int,
    generation: int,
    phase: str,
    *,
    failed_saves: int = 0,
    postponed_saves: int = 0,
    quiet_s: float = 0.0,
) -> Beat:
    """A beat that can be written, whatever kind of numbers and text the training has; a phase is cut and printable."""
    plain = "".join(each if each.isprintable() else "?" for each in cut(phase, _PHASE_LENGTH_MAX))
    return Beat(name, counter, index(generation), index(step), plain, failed_saves, float(quiet_s), postponed_saves)


@dataclass(frozen=True)
class Pulse:
    """A process as an observer sees it: its last beat, how long ago that was news, and whether it counts as alive."""

    beat: Beat
    still_s: float
    is_alive: bool


class Liveness:
    """Judges counters by the observer's clock; knows nothing of files or sockets."""

    def __init__(self, *, timeout_s: float = BEAT_TIMEOUT_S, system: System | None = None) -> None:
        self._timeout_s = timeout_s
        self._now_s = (system or System()).monotonic_s
        self._seen: dict[str, tuple[Beat, float]] = {}

    def see(self, key: str, beat: Beat) -> None:
        """A beat arrived, or was read; one that says nothing new changes nothing."""
        known = self._seen.get(key)
        if known is None or known[0].counter != beat.counter:
            self._seen[key] = beat, self._now_s()

    def forget(self, key: str) -> None:
        self._seen.pop(key, None)

    def pulses(self, gone: set[str] | None = None) -> dict[str, Pulse]:
        """Everybody who was ever seen; those whose keys are in `gone` are dead whatever their counter says."""
        now_s = self._now_s()
        return {
            key: Pulse(beat, now_s - since_s, now_s - since_s < self._timeout_s and key not in (gone or ()))
            for key, (beat, since_s) in self._seen.items()
        }


class BeatFile:
    """The writer's side. One per process and name; made again in a forked child. Thread-safe.

    Args:
        folder: that the observers read; made when it is not there.
        name: of this process in the training: "learner", "actor-3".
        period_s: how often `beat` writes at most, whenever it is called; the first step, and a change of phase,
            generation or failures, are written at once.
    """

    @checked(folder=TEXT, name=TEXT, period_s=NUMBER, system=maybe(System))
    def __init__(
        self, folder: str, name: str, *, period_s: float = BEAT_PERIOD_S, system: System | None = None
    ) -> None:
        self._system = system or System()
        self._period_s = period_s
        fs = self._system.file_system
        fs.make_folder(folder)
        identity = self._system.lease_path("").rpartition("/")[2]
        self._path = f"{folder}/{check_name(name, 'process')}@{identity}"
        self._file = fs.create(self._path)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._last = Beat(name, 0)
        self._write_s = self._system.monotonic_s()
        self._write()

    @checked(step=WHOLE, generation=WHOLE, phase=TEXT, failed_saves=WHOLE, postponed_saves=WHOLE, quiet_s=NUMBER)
    def beat(
        self,
        step: int = -1,
        *,
        generation: int = 0,
        phase: str = "",
        failed_saves: int = 0,
        postponed_saves: int = 0,
        quiet_s: float = 0.0,
    ) -> None:
        """Say that this process is alive, and how far it is; see `Beat`. Cheap: call it in every turn of the loop.

        Raises:
            StorageError: the beat could not be written.
        """
        counts = {"failed_saves": failed_saves, "postponed_saves": postponed_saves}
        self._say(said(self._last.name, 0, step, generation, phase, **counts, quiet_s=quiet_s))

    def pulse(self) -> None:
        """Say that it is alive, and what it said last: something long goes on.

        Raises:
            StorageError: the beat could not be written.
        """
        self._say(None)

    def _say(self, said: Beat | None) -> None:
        """Write it if it is news or the period is over; None: what was said last."""
        if os.getpid() != self._pid:
            return
        now_s = self._system.monotonic_s()
        with self._lock:
            said = said or self._last
            is_first = self._last.step < 0 <= said.step  # from here on it is missed: that must be known at once
            passing = {"counter": said.counter, "step": said.step, "postponed_saves": said.postponed_saves}
            known = msgspec.structs.replace(self._last, **passing)
            if is_first or said != known or now_s - self._write_s >= self._period_s:
                self._write_s = now_s
                self._last = msgspec.structs.replace(said, counter=self._last.counter + 1)
                self._write()

    def _write(self) -> None:
        body = msgspec.json.encode(self._last)
        self._file.write([(check16(body) + body).ljust(_SIZE, b"\0")], 0)

    def close(self) -> None:
        """Say good-bye: the file goes, and nobody is missed."""
        with contextlib.suppress(StorageError, FileNotFoundError):
            self._system.file_system.unlink(self._path)
        self._file.close()

    def leave(self) -> None:
        """Say good-bye and let what was said last stand, for a supervisor who asks how far this process came."""
        phase = self._last.phase if self._last.phase == FENCED else "closed"
        self._say(msgspec.structs.replace(self._last, phase=phase, quiet_s=_FOR_EVER_S))
        self._file.close()


@checked(name=TEXT, environment=MAPPING)
def supervised_beats(name: str = "learner", environment: Mapping[str, str] = os.environ) -> BeatFile | None:
    """Where this process says that it is alive: call `beat(step)` in every turn, and `leave()` after the last one, for
    what comes then may take any time. None without a supervisor.

    A `CheckpointEngine` makes one by itself.
    """
    folder = environment.get(FOLDER)
    return None if not folder else BeatFile(folder, name, period_s=_SUPERVISED_PERIOD_S)


class Speaker(Protocol):
    """Who beats for a run anyway."""

    def say(self) -> None:
        """Say anew what there is to say."""


class Fence:
    """What this process says of being fenced from one run of a store, whichever of its handles hears of it: through the
    engines that speak of that run, else in a file of its own. Thread-safe.

    Attributes:
        is_told: from a `FencedError` on, until any handle of this process has recovered the run.
        speakers: engines that are open; a plain set, which a copy is made of at once, whoever comes or goes.
    """

    def __init__(self) -> None:
        self.is_told = False
        self.speakers: set[weakref.ref[Speaker]] = set()
        self._generation = 0
        self._file: BeatFile | None = None
        self._lock = threading.RLock()

    def tell(self, store: Store, is_fenced: bool) -> None:
        """A handle was fenced, or has recovered its run."""
        generation = own_generation(store)
        with self._lock:
            if is_fenced == self.is_told or generation < self._generation:
                return  # known, or it was another handle of this process that recovered the run since
            self.is_told, self._generation = is_fenced, generation
            for reference in list(self.speakers):
                speaker = reference()
                if speaker is not None:
                    speaker.say()
            if self._file is not None or not self.speakers:
                with contextlib.suppress(StorageError, FileNotFoundError):
                    self._say()

    def _say(self) -> None:
        self._file = self._file or supervised_beats()
        if self._file is not None:
            self._file.beat(generation=self._generation, phase=FENCED if self.is_told else "")
        if self._file is not None and not self.is_told:
            self._file._file.close()  # what was said last stands
            self._file = None


def fence_of(store: Store) -> Fence:
    """The one of this process for the run of a handle."""
    return _fences.setdefault((os.getpid(), store.path, store.run), Fence())


def tell_when_fenced(store: Store) -> None:
    """Have the supervisor told when a handle is fenced, and when any handle of this process recovers its run; nothing
    without one.

    Else two supervisors of one run would recover it in turns, each fencing the learner of the other. An engine does so
    by itself.
    """
    store.on_fenced = lambda is_fenced: fence_of(store).tell(store, is_fenced)


class BeatFolder:
    """The observer's side of a folder of beats."""

    @checked(folder=TEXT, timeout_s=NUMBER, system=maybe(System))
    def __init__(self, folder: str, *, timeout_s: float = BEAT_TIMEOUT_S, system: System | None = None) -> None:
        self._folder = folder
        self._system = system or System()
        self._liveness = Liveness(timeout_s=timeout_s, system=self._system)

    def look(self) -> dict[str, Pulse]:
        """Everybody by file name. Who closed its file is not there; who died is, as dead.

        Raises:
            StorageError: the folder cannot be read now.
        """
        fs = self._system.file_system
        names = fs.list(self._folder)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                beat = decode_beat(read_file(fs, f"{self._folder}/{name}", _SIZE))
                if beat is not None:
                    self._liveness.see(name, beat)
        for name in set(self._liveness.pulses()) - set(names):
            self._liveness.forget(name)
        return self._liveness.pulses({name for name in names if owner_of(name.rpartition("@")[2])[1] == "dead"})


def decode_beat(content: bytes) -> Beat | None:
    """The beat in a file; None when it is half written, or no beat."""
    check, body = content[:16], content[16:].rstrip(b"\0")
    if check16(body) != check:
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(body, type=Beat)
    return None
