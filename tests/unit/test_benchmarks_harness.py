"""The harness of the benchmarks: what it times, in which order, and how pairs become a figure."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks import _harness, _machine, _states
from benchmarks._harness import Measurement, Pairs, Settings, Timed


def recorder(name: str, calls: list[str]) -> Timed:
    return Timed(
        run=lambda prepared: calls.append(f"{name} run {prepared}"),
        prepare=lambda: calls.append(f"{name} prepare") or name,
        clean=lambda prepared: calls.append(f"{name} clean {prepared}"),
    )


def test_pairs_alternate_who_goes_first_and_warm_up_pairs_are_thrown_away() -> None:
    calls: list[str] = []
    pairs = _harness.paired(recorder("s", calls), recorder("b", calls), 3, warm_up_count=1)
    runs = [call[0] for call in calls if " run " in call]
    assert runs == ["b", "s", "s", "b", "b", "s", "s", "b"]
    assert len(pairs.subject_s) == len(pairs.baseline_s) == 3


def test_each_run_is_prepared_and_cleaned_with_the_same_object() -> None:
    calls: list[str] = []
    _harness.timed(recorder("s", calls))
    assert calls == ["s prepare", "s run s", "s clean s"]


def test_preparing_and_cleaning_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(_harness.time, "perf_counter", lambda: clock[0])

    def spend(seconds: float) -> None:
        clock[0] += seconds

    action = Timed(run=lambda _: spend(3.0), prepare=lambda: spend(100.0), clean=lambda _: spend(1000.0))
    assert _harness.timed(action) == 3.0


def test_the_figure_is_the_median_ratio_of_the_pairs_with_smallest_and_largest() -> None:
    pairs = Pairs(subject_s=(2.0, 9.0, 4.0), baseline_s=(1.0, 3.0, 1.0))
    measurement = pairs.measurement("T0", "case", target=3.0, size_bytes=8 * 10**9)
    assert (measurement.value, measurement.low, measurement.high) == (3.0, 2.0, 4.0)
    assert (measurement.subject, measurement.baseline) == ("2.00 GB/s", "8.00 GB/s")
    assert measurement.is_reached is True


@pytest.mark.parametrize(("target", "reached"), [(1.99, False), (2.0, True), (None, None)])
def test_a_target_is_reached_at_or_below_it(target: float | None, reached: bool | None) -> None:
    measurement = Measurement("T0", "", 2.0, "×", target, 2.0, 2.0, 1, "", "")
    assert measurement.is_reached is reached


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.50 s"), (0.0123, "12.30 ms"), (0.000045, "45 µs")])
def test_times_are_written_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert _harness.rate(seconds, None) == text


def test_the_99th_percentile_of_a_hundred_values_leaves_one_above_it() -> None:
    assert _harness.percentile([float(value) for value in range(1, 101)], 99) == 99.0


def test_folder_size_counts_every_file_but_the_reserve(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(bytes(300))
    (tmp_path / "file").write_bytes(bytes(7))
    (tmp_path / "reserve").write_bytes(bytes(5000))
    assert _harness.folder_size(str(tmp_path)) == 307


def test_scratch_is_inside_the_chosen_folder_and_gone_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), _harness.scratch(Settings(folder=str(tmp_path))) as path:
        assert os.path.dirname(path) == str(tmp_path)
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_refilled_states_share_no_chunk_with_what_they_were() -> None:
    generator = _states.seeded()
    state = _states.random_state(200_000, 3, generator)
    before = {name: tensor.numpy().tobytes() for name, tensor in state.items()}
    _states.refill(state, generator)
    for name, tensor in state.items():
        after = tensor.numpy().tobytes()
        assert len(after) == len(before[name]) > 60_000
        assert not {after[at : at + 4096] for at in range(0, len(after), 4096)} & {
            before[name][at : at + 4096] for at in range(0, len(before[name]), 4096)
        }


def test_machine_facts_name_the_file_system_and_the_releases(tmp_path: Path) -> None:
    facts = _machine.facts(str(tmp_path))
    assert re.fullmatch(r"\S+ at " + re.escape(str(tmp_path)), facts["file system"])
    assert facts["torch"].split("+")[0].count(".") == 2
    assert int(facts["cores"]) >= 1
