"""An engine's signs of life under a supervisor: its steps, what it announces, and how saves and restores get on.

Without a supervisor there is nothing to say, and nothing is done. A beat that cannot be written is logged once and
never stops a training.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

from casckpt.engine.beats import FENCED, BeatFile, Speaker, fence_of, supervised_beats, tell_when_fenced
from casckpt.engine.saves import Saves
from casckpt.errors import StorageError
from casckpt.store.generations import own_generation
from casckpt.store.store import Store

log = logging.getLogger("casckpt.engine")


class Alive:
    """What one engine says. Reads and writes of its store count as signs of life too, while it is open."""

    def __init__(self, store: Store, saves: Saves) -> None:
        self._store, self._saves = store, saves
        self._file: BeatFile | None = None
        self._step = -1  # before the first step of this process nobody is to miss it, however long restoring takes
        self._fence, self._is_told = fence_of(store), False
        self._reference: weakref.ref[Speaker] = weakref.ref(self, self._fence.speakers.discard)
        self._try(self._open)

    def _open(self) -> None:
        self._file = supervised_beats()
        if self._file is not None:
            self._store.on_progress = self.pulse
            tell_when_fenced(self._store)
            self._fence.speakers.add(self._reference)

    def say(self, *, step: int | None = None, phase: str = "", quiet_s: float = 0.0) -> None:
        """A step, or a phase that begins.

        Args:
            step: None while it is as before.
            phase: for people.
            quiet_s: how long nothing may be heard from now on.
        """
        self._step = self._step if step is None else step
        phase = FENCED if self._fence.is_told else phase  # what a supervisor must know, whoever caught it
        file, saves = self._file, self._saves
        if file is not None:
            self._try(
                lambda: file.beat(
                    self._step,
                    generation=own_generation(self._store),
                    phase=phase,
                    failed_saves=saves.counts.failed,
                    postponed_saves=saves.budget.postponed_count,
                    quiet_s=quiet_s,
                )
            )

    def pulse(self) -> None:
        """Something long goes on. Any thread."""
        if self._file is not None:
            self._try(self._file.pulse)

    def close(self) -> None:
        """Say good-bye: from here on nobody is missed."""
        file, self._file = self._file, None
        if file is not None:
            self._fence.speakers.discard(self._reference)
            self._try(file.leave)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (StorageError, FileNotFoundError) as error:
            if not self._is_told:
                self._is_told = True
                log.warning("the supervisor cannot be told that this training is alive: %s", error)
