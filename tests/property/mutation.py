"""Mutated forms for decoders: a step between what an encoder writes and random bytes."""

from __future__ import annotations

import random

_STEERED = 0.7  # of the mutations go to the parameters: they steer


def mutate(rng: random.Random, params: bytes, payload: bytes) -> tuple[bytes, bytes]:
    """Change, drop, add or cut bytes of one of the two."""
    is_params = not payload or (bool(params) and rng.random() < _STEERED)
    target = bytearray(params if is_params else payload)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(target) + 1)
        action = rng.randrange(6)
        if action == 0:
            target.insert(at, rng.randrange(256))
        elif action == 1:
            del target[at:]
        elif action == 2:
            del target[at : at + 1]
        elif at < len(target):
            target[at] = rng.choice([0, 1, 0xFF, 0x80, rng.randrange(256)])
    return (bytes(target), payload) if is_params else (params, bytes(target))
