"""What a leaf remembers of what paid: a form that fails costs itself, never the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from casckpt.codec.best import Base, encode_best
from casckpt.codec.contract import TRIAL_INTERVAL
from casckpt.codec.level import LEVELS, Level
from casckpt.codec.memory import FAILURES_MAX, Limits, Memory
from casckpt.store import components
from tests.unit.stores import open_store

CANDIDATES = ("wrong", "right", "other")


def _tried(memory: Memory) -> list[str]:
    return [CANDIDATES[at] for at in memory.predictions_to_try(CANDIDATES)]


def test_candidate_that_fails_again_and_again_is_left_out_alone_and_comes_back() -> None:
    memory = Memory()
    for _ in range(FAILURES_MAX):
        assert _tried(memory) == list(CANDIDATES)
        memory.learn_predictions(None, 1.0, ["wrong"])
    uses = 0
    while "wrong" not in _tried(memory):
        assert _tried(memory) == ["right", "other"]
        memory.learn_predictions(None, 1.0, [])
        uses += 1
    assert uses == TRIAL_INTERVAL


def test_candidate_that_held_is_tried_alone_until_it_fails_once() -> None:
    memory = Memory()
    memory.learn_predictions("right", 0.01, ["wrong"])
    assert _tried(memory) == ["right"]
    memory.learn_predictions(None, 1.0, ["right"])
    assert _tried(memory) == list(CANDIDATES)


def test_candidate_that_other_candidates_replaced_is_forgotten() -> None:
    memory = Memory()
    memory.learn_predictions("of another tree", 0.01, [])
    assert _tried(memory) == list(CANDIDATES)


@pytest.mark.parametrize(("share", "is_certain"), [(0.49, True), (0.51, False)])
def test_candidate_that_saves_little_does_not_keep_the_others_from_being_tried(share: float, is_certain: bool) -> None:
    memory = Memory()
    memory.learn_predictions("wrong", share, [])
    assert _tried(memory) == (["wrong"] if is_certain else list(CANDIDATES))


def test_candidate_that_once_missed_much_is_not_held_too_costly_for_ever() -> None:
    """What is too costly is not tried, so that nothing else would ever say that it has become cheap again."""
    memory = Memory()
    while not memory.is_trial_due():
        pass
    memory.learn_prediction_cost("right", 14)
    uses = 1
    while memory.prediction_cost("right", 7) > 7:
        assert memory.prediction_cost("right", 7) == 14
        memory.is_trial_due()
        uses += 1
        assert uses <= TRIAL_INTERVAL + 1
    assert uses == TRIAL_INTERVAL + 1


def test_far_base_that_fails_says_nothing_of_the_near_ones_after_it() -> None:
    """A chain that has become too costly ends in a chunk by itself, and the next one starts at once."""
    rng = np.random.default_rng(0)
    chunks = [rng.normal(size=20_000).astype(np.float32)]
    for _ in range(3):
        chunks.append(chunks[-1] * np.float32(1 + 1e-4))
    far = rng.normal(size=20_000).astype(np.float32)
    limits, memory = Limits(LEVELS["balanced"], 100), Memory()

    def base_of(number: int, *bases: Base) -> int | None:
        return encode_best(view(chunks[number]), 4, memory, bases, limits).base

    assert base_of(1, Base(0, lambda: view(chunks[0]))) == 0
    assert base_of(2, Base(99, lambda: view(chunks[1])), Base(0, lambda: view(far), is_far=True)) is None
    assert base_of(3, Base(11, lambda: view(chunks[2]))) == 0


# --- what is shared out among the leaves of a commit ---


def _chunks(*memories: Memory) -> list[Any]:
    return [components._Chunk([], 1 << 20, 4, memory) for memory in memories]


def test_leaf_that_moves_gets_no_more_than_those_that_stand_still_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two equal leaves is frozen with a chain of 60 eighths; the mean is 5 units."""
    monkeypatch.setattr(components, "OPENING_SIZE", 0)
    level = replace(LEVELS["balanced"], cost_max=5.0)
    frozen, moving = Memory(), Memory()
    frozen.learn_cost(60, has_bases=True)
    assert components._limit(level, _chunks(frozen, moving)).cost_max == 80, "alone, it may have what both could"
    moving.learn_cost(0, has_bases=True)
    assert components._limit(level, _chunks(frozen, moving)).cost_max == 80 - 60
    for memory in (frozen, moving):
        memory.learn_cost(60, has_bases=True)
    assert components._limit(level, _chunks(frozen, moving)).cost_max == 40, "both move: half each"


def test_handle_that_resumes_knows_what_its_chunks_cost(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that another handle made is as costly as its own."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=30_000)
    seen: list[list[int]] = []  # for each commit, costs of what wants bases
    limit = components._limit

    def noted(level: Level, chunks: list[Any]) -> Limits:
        seen.append([each.memory.cost for each in chunks if each.memory.wants_bases])
        return limit(level, chunks)

    monkeypatch.setattr(components, "_limit", noted)
    for opened in range(2):
        with open_store(store_path) as store:
            for step in range(3 * opened, 3 * opened + 3):
                x = x * (1 + 1e-12 * rng.normal(size=len(x)))
                store.commit(step, {"a": {"x": x}})
    assert seen[:2] == [[], []], "before there is a difference"
    assert seen[2] and seen[3] and min(seen[3]) > 0


def view(array: np.ndarray) -> memoryview:
    return memoryview(array.view(np.uint8))
