"""The save budget: at most a share of the time may be spent on saving, and what does not fit waits.

A save's cost is what it took from the call to the commit point, on whichever thread: hashing and writing compete with
training for cores and disk. Costs go into a bucket that leaks at `share` seconds per second, so that in the long run no
more than that share is spent. The bucket holds one save of every layer: a large save that has just been made does
not stop the small ones, and is itself due again when the bucket has room for it, which is `cost / share` seconds later
if nothing else was saved. When saves become cheap, what they leave in the bucket is gone sooner, and the interval is
what it was.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from casckpt.engine.strategy import Layer


@dataclass
class LayerCost:
    """What is known of a layer.

    Attributes:
        cost_s: seconds that its last save took.
        is_lengthened: its last save had to wait for the budget, or one is waiting now.
        postponed_count: how many of its saves had to wait.
        is_waiting: one is waiting now.
    """

    cost_s: float = 0.0
    is_lengthened: bool = False
    postponed_count: int = 0
    is_waiting: bool = False


@dataclass
class SaveBudget:
    """One engine's budget; `share` is in seconds of saving per second, None for no bound."""

    share: float | None
    layers: dict[Layer, LayerCost] = field(default_factory=dict)
    _debt_s: float = 0.0
    _at_s: float = 0.0

    def affordable(self, layers: Collection[Layer], now_s: float) -> tuple[set[Layer], set[Layer]]:
        """Of these layers, those that may be saved now, and those that wait from now on for the first time."""
        if self.share is None:
            return set(layers), set()
        room = sum(known.cost_s for known in self.layers.values()) - self._debt(now_s)
        chosen, new = set(), set()
        for layer in sorted(layers, key=lambda each: self.of(each).cost_s):
            known = self.of(layer)
            if known.cost_s <= room + _ROUNDING_S:
                chosen.add(layer)
                room -= known.cost_s
            elif not known.is_waiting:
                known.is_waiting = known.is_lengthened = True
                known.postponed_count += 1
                new.add(layer)
        return chosen, new

    def start(self, layers: Collection[Layer]) -> set[Layer]:
        """Note that these are saved now; returns those whose interval is no longer lengthened."""
        shortened = set()
        for layer in layers:
            known = self.of(layer)
            if known.is_lengthened and not known.is_waiting:
                known.is_lengthened = False
                shortened.add(layer)
            known.is_waiting = False
        return shortened

    def spend(self, cost_s: float, layers: Collection[Layer], now_s: float) -> None:
        """Note what a save of these layers cost. What is not known to go to the others is the rarest's."""
        cost_s = max(0.0, cost_s)
        self._debt_s, self._at_s = self._debt(now_s) + cost_s, now_s
        rarest = max(layers, default=None)
        if rarest is not None:
            others_s = sum(self.of(layer).cost_s for layer in layers if layer != rarest)
            self.of(rarest).cost_s = max(0.0, cost_s - others_s)

    @property
    def postponed_count(self) -> int:
        """How many saves had to wait, of all layers."""
        return sum(known.postponed_count for known in self.layers.values())

    def interval_s(self, layer: Layer) -> float:
        """The shortest interval that the budget leaves a layer."""
        return 0.0 if self.share is None else self.of(layer).cost_s / self.share

    def _debt(self, now_s: float) -> float:
        self._at_s = min(self._at_s, now_s)  # a clock that went back leaks from there on
        return max(0.0, self._debt_s - (self.share or 0.0) * max(0.0, now_s - self._at_s))

    def of(self, layer: Layer) -> LayerCost:
        """What is known of a layer."""
        return self.layers.setdefault(layer, LayerCost())


_ROUNDING_S = 1e-9
