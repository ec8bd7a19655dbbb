"""What "bit-identical" means here, and where two runs first differ.

A `Claim` names something that several sources must agree on, and what each of them says. Sources differ in kind on
purpose: manifest ids (addresses that the store computed at commit), digests of the live values in the two training
processes, and digests of the values restored from the store by a third process. The digest of a value is computed here,
by a walk that shares no code with the store.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from casckpt import Snapshot
from casckpt.demo._ppo import Ppo
from casckpt.digest import hasher

DRAW_COUNT = 4


@dataclass(frozen=True)
class Claim:
    """`found` maps a source to what it says about `what`; the claim holds if all say the same."""

    what: str
    aspect: str
    found: dict[str, str]

    @property
    def holds(self) -> bool:
        """Whether every source agrees."""
        return len(set(self.found.values())) == 1

    def to_dict(self) -> dict[str, Any]:
        """Plain form for JSON."""
        return {"what": self.what, "aspect": self.aspect, "holds": self.holds, "found": self.found}


def value_digest(value: Any) -> str:
    """blake3 (hex) of a tree of mappings, sequences, tensors, arrays, generators and scalars: kinds, shapes, every bit.

    Raises:
        TypeError: A leaf of another type.
    """
    running = hasher()
    for part in _parts(value):
        running.update(struct.pack("<Q", len(part)))
        running.update(part)
    return str(running.digest().hex())


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Component name to plain values: `state_dict()` of what has one."""
    return {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in state.items()}


def digest_components(state: Mapping[str, Any]) -> dict[str, str]:
    """Component name to digest of its values."""
    return {name: value_digest(part) for name, part in plain_state(state).items()}


def draw_next(ppo: Ppo) -> dict[str, list[float]]:
    """The next numbers of every global stream and of the shuffle generator. Consumes them."""
    return {
        "python": [random.random() for _ in range(DRAW_COUNT)],
        "numpy": np.random.random_sample(DRAW_COUNT).tolist(),
        "shuffle": ppo.shuffle.random(DRAW_COUNT).tolist(),
        "torch": torch.rand(DRAW_COUNT, dtype=torch.float64).tolist(),
    }


def first_divergence(left: Sequence[Snapshot], right: Sequence[Snapshot]) -> str | None:
    """Step and component at which two lines of snapshots first differ by manifest id, or None.

    Snapshots of one step are compared component by component; a step that only one line has is a difference.
    """
    for a, b in zip(left, right, strict=False):
        if a.step != b.step:
            return f"step {a.step} against step {b.step}"
        for name in sorted(a.components.keys() | b.components.keys()):
            if _manifest(a, name) != _manifest(b, name):
                return f"step {a.step}, component {name!r}"
    if len(left) != len(right):
        return f"{len(left)} steps against {len(right)}"
    return None


def _manifest(snapshot: Snapshot, name: str) -> str | None:
    component = snapshot.components.get(name)
    return None if component is None else component.manifest


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray | np.generic):
        yield f"array {value.dtype.str} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, np.random.Generator):
        yield b"generator"
        yield from _parts(value.bit_generator.state)
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key, item in value.items():
            yield from _parts(key)
            yield from _parts(item)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} {len(value)}".encode()
        for item in value:
            yield from _parts(item)
    else:
        yield _scalar(value)


def _scalar(value: Any) -> bytes:
    if isinstance(value, float):
        return b"float " + struct.pack("<d", value)
    if value is None or isinstance(value, bool | int | str | bytes):
        return f"{type(value).__name__} {value!r}".encode()
    raise TypeError(f"no digest is defined for a {type(value).__name__}")
