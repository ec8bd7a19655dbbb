"""Frames are tried as long as they pay: noise costs a trial now and then, and stacks are never passed over for long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from casckpt.codec import best
from casckpt.codec.contract import FRAMES, TRIAL_INTERVAL
from casckpt.codec.frames import frames_of
from casckpt.codec.level import find_level
from casckpt.codec.memory import FAILURES_MAX, Limits, Memory

SHAPE = (4, 20, 20)
LIMITS = Limits(find_level("balanced"), 72)


def encoded(chunk: Any, memory: Memory) -> int:
    plain = memoryview(chunk.reshape(-1))
    return best.encode_best(plain, 1, memory, [], LIMITS, frames_of(SHAPE, 1)).encoded.codec


def test_noise_is_tried_now_and_then_and_stacks_after_it_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, memory, trials = np.random.default_rng(0), Memory(), []
    inner = best.encode_frames
    monkeypatch.setattr(best, "encode_frames", lambda *a, **k: (trials.append(1), inner(*a, **k))[1])
    for _ in range(100):
        assert encoded(rng.integers(0, 256, (20, *SHAPE), dtype=np.uint8), memory) != FRAMES
    assert FAILURES_MAX <= len(trials) <= FAILURES_MAX + 100 // TRIAL_INTERVAL + 1
    frames = rng.integers(0, 256, (23, 20, 20), dtype=np.uint8)
    stacks = np.stack([frames[at : at + 4] for at in range(20)])
    found = [encoded(stacks, memory) for _ in range(TRIAL_INTERVAL + 5)]
    first = found.index(FRAMES)
    assert first < TRIAL_INTERVAL
    assert set(found[first:]) == {FRAMES}
