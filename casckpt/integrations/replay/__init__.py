"""Replay buffers of frameworks as rings: what a commit stores of them is what is new.

| buffer | adapter | rows by | stored whole |
|---|---|---|---|
| Stable-Baselines3, sb3-contrib: Replay, Dict, NStep, HER | `Sb3Buffer` | `add`, counted | HER: episodes, ends |
| Tianshou: Replay, Prioritized, HER, vectors, Cached | `TianshouBuffer` | calls, counted | priorities, episode |
| TorchRL: any with a tensor storage and a round-robin writer | `TorchRlBuffer` | `_write_count` | priorities |

An adapter gives `Ring` a position, columns that are only appended to, and the rest as *mutable*. Its counter is
believed as long as it keeps in step with the buffer's own place: a buffer that was changed in another way is read anew.

The frameworks are not imported: an adapter uses the buffer that it is given. Samplers draw from the global or their own
generators, which are components of their own (`casckpt.RngState`).
"""

from __future__ import annotations

from typing import Any

from casckpt.errors import InvalidInputError
from casckpt.integrations.replay._sb3 import Sb3Buffer
from casckpt.integrations.replay._tianshou import TianshouBuffer, TianshouShared
from casckpt.integrations.replay._torchrl import TorchRlBuffer
from casckpt.replay import Ring

__all__ = ["Sb3Buffer", "TianshouBuffer", "TorchRlBuffer", "rings"]


def rings(buffer: Any, *, name: str = "replay", trust: str = "counter", **options: Any) -> dict[str, Any]:
    """A buffer as components: one ring, or one for each environment and what they share.

    Args:
        buffer: of Stable-Baselines3, sb3-contrib, Tianshou or TorchRL.
        name: of the component; rings of environments are called `name.0`, `name.1`, …
        trust: as in `Ring`. Adapters count rows, so that "counter" is possible.
        options: others of `Ring`.

    Returns:
        Component name to live object, to be given to a commit or a restore, all together.

    Raises:
        InvalidInputError: not a buffer that is known here, or one that has no row yet.
        UnsupportedStateError: rows of Python objects.
    """
    children = getattr(buffer, "buffers", None)
    if hasattr(buffer, "_add_index"):
        if children is None:
            return {name: Ring(TianshouBuffer(buffer), trust=trust, **options)}
        found: dict[str, Any] = {
            f"{name}.{number}": Ring(TianshouBuffer(child), trust=trust, **options)
            for number, child in enumerate(children)
        }
        return {**found, name: TianshouShared(buffer)}
    if hasattr(buffer, "buffer_size") and hasattr(buffer, "pos"):
        return {name: Ring(Sb3Buffer(buffer), trust=trust, **options)}
    if hasattr(buffer, "_storage") and hasattr(buffer, "_writer"):
        return {name: Ring(TorchRlBuffer(buffer), trust=trust, **options)}
    raise InvalidInputError(
        f"a {type(buffer).__module__}.{type(buffer).__qualname__} is no buffer of Stable-Baselines3, Tianshou or "
        "TorchRL. Wrap it in casckpt.replay.Arrays or Sliced."
    )
