"""Which components a safe point captures: pure decisions about steps, seconds and layers.

Components of equal cadence form a *layer*. When a component is captured, so is every one of a more frequent layer:
otherwise counters of step 400 would lie beside weights of step 450, and no snapshot would be consistent. So the order
of layers matters, and it is that of `every_steps`, with components that only count seconds as the rarest; among
equals, of `every_seconds`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from casckpt.engine.component import Component
from casckpt.engine.strategy import Layer

log = logging.getLogger("casckpt.engine")


def due_layers(components: Iterable[Component], step: int, now_s: float) -> set[Layer]:
    """Layers in which a component is due."""
    return {each.strategy.layer for each in components if each.is_due(step, now_s)}


def with_more_frequent(components: Iterable[Component], layers: Collection[Layer]) -> list[Component]:
    """All components that a capture of these layers takes along; none when there are no layers."""
    rarest = max(layers, default=None)
    return [] if rarest is None else [each for each in components if each.strategy.layer <= rarest]


def tell_if_idle(components: Iterable[Component]) -> None:
    """Say in the log when none of these ever becomes due."""
    if not any(each.strategy.has_cadence for each in components):
        log.warning(
            "no component has a cadence: `step` saves nothing by itself, only `save` and `request_save` do. "
            "Register with SaveStrategy(every_steps=…) or (every_seconds=…) what is to be saved."
        )
