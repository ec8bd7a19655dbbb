"""What an engine did so far, as one screen: saves, what was left out or late, and what the budget made of intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from casckpt.engine.component import Component
from casckpt.engine.saves import Saves
from casckpt.engine.strategy import Layer
from casckpt.store.values import Value


@dataclass(frozen=True)
class LayerReport(Value):
    """Components of one cadence.

    Attributes:
        components: name → step of its last capture.
        every_steps, every_seconds: as configured.
        cost_s: seconds that their last save took, from the call to the commit point.
        interval_s: what the budget leaves as the shortest interval.
        is_lengthened: whether a save waits, or the last one waited, for the budget.
        postponed_count: how many saves had to wait.
    """

    components: Mapping[str, int]
    every_steps: int | None
    every_seconds: float | None
    cost_s: float
    interval_s: float
    is_lengthened: bool
    postponed_count: int

    def __str__(self) -> str:
        steps = f"every {self.every_steps} steps" if self.every_steps else ""
        seconds = f"every {self.every_seconds:g} s" if self.every_seconds else ""
        cadence = " or ".join(filter(None, (steps, seconds))) or "with every save"
        names = ", ".join(f"{name} @ {step}" for name, step in self.components.items())
        line = f"  {cadence}: {names}; last save {self.cost_s:.3g} s"
        if self.is_lengthened:
            line += f"; lengthened to at least {self.interval_s:.3g} s ({self.postponed_count} postponed)"
        return line


@dataclass(frozen=True)
class EngineReport(Value):
    """See `CheckpointEngine.report`.

    Attributes:
        committed_count, failed_count: saves that ended, well or not.
        skipped_count: saves that the overlap policy left out.
        waited_count, wait_s: saves for which the loop waited for earlier ones, and how long.
        under_way: steps being saved.
        layers: components by cadence, most frequent first.
    """

    committed_count: int
    failed_count: int
    skipped_count: int
    waited_count: int
    wait_s: float
    under_way: tuple[int, ...]
    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        head = (
            f"{self.committed_count} saves, {self.failed_count} failed, {self.skipped_count} skipped, "
            f"{self.waited_count} waited for ({self.wait_s:.3g} s)"
        )
        steps = [f"  under way: step {', '.join(map(str, self.under_way))}"] if self.under_way else []
        return "\n".join([head, *steps, *map(str, self.layers)])


def describe(saves: Saves, components: Mapping[str, Component]) -> EngineReport:
    """The report of an engine with these saves and components."""
    counts = saves.counts
    by_layer: dict[Layer, list[Component]] = {}
    for component in components.values():
        by_layer.setdefault(component.strategy.layer, []).append(component)
    return EngineReport(
        counts.committed,
        counts.failed,
        counts.skipped,
        counts.waited,
        counts.wait_s,
        tuple(dict.fromkeys(save.handle.step for save in saves.writing())),
        tuple(_layer(saves, layer, by_layer[layer]) for layer in sorted(by_layer)),
    )


def _layer(saves: Saves, layer: Layer, components: list[Component]) -> LayerReport:
    cost = saves.budget.of(layer)
    strategy = components[0].strategy
    return LayerReport(
        {each.name: each.step for each in components},
        strategy.every_steps,
        strategy.every_seconds,
        cost.cost_s,
        saves.budget.interval_s(layer),
        cost.is_lengthened,
        cost.postponed_count,
    )
