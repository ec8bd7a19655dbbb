"""What random streams give next, told from copies: the streams themselves do not move."""

from __future__ import annotations

import random
import sys
from typing import Any

from casckpt.state import rng

_COUNT = 2


def next_draws(target: Any) -> dict[str, tuple[float, ...]]:
    """The next uniform draws of each stream of an `RngState`; nothing for other targets."""
    if not isinstance(target, rng.RngState):
        return {}
    streams: dict[str, Any] = {"python": _python_copy()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        streams["numpy"] = numpy.random.RandomState()
        streams["numpy"].set_state(numpy.random.get_state())
    if torch is not None:
        streams["torch"] = torch.Generator()
        streams["torch"].set_state(torch.get_rng_state())
    for name, generator in target.extra.items():
        kind = rng.kind_of(generator)
        if kind is not None and not kind.startswith("numpy.BitGenerator"):
            streams[name] = rng.make(kind, rng.tree_of(kind, generator))
    return {name: _draw(stream) for name, stream in streams.items()}


def _python_copy() -> random.Random:
    copy = random.Random()
    copy.setstate(random.getstate())
    return copy


def _draw(stream: Any) -> tuple[float, ...]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(stream, torch.Generator):
        return tuple(torch.rand(_COUNT, generator=stream).tolist())
    return tuple(float(stream.random()) for _ in range(_COUNT))
