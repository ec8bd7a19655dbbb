"""The distributed demo: what its exchange refuses, actors across a recovery, and how a drill is judged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path

import msgspec
import numpy as np
import pytest

import casckpt
from casckpt.demo.distributed._actor import Player
from casckpt.demo.distributed._drill import ALL_SCENARIOS, DistributedDrill, DistributedReport, _divergence, stale_steps
from casckpt.demo.distributed._exchange import Exchange
from casckpt.demo.distributed._messages import (
    WEIGHT_COUNT,
    Addresses,
    Ask,
    Give,
    Rows,
    Task,
    Verdict,
    Wait,
    decode_answer,
    encode,
    write_addresses,
)
from casckpt.recovery import BeatServer, DrillReport, SampleGate, Version, open_generation
from casckpt.recovery.drill import Round
from tests.unit.cli_stores import call

SECRET = "a-secret-of-this-test"
NOW = Version(2, 7)
WEIGHTS = np.linspace(-0.1, 0.1, WEIGHT_COUNT, dtype=np.float32).tobytes()
TIMEOUT_S = 1500.0  # what is waited for comes within seconds, on a machine that does nothing else
Gathered = list[tuple[Version, Rows]]


@contextmanager
def gathering(items: list[int], silent: set[str] | None = None) -> Iterator[tuple[Exchange, Future[Gathered]]]:
    """An exchange that waits for these items; the test must see to it that all come."""
    gate = SampleGate(NOW, behind_max=0)
    with Exchange(gate, SECRET, silent=lambda: silent or set()) as exchange, ThreadPoolExecutor(1) as pool:
        yield exchange, pool.submit(exchange.gather, items, WEIGHTS)


@contextmanager
def connected(exchange: Exchange) -> Iterator[Connection]:
    with Client(exchange.address, authkey=SECRET.encode()) as connection:
        yield connection


def ask(connection: Connection, name: str = "actor-0") -> int:
    """The next item; waits for it."""
    answer: Task | Wait | Verdict = Wait()
    while isinstance(answer, Wait):
        connection.send_bytes(encode(Ask(name)))
        answer = decode_answer(connection.recv_bytes())
    assert isinstance(answer, Task)
    assert (answer.version, answer.weights) == (NOW, WEIGHTS)
    return answer.item


def give(connection: Connection, sample: Give) -> str:
    connection.send_bytes(encode(sample))
    verdict = decode_answer(connection.recv_bytes())
    assert isinstance(verdict, Verdict)
    return verdict.reason


def sample_of(item: int, version: Version = NOW) -> Give:
    """One row whose observation tells the item."""
    row = np.full(4, item, np.float32).tobytes()
    return Give(version, item, row, b"\1", b"\0" * 4, b"\1", [1.0])


def test_samples_come_back_in_the_order_of_their_items_whoever_played_them() -> None:
    with gathering([5, 6, 7]) as (exchange, gathered), connected(exchange) as one, connected(exchange) as other:
        items = [ask(one, "actor-0"), ask(other, "actor-1"), ask(other, "actor-1")]
        for connection, item in [(other, items[2]), (one, items[0]), (other, items[1])]:
            assert give(connection, sample_of(item)) == ""
        found = gathered.result(timeout=TIMEOUT_S)
    assert sorted(items) == [5, 6, 7]
    assert [rows.observation[0, 0] for _, rows in found] == [5, 6, 7]
    assert {version for version, _ in found} == {NOW}


def test_item_of_an_actor_that_died_goes_to_another() -> None:
    with gathering([5]) as (exchange, gathered):
        with connected(exchange) as dying:
            assert ask(dying) == 5
        with connected(exchange) as other:
            assert ask(other, "actor-1") == 5
            assert give(other, sample_of(5)) == ""
        assert len(gathered.result(timeout=TIMEOUT_S)) == 1


def test_item_of_an_actor_that_hangs_goes_to_another_and_what_it_brings_late_is_refused() -> None:
    silent: set[str] = set()
    with (
        gathering([5, 6], silent) as (exchange, gathered),
        connected(exchange) as late,
        connected(exchange) as other,
    ):
        first = ask(late, "late")
        silent.add("late")
        taken = {ask(other, "other"), ask(other, "other")}
        assert taken == {5, 6}
        assert give(other, sample_of(first)) == ""
        assert "settled" in give(late, sample_of(first))
        assert give(other, sample_of(11 - first)) == ""
        assert len(gathered.result(timeout=TIMEOUT_S)) == 2


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (sample_of(5, Version(1, 7)), "generation 1, this is 2"),
        (sample_of(5, Version(3, 7)), "generation 3, this is 2"),
        (sample_of(5, Version(2, 6)), "1 steps ago"),
        (sample_of(5, Version(2, 8)), "a line that was left"),
        (sample_of(4), "item 4 is settled"),
        (msgspec.structs.replace(sample_of(5), observation=b"\0" * 12), "parts of"),
        (msgspec.structs.replace(sample_of(5), action=b"", observation=b"", log_probability=b"", ended=b""), "0 rows"),
        (msgspec.structs.replace(sample_of(5), action=b"\2"), "unknown actions"),
        (msgspec.structs.replace(sample_of(5), log_probability=np.float32("nan").tobytes()), "not finite"),
    ],
)
def test_sample_that_must_not_be_trained_on_is_refused_and_the_item_stays_open(sample: Give, reason: str) -> None:
    with gathering([5]) as (exchange, gathered), connected(exchange) as connection:
        assert ask(connection) == 5
        assert reason in give(connection, sample)
        assert not gathered.done()
        assert give(connection, sample_of(5)) == ""
        ((_, rows),) = gathered.result(timeout=TIMEOUT_S)
    assert rows.observation.tolist() == [[5.0] * 4]


def test_who_does_not_know_the_key_gets_nothing() -> None:
    with Exchange(SampleGate(NOW), SECRET) as exchange, pytest.raises((AuthenticationError, OSError, EOFError)):
        Client(exchange.address, authkey=b"another-secret-of-it")


def test_frame_that_is_no_message_ends_the_connection_and_nothing_else() -> None:
    with gathering([5]) as (exchange, gathered), connected(exchange) as other:
        with connected(exchange) as stranger:
            stranger.send_bytes(b"\xc1 no message")
            with pytest.raises((EOFError, OSError)):
                stranger.recv_bytes()
        assert ask(other) == 5
        assert give(other, sample_of(5)) == ""
        assert len(gathered.result(timeout=TIMEOUT_S)) == 1


def test_item_has_one_result_whoever_plays_it_and_how_often() -> None:
    one, other = Player(seed=3), Player(seed=3)
    other.play(Task(NOW, 4, WEIGHTS))
    first, again = one.play(Task(NOW, 9, WEIGHTS)), other.play(Task(NOW, 9, WEIGHTS))
    assert first == again
    assert first.observation != one.play(Task(NOW, 10, WEIGHTS)).observation
    assert sum(first.returns) == len(first.action) >= 200
    one.close()
    other.close()


class LearnerIsGone(Exception):
    """The learner dies while an item is out."""


class DyingGate(SampleGate):
    """The learner dies as a sample comes in: the actor gets no answer."""

    is_dead = False

    def admit(self, sample: Version) -> str:
        self.is_dead = True
        raise EOFError


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT_S)
def test_actor_whose_learner_dies_holds_its_sample_and_drops_it_for_the_next_generation(tmp_path: Path) -> None:
    module = "casckpt.demo.distributed._actor"
    command = [sys.executable, "-m", module, "--work", str(tmp_path), "--name", "actor-0", "--seed", "3"]
    actor = subprocess.Popen(command, env={**os.environ, "CASCKPT_DEMO_KEY": SECRET})
    try:
        for generation in (1, 2):
            now = Version(generation, 7)
            gate = DyingGate(now, behind_max=0) if generation == 1 else SampleGate(now, behind_max=0)
            with BeatServer(lambda gate=gate: gate.version, token=SECRET) as server, Exchange(gate, SECRET) as exchange:

                def die_once(gate: SampleGate = gate) -> None:
                    if isinstance(gate, DyingGate) and gate.is_dead:
                        raise LearnerIsGone

                write_addresses(str(tmp_path), Addresses(server.address, exchange.address))
                if generation == 1:
                    with pytest.raises(LearnerIsGone):
                        exchange.gather([5], WEIGHTS, waiting=die_once)
                else:
                    ((version, rows),) = exchange.gather([5], WEIGHTS)
    finally:
        actor.kill()
        actor.wait()
    assert version == Version(2, 7)
    assert gate.refused_count == 0  # what it held was never sent
    expected = Player(seed=3).play(Task(Version(2, 7), 5, WEIGHTS))
    assert rows.observation.tobytes() == expected.observation


def commit(store: casckpt.Store, step: int, generation: int, *, weight: float = 0.0) -> casckpt.Snapshot:
    metrics = {"return": 1.0, "generation_min": generation, "generation_max": generation, "behind_max": 0}
    return store.commit(step, {"policy": {"w": np.full(8, weight)}, "rng": {"n": step}}, metrics=metrics)


def test_step_that_was_trained_on_samples_of_a_generation_that_was_over_is_found(store_path: Path) -> None:
    with casckpt.open(store_path, create=True) as store:
        open_generation(store, None)
        line = [commit(store, 1, 1)]
        open_generation(store, line[0])
        line += [commit(store, 2, 2), commit(store, 3, 1)]
        assert stale_steps(store, line[:2]) == []
        assert stale_steps(store, line) == ["step 3 of generation 2 was trained on samples of [1]"]


def test_step_that_differs_from_a_training_without_faults_is_named_with_its_component(tmp_path: Path) -> None:
    with casckpt.open(tmp_path / "a", create=True) as store:
        expected = [commit(store, 1, 0), commit(store, 2, 0)]
    with casckpt.open(tmp_path / "b", create=True) as store:
        found = [commit(store, 1, 1), commit(store, 2, 1, weight=1.0)]
    assert _divergence(expected[0], found[0]) == ""
    assert _divergence(expected[1], found[1]) == "step 2 differs from a training without faults: policy"
    lower = replace(found[0], metrics={"return": 0.5})
    assert _divergence(expected[0], lower) == "step 1 differs from a training without faults: metric return"


def test_report_is_only_well_when_rounds_and_line_are() -> None:
    kept = DrillReport(
        (Round("kill", 3, 3, 1.0, 0, ()), Round("kill", 5, 5, 3.0, 0, ()), Round("hang", 7, 7, 9.0, 0, ()))
    )
    well = DistributedReport(kept, 0.5, 0, 6, 6, (), 20.0, 25.0)
    assert well.ok
    text = str(well)
    assert "3 of 3 promises kept, 0 wrong restores\n  kill            2 of 2, median 2.00 s\n  hang " in text
    assert "median 2.00 s, 4.00 times the floor (start, imports, restore) 0.50 s\n0 steps trained on" in text
    broken = replace(well, problems=("step 4 differs",))
    assert not broken.ok
    assert broken.to_dict()["ok"] is False
    assert "broken: step 4 differs" in str(broken)


def test_demo_and_a_command_exclude_each_other_and_a_store_that_is_there_is_left_alone(tmp_path: Path) -> None:
    assert call("drill", "--store", tmp_path / "s").code == 2
    assert call("drill", "--store", tmp_path / "s", "--demo", "--", "true").code == 2
    called = call("drill", "--store", tmp_path, "--demo")
    assert called.code == 9
    assert "a store of its own" in called.err


@pytest.mark.full
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_distributed_training_survives_every_fault_and_is_what_it_would_have_been_without(tmp_path: Path) -> None:
    """One round of each; nothing in it is timed but the silence of the learner that was made to hang."""
    drill = DistributedDrill(str(tmp_path / "store"), seed=1, silence_s=5.0, timeout_s=TIMEOUT_S)
    report = drill.run()
    assert [each.scenario for each in report.drill.rounds] == list(ALL_SCENARIOS)
    assert report.ok, str(report)
    assert report.equal_count == report.step_count >= 3 * len(ALL_SCENARIOS)
    lost = {each.scenario: each.steps_lost for each in report.drill.rounds if each.steps_lost}
    assert lost == {"damage": 1, "delete": 1}


@pytest.mark.soak
@pytest.mark.timeout(24 * 3600)
def test_distributed_training_survives_a_hundred_faults(tmp_path: Path) -> None:
    drill = DistributedDrill(str(tmp_path / "store"), seed=2, silence_s=5.0, timeout_s=TIMEOUT_S)
    report = drill.run(ALL_SCENARIOS * 12)
    assert len(report.drill.rounds) >= 100
    assert report.ok, str(report)
