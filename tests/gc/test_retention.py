"""Rules of retention as pure functions: what each one keeps of a line of candidates (G04, G05, G11, G16)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from casckpt_gc import AnyOf, Best, Candidate, Compaction, Limits, Maintenance, Pareto, Retention, Thinning

from casckpt.errors import InvalidInputError


def line(*steps: int, **facts: Any) -> list[Candidate]:
    """Candidates of these steps; a fact is a list with a value for each."""
    return [
        Candidate(id=str(step), step=step, **{name: values[at] for name, values in facts.items()})
        for at, step in enumerate(steps)
    ]


def kept(rule: Retention | AnyOf, candidates: list[Candidate]) -> list[int]:
    return sorted(int(each) for each in rule.kept(candidates))


def rated(*values: Any, name: str = "return") -> list[Candidate]:
    """Steps 1, 2, … with a metric; None: without it."""
    metrics = [{} if value is None else {name: value} for value in values]
    return line(*range(1, len(values) + 1), metrics=metrics)


@pytest.mark.parametrize(("latest", "expected"), [(1, [5]), (2, [4, 5]), (5, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_latest_keeps_the_newest(latest: int, expected: list[int]) -> None:
    assert kept(Retention(latest=latest), line(1, 2, 3, 4, 5)) == expected


def test_consistent_snapshots_count_and_mixed_ones_newer_than_the_newest_of_them_stay() -> None:
    candidates = line(1, 2, 3, 4, 5, 6, is_consistent=[True, False, True, False, True, False])
    assert kept(Retention(latest=2), candidates) == [3, 5, 6]


def test_damaged_snapshots_do_not_count_as_the_newest_whole_one() -> None:
    candidates = line(1, 2, 3, 4, is_whole=[True, True, False, False])
    assert kept(Retention(latest=1), candidates) == [2, 3, 4]


def test_without_a_whole_consistent_snapshot_all_stay() -> None:
    assert kept(Retention(latest=1), line(1, 2, 3, is_whole=[False] * 3)) == [1, 2, 3]
    assert kept(Retention(latest=1), line(1, 2, is_consistent=[False] * 2)) == [1, 2]


def test_every_steps_keeps_the_first_of_each_span() -> None:
    assert kept(Retention(every_steps=100), line(0, 50, 100, 150, 200, 240)) == [0, 100, 200, 240]
    assert kept(Retention(every_steps=100), line(37, 87, 137, 187, 237)) == [37, 137, 237]


def test_every_hours_keeps_one_per_span_and_more_where_a_clock_jumped() -> None:
    hours = [0.0, 0.4, 1.0, 1.5, 2.5, 2.6]
    steady = line(1, 2, 3, 4, 5, 6, created_at_s=[3600 * each for each in hours])
    assert kept(Retention(every_hours=1), steady) == [1, 3, 5, 6]
    jumped = line(1, 2, 3, 4, 5, created_at_s=[3600 * each for each in (0, 0.5, -0.6, 0.0, 0.5)])  # an hour back
    assert kept(Retention(every_hours=1), jumped) == [1, 3, 5]


def test_span_of_hours_beyond_all_floats_keeps_the_first() -> None:
    candidates = line(1, 2, 3, created_at_s=[0.0, 3600.0, 7200.0])
    assert kept(Retention(every_hours=1e308), candidates) == [1, 3]


def test_tagged_snapshots_always_stay() -> None:
    assert kept(Retention(latest=1), line(1, 2, 3, tags=[("good",), (), ()])) == [1, 3]


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (Best("return"), (1.0, 5.0, 2.0, 0.0), [2, 4]),
        (Best("return", mode="min"), (1.0, 5.0, -2.0, 0.0), [3, 4]),
        (Best("return", count=2), (1.0, 5.0, 2.0, 0.0), [2, 3, 4]),
        (Best("return"), (5.0, 5.0, 1.0, 1.0), [2, 4]),  # of equals the newest
        (Best("return"), (math.nan, 1.0, math.nan, 0.0), [2, 4]),
        (Best("return"), (math.inf, 1.0, -math.inf, 0.0), [2, 4]),
        (Best("return"), ("9", 1.0, True, None, 0.5), [2, 5]),
        (Best("return"), (None, None, None), [3]),
        (Best("return", mode="min"), (math.nan, None, 3), [3]),
    ],
)
def test_best_by_one_metric(rule: Best, values: tuple[Any, ...], expected: list[int]) -> None:
    assert kept(Retention(latest=1, best=rule), rated(*values)) == expected


def test_best_does_not_evict_the_newest() -> None:
    values = (9.0, 8.0, 7.0, 1.0, 0.0)
    assert kept(Retention(latest=1, best=Best("return", count=3)), rated(*values)) == [1, 2, 3, 5]


def test_best_under_constraints() -> None:
    rows = [(10, 0.2, 0.9), (9, 0.01, 0.5), (8, 0.01, 0.95), (7, 0.0, 0.99), (99, None, 0.9), (0, 1, 0)]
    metrics = [
        {
            key: value
            for key, value in zip(("reward", "violation_rate", "success_rate"), row, strict=True)
            if value is not None
        }
        for row in rows
    ]
    safe = Best("reward", at_most={"violation_rate": 0.02}, at_least={"success_rate": 0.9})
    assert kept(Retention(best=safe), line(1, 2, 3, 4, 5, 6, metrics=metrics)) == [3, 6]


def test_pareto_front_keeps_what_nothing_beats() -> None:
    rows = [(1, 1), (5, 5), (5, 5), (9, 9), (7, 3), (6, 3), (0, 9), (3, math.nan)]
    metrics = [{"reward": reward, "cost": cost} for reward, cost in rows]
    front = Pareto({"reward": "max", "cost": "min"})
    # by hand: (1,1), (7,3) and (9,9) are beaten by nothing; (5,5) and (6,3) by (7,3)
    assert kept(Retention(best=front), line(1, 2, 3, 4, 5, 6, 7, 8, metrics=metrics)) == [1, 4, 5, 8]


def test_of_equal_points_of_a_front_the_newest_stays() -> None:
    metrics = [{"a": 1, "b": 2}] * 3
    found = Pareto({"a": "max", "b": "max"}).chosen(line(1, 2, 3, metrics=metrics))
    assert [each.step for each in found] == [3]


def test_any_of_several_retentions_keeps_what_either_keeps() -> None:
    candidates = rated(9.0, 1.0, 2.0, 0.0)
    both = Retention(latest=1, every_steps=3) | Retention(latest=1, best=Best("return"))
    assert kept(both, candidates) == [1, 3, 4]
    assert both.kept(candidates)["1"] == ["every 3 steps", "best 1 by return"]
    assert isinstance(both | Retention(latest=2), AnyOf)


def test_reasons_say_why() -> None:
    reasons = Retention(latest=1, every_steps=2).kept(line(1, 2, 3, tags=[("a",), (), ()]))
    assert reasons == {"1": ["tag", "every 2 steps"], "2": ["every 2 steps"], "3": ["newest", "latest"]}


def test_thinning_withdraws_beyond_the_last_and_never_from_the_newest() -> None:
    names = ("policy", "optimizer", "replay")
    candidates = line(1, 2, 3, 4, tags=[("a",), (), (), ()], components=[names] * 4)
    rule = Thinning(["optimizer", "replay"], keep_latest=2)
    assert rule.withdrawn(candidates) == {"2": ("optimizer", "replay")}
    assert set(Thinning(["optimizer"], keep_latest=2, spare_tags=False).withdrawn(candidates)) == {"1", "2"}


def test_thinning_leaves_a_snapshot_at_least_one_component() -> None:
    candidates = line(1, 2, components=[("optimizer",), ("optimizer", "policy")])
    assert Thinning(["optimizer"]).withdrawn(candidates) == {}


def test_thinning_spares_what_is_newer_than_the_newest_whole_one() -> None:
    names = ("policy", "optimizer")
    candidates = line(1, 2, 3, is_whole=[True, True, False], components=[names] * 3)
    assert Thinning(["optimizer"]).withdrawn(candidates) == {"1": ("optimizer",)}


def test_rules_given_as_an_iterator_are_all_kept_and_stay_as_they_were_given() -> None:
    candidates = rated(9.0, 1.0, 2.0, 0.0)
    rule = Retention(latest=1, best=(Best(name) for name in ["return"]))  # type: ignore[arg-type]
    assert [kept(rule, candidates), kept(rule, candidates)] == [[1, 4], [1, 4]]
    rules = [Best("return")]
    rule = Retention(latest=1, best=rules)
    rules.clear()
    assert kept(rule, candidates) == [1, 4]
    either = AnyOf(each for each in [Retention(latest=2), Retention(every_steps=3)])  # type: ignore[arg-type]
    assert [kept(either, candidates), kept(either, candidates)] == [[1, 3, 4], [1, 3, 4]]
    thinning = Thinning(iter(["optimizer"]))  # type: ignore[arg-type]
    stored = line(1, 2, 3, components=[("optimizer", "policy")] * 3)
    assert thinning.withdrawn(stored) == {"1": ("optimizer",), "2": ("optimizer",)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Retention(latest=0),
        lambda: Retention(latest=1.5),  # type: ignore[arg-type]
        lambda: Retention(latest=True),
        lambda: Retention(every_steps=0),
        lambda: Retention(every_hours=0),
        lambda: Retention(every_hours=math.inf),
        lambda: Retention(every_hours=math.nan),
        lambda: Retention(best=None),  # type: ignore[arg-type]
        lambda: Retention(best=5),  # type: ignore[arg-type]
        lambda: Retention(best="return"),  # type: ignore[arg-type]
        lambda: Best("return", mode="best"),
        lambda: Best("return", count=0),
        lambda: Best(""),
        lambda: Best(5),  # type: ignore[arg-type]
        lambda: Best("return", at_most={"cost": math.nan}),
        lambda: Best("return", at_least={5: 1.0}),  # type: ignore[dict-item]
        lambda: Pareto({}),
        lambda: Pareto({"a": "up"}),
        lambda: Pareto({5: "max"}),  # type: ignore[dict-item]
        lambda: AnyOf(()),
        lambda: AnyOf(5),  # type: ignore[arg-type]
        lambda: Thinning("optimizer"),
        lambda: Thinning([]),
        lambda: Thinning([""]),
        lambda: Thinning([5]),  # type: ignore[list-item]
        lambda: Thinning(5),  # type: ignore[arg-type]
        lambda: Thinning(["a"], keep_latest=0),
        lambda: Thinning(["a"], spare_tags="no"),  # type: ignore[arg-type]
        lambda: Compaction(needed_share_max=math.nan),
        lambda: Compaction(held_gain_min=-0.5),
        lambda: Compaction(budget_bytes=-1),
        lambda: Compaction(cold_after=0),
        lambda: Compaction(is_thorough=1),  # type: ignore[arg-type]
        lambda: Maintenance(every_commits=0),
        lambda: Maintenance(patrol_bytes=-1),
        lambda: Maintenance(grace_s=math.inf),
        lambda: Maintenance(grace_s=-1.0),
        lambda: Maintenance(limits=5),  # type: ignore[arg-type]
        lambda: Limits(warn_write_s=math.nan),
        lambda: Limits(stop_free_bytes="1"),  # type: ignore[arg-type]
    ],
)
def test_rules_that_mean_nothing_are_refused(make: Any) -> None:
    with pytest.raises(InvalidInputError):
        make()
