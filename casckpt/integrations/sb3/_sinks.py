"""Where a training is committed to: a store, or an engine with strategies of its own for each component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from casckpt.engine.engine import CheckpointEngine
from casckpt.engine.strategy import SaveStrategy
from casckpt.errors import InvalidInputError
from casckpt.store.store import Store
from casckpt.store.values import RestoreReport


class StoreSink:
    """Commits every component whenever a multiple of `every_steps` was passed.

    Args:
        store: open for writing; the caller closes it.
        every_steps: environment steps.
        async_mode: return after a copy in memory; failures surface at the next save or at the end.
        necessity: by component, what is not "exact".
    """

    def __init__(
        self, store: Store, *, every_steps: int | None, async_mode: bool | None, necessity: Mapping[str, str]
    ) -> None:
        if every_steps is None:
            raise InvalidInputError("every_steps: expected how many environment steps lie between two commits")
        SaveStrategy(every_steps=every_steps)  # refuses what is no such number
        self._every_steps = every_steps
        self.store = store
        self._commit = store.commit if async_mode is False else store.commit_async
        self._necessity = necessity

    def bind(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def offer(self, step: int, saved_step: int, **about: Any) -> bool:
        """Save if it is time; whether it was."""
        is_due = step // self._every_steps > saved_step // self._every_steps
        if is_due:
            self._commit(step, self._state, necessity=self._necessity, **about)
        return is_due

    def finish(self, step: int | None, **about: Any) -> None:
        """Save a last time, unless `step` is None, and wait until everything is durable.

        Raises:
            SaveFailedError: something was not.
        """
        if step is not None:
            self._commit(step, self._state, necessity=self._necessity, **about)
        self.store.wait()

    def resume(self, ref: Any, branch: str | None) -> RestoreReport:
        return self.store.resume_into(self._state, ref, branch=branch)


class EngineSink:
    """Registers the components with an engine and tells it the boundaries; the engine decides what is saved there.

    Args:
        engine: the caller closes it. Components that its config names are saved as it says.
        every_steps: environment steps between saves of the others; None for only with what else is due.
        async_mode: belongs to the engine and must be None.
        necessity: by component, what is not "exact".

    Labels go into the config of a snapshot, since the engine's steps have none.
    """

    def __init__(
        self,
        engine: CheckpointEngine,
        *,
        every_steps: int | None,
        async_mode: bool | None,
        necessity: Mapping[str, str],
    ) -> None:
        if async_mode is not None:
            raise InvalidInputError("async_mode= is a setting of the engine: `CheckpointEngine(store, async_mode=...)`")
        self.store = engine.store
        self._engine = engine
        self._every_steps = every_steps
        self._necessity = necessity
        self._config = dict(engine.training_config or {})
        self._names: list[str] = []

    def bind(self, state: Mapping[str, Any]) -> None:
        for name in self._names:  # whose state was elsewhere
            self._engine.drop(name)
        self._names = list(state)
        for name, part in state.items():
            strategy = SaveStrategy(every_steps=self._every_steps, necessity=self._necessity.get(name, "exact"))
            self._engine.register(name, part, None if name in self._engine.config.components else strategy)

    def offer(self, step: int, saved_step: int, *, metrics: Any, labels: Any, config: Any) -> bool:
        """Tell a boundary; whether something was saved there. The engine counts by itself."""
        self._describe(labels, config)
        return self._engine.step(step, metrics) is not None

    def finish(self, step: int | None, *, metrics: Any, labels: Any, config: Any) -> None:
        """As `StoreSink.finish`."""
        self._describe(labels, config)
        if step is not None:
            self._engine.save(step, async_mode=False, metrics=metrics, labels=labels)
        self._engine.wait()

    def resume(self, ref: Any, branch: str | None) -> RestoreReport:
        return self._engine.restore(-1 if ref == "latest" else ref, branch=branch)

    def _describe(self, labels: Mapping[str, str], config: Mapping[str, Any]) -> None:
        self._engine.training_config = {**self._config, **config, **({"labels": dict(labels)} if labels else {})}
