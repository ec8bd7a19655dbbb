"""Who may train on what after a recovery, and which items of a queue are still to be done."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.recovery import Frontier, SampleGate, SampleHold, Version
from tests.unit.stores import open_store


@pytest.mark.parametrize("behind", [0, 1, 299, 300, 301, 1000])
@pytest.mark.parametrize("behind_max", [0, 300])
def test_samples_of_the_own_generation_are_admitted_up_to_the_bound(behind: int, behind_max: int) -> None:
    gate = SampleGate(Version(2, 1000), behind_max=behind_max)
    assert (gate.admit(Version(2, 1000 - behind)) == "") is (behind <= behind_max)
    assert gate.admitted_count + gate.refused_count == 1


@pytest.mark.parametrize("generation", [0, 1, 3])
@pytest.mark.parametrize("step", [0, 999, 1000, 1001])
def test_samples_of_other_generations_are_refused_whatever_their_step(generation: int, step: int) -> None:
    gate = SampleGate(Version(2, 1000))
    assert f"generation {generation}" in gate.admit(Version(generation, step))
    assert (gate.admitted_count, gate.refused_count) == (0, 1)


def test_sample_from_a_step_that_the_learner_has_not_reached_is_refused() -> None:
    gate = SampleGate(Version(1, 500))
    assert "left" in gate.admit(Version(1, 501))
    gate.advance(501)
    assert gate.admit(Version(1, 501)) == ""
    with pytest.raises(casckpt.InvalidInputError):
        gate.advance(500)


def test_actor_holds_samples_until_it_knows_the_version_and_drops_those_of_the_line_that_was_left() -> None:
    hold: SampleHold[str] = SampleHold(10)
    with pytest.raises(casckpt.InvalidInputError, match="no policy"):
        hold.add("too early")
    hold.learn(Version(0, 900))
    hold.add("sent")
    assert hold.take() == [(Version(0, 900), "sent")]
    hold.lose()
    hold.add("made while cut off")
    assert hold.take() == []
    hold.learn(Version(0, 905))  # the learner was only slow
    assert hold.take() == [(Version(0, 900), "made while cut off")]
    hold.lose()
    hold.add("stale")
    hold.learn(Version(1, 500))  # it was recovered from an older step
    assert (hold.take(), hold.dropped_count) == ([], 1)
    hold.add("fresh")
    assert hold.take() == [(Version(1, 500), "fresh")]
    with pytest.raises(casckpt.FencedError, match="generation 0"):
        hold.learn(Version(0, 910))


def test_actor_that_is_cut_off_for_long_keeps_its_newest_samples() -> None:
    hold: SampleHold[int] = SampleHold(3)
    hold.learn(Version(0, 0))
    hold.lose()
    for number in range(8):
        hold.add(number)
    assert (len(hold), hold.dropped_count) == (3, 5)
    hold.learn(Version(0, 1))
    assert [sample for _, sample in hold.take()] == [5, 6, 7]


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(8))
def test_each_item_is_trained_exactly_once_across_kills(tmp_path: Path, seed: int) -> None:
    """Workers die with items in hand, the learner is killed between commits; the oracle is what is in the weights."""
    chance = random.Random(seed)
    frontier, weights = Frontier(), {"trained": [], "dropped": []}
    with open_store(tmp_path / "store") as store:
        state: dict[str, Any] = {"frontier": frontier, "weights": weights}
        store.commit(0, state)
        in_hand: list[int] = []
        for step in range(1, 60):
            in_hand += frontier.take(chance.randrange(4))
            chance.shuffle(in_hand)
            batch = [in_hand.pop() for _ in range(chance.randrange(len(in_hand) + 1))]
            lost = [item for item in batch if chance.random() < 0.1]
            frontier.drop(lost)
            frontier.train(item for item in batch if item not in lost)
            weights["trained"] += [item for item in batch if item not in lost]
            weights["dropped"] += lost
            if chance.random() < 0.4:
                store.commit(step, state)
            if chance.random() < 0.15:  # killed: whoever holds an item forgets it too
                store.resume_into(state)
                in_hand = []
        rest = [*in_hand, *frontier.take(len([item for item in frontier.open if item not in in_hand]))]
        frontier.train(rest)
        weights["trained"] += rest
    settled = sorted(weights["trained"] + weights["dropped"])
    assert settled == list(range(len(settled)))
    assert frontier.trained_count == len(weights["trained"])
    assert frontier.open == []
    assert frontier.dropped == sorted(weights["dropped"])


def test_late_result_of_a_settled_item_is_refused_and_settles_nothing() -> None:
    frontier = Frontier()
    assert frontier.take(3) == [0, 1, 2]
    frontier.train([1])
    for items in ([1], [0, 1], [7], [0, 0]):
        with pytest.raises(casckpt.NotFoundError, match="not open"):
            frontier.train(items)
    assert frontier.open == [0, 2]
    assert (frontier.is_trained(1), frontier.is_trained(0), frontier.is_trained(9)) == (True, False, False)
    with pytest.raises(casckpt.InvalidInputError, match="count=-1"):
        frontier.take(-1)  # it would hand numbers out a second time
    again = Frontier()
    again.load_state_dict(frontier.state_dict())
    assert again.take(3) == [0, 2, 3]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"frames": 3, "episodes": 1},
        {"next": 3, "open": [1]},
        {"next": "3", "open": [1], "dropped": []},
        {"next": 3, "open": 1, "dropped": []},
        {"next": 3, "open": ["1"], "dropped": []},
        {"next": 3, "open": [3], "dropped": []},
        {"next": 3, "open": [-1], "dropped": []},
        {"next": 3, "open": [1], "dropped": [1]},
    ],
)
def test_state_of_something_else_is_refused_and_changes_no_frontier(state: dict[str, Any]) -> None:
    frontier = Frontier()
    frontier.train(frontier.take(2)[:1])
    with pytest.raises(casckpt.InvalidInputError, match=r"state=.*Frontier"):
        frontier.load_state_dict(state)
    assert frontier.state_dict() == {"next": 2, "open": [1], "dropped": []}


def test_sample_counts_as_made_by_the_policy_that_it_was_begun_with() -> None:
    """The actor hears of another version, and takes it over, while it plays."""
    hold: SampleHold[str] = SampleHold(10)
    gate = SampleGate(Version(1, 900), behind_max=300)
    hold.learn(Version(0, 500))
    begun = hold.version
    hold.learn(Version(0, 900))
    hold.add("long", made_by=begun)
    hold.add("short")
    assert hold.take() == [(Version(0, 500), "long"), (Version(0, 900), "short")]
    hold.learn(gate.version)  # the learner was recovered, and its policy taken over
    hold.add("of the line that was left", made_by=Version(0, 900))
    assert (hold.take(), hold.dropped_count) == ([], 1)
    hold.add("of this line", made_by=Version(1, 700))
    assert [gate.admit(version) for version, _ in hold.take()] == [""]
