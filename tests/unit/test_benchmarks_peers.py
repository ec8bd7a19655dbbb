"""The peers of the benchmarks: what they are given comes back, what does not is told, and tables say what was measured.

Only peers that need nothing beyond the pinned packages run in the quick suite. Nothing here judges a time.
"""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.corpora import build
from benchmarks.peers import __main__ as command
from benchmarks.peers import report
from benchmarks.peers._disk import durable_file, size_below
from benchmarks.peers._process import Restorer, Worker, WorkerError
from benchmarks.peers._tree import Live, difference, flatten, raw_size, state_difference, unflatten
from benchmarks.peers.contract import BOUNDED, OWN_FILES, REPLAY, Peer
from benchmarks.peers.registry import PEERS
from benchmarks.peers.results import Commit, CorpusResult, PeerResult, Restore, corpus_result
from benchmarks.peers.run import evenly
from benchmarks.peers.torch_files import TorchSave

# What the issue names.
PRODUCTS = {
    "casckpt",
    "torch.save",
    "torch.save + zstd",
    "zstd --patch-from",
    "safetensors",
    "torch DCP",
    "Orbax/OCDBT",
    "Icechunk",
    "ZipNN",
    "OpenZL",
    "hf-xet",
    "borg",
    "restic",
    "casync",
}
IN_PROCESS = ("casckpt-fast", "casckpt-small", "casckpt-async", "torch", "torch-zstd3", "safetensors", "zstd-patch3")
IN_PROCESS += ("casync-torch", "casync-safetensors")
SLOW = ("restic-torch", "borg-safetensors")  # seconds of start-up for each command


def nan(payload: int) -> float:
    """A NaN with these payload bits."""
    return float(struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000 | payload))[0])


def sample(number: int) -> dict[str, Any]:
    """A state with everything that corpora hold; the numbers in it follow `number`."""
    weights = torch.arange(30_000, dtype=torch.float32).reshape(100, 300).sin() + number * 1e-3
    policy = OrderedDict(
        weight=weights, half=weights.bfloat16(), steps=torch.tensor(number), none=torch.empty(0, 3, dtype=torch.int16)
    )
    moments = {"exp_avg": weights * 0.1, "exp_avg_sq": weights**2, "step": torch.tensor(float(number))}
    groups = [{"lr": 1e-4, "betas": (0.9, 0.999), "params": [0, 1], "fused": None, "amsgrad": False}]
    ring = {"pixels": torch.arange(5000).remainder(7).byte().roll(number), "done": torch.arange(64) % 3 == number % 3}
    return {
        "policy": policy,
        "optimizer": {"state": {0: moments, 1: {}}, "param_groups": groups},
        "replay": ring,
        "control": {"step": number, "name": "x" * number, "best": -0.0},
    }


def test_every_product_that_the_comparison_promises_is_there(tmp_path: Path) -> None:
    assert {make(str(tmp_path), str(tmp_path)).product for make in PEERS.values()} == PRODUCTS


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*IN_PROCESS, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)])
def test_snapshots_come_back_after_the_live_tensors_went_on(name: str, tmp_path: Path) -> None:
    folder, scratch = tmp_path / "store", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    peer = PEERS[name](str(folder), str(scratch))
    if reason := peer.why_not():
        pytest.skip(reason)
    peer.load()
    peer.start()
    live = Live()
    for number in range(3):
        live.update(sample(number))
        wait = peer.begin(number, peer.prepare(live.state))
        live.scribble()
        wait()
    peer.close()
    assert peer.size() > 0
    later = PEERS[name](str(folder), str(scratch))
    later.load()
    for number in (2, 0, 1):
        restored = later.restore(number, None)
        assert state_difference(sample(number), restored) is None
        assert torch.equal(restored["policy"]["weight"], sample(number)["policy"]["weight"])
        assert restored["control"] == {"step": number, "name": "x" * number, "best": 0.0}


def test_replay_ring_of_a_series_comes_back_in_its_slots(tmp_path: Path) -> None:
    peer = PEERS["casckpt-ring"](str(tmp_path), str(tmp_path))
    peer.load()
    peer.start()
    log = torch.arange(90 * 30).reshape(90, 30).byte()
    live = Live()
    states = []
    for number, written in enumerate((40, 47, 90)):
        rows = torch.stack([log[row] for row in sorted(range(written - 40, written), key=lambda row: row % 40)])
        states.append({"ring": {"pixels": rows}, "counters": {"environment_steps": written}})
        live.update(states[-1])
        peer.begin(number, peer.prepare(live.state))()
    peer.close()
    later = PEERS["casckpt-ring"](str(tmp_path), str(tmp_path))
    later.load()
    for number in (2, 0, 1):
        assert state_difference(states[number], later.restore(number, None)) is None


def test_trees_survive_being_taken_apart_and_written_as_json() -> None:
    tree = {1: (torch.ones(2), [True, None, 2.5, "a"]), "again": OrderedDict(b=torch.empty(0, 4), a=2**70)}
    skeleton, tensors = flatten(tree)
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 1.0]]
    back = unflatten(json.loads(json.dumps(skeleton)), [torch.zeros(2)])
    assert list(back) == [1, "again"]
    assert back[1][0].tolist() == [0.0, 0.0]
    assert back[1][1] == [True, None, 2.5, "a"] and type(back[1]) is tuple
    assert type(back["again"]) is OrderedDict and list(back["again"]) == ["b", "a"]
    assert back["again"]["b"].shape == (0, 4) and back["again"]["a"] == 2**70


def test_a_tensor_in_two_places_is_one_tensor_and_counted_once() -> None:
    shared = torch.zeros(3)
    skeleton, tensors = flatten([shared, {"same": shared}])
    assert len(tensors) == 1
    back = unflatten(skeleton, tensors)
    assert back[0] is back[1]["same"]
    assert raw_size([shared, {"same": shared}]) == 12


def test_leaves_that_no_peer_could_give_back_are_refused() -> None:
    with pytest.raises(TypeError, match="complex"):
        flatten({"x": 1j})


@pytest.mark.parametrize(
    ("expected", "found", "where"),
    [
        (torch.zeros(2), torch.tensor([0.0, -0.0]), "x: tensor differs"),
        (torch.zeros(2), torch.zeros(2, 1), "x: tensor differs"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), "x: tensor differs"),
        (torch.tensor([nan(1)], dtype=torch.float64), torch.tensor([nan(2)], dtype=torch.float64), "x: tensor differs"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "x: keys differ"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "x['a'][1]: 2 became 3"),
        ([1, 2], [1], "x: length 2 became 1"),
        ((1,), [1], "x: tuple became list"),
        (OrderedDict(a=1), {"a": 1}, "x: OrderedDict became dict"),
        (1, True, "x: int became bool"),
        (0.0, -0.0, "x: 0.0 became -0.0"),
    ],
)
def test_what_did_not_come_back_is_named(expected: Any, found: Any, where: str) -> None:
    assert difference(expected, found, "x") == where
    assert difference(expected, expected, "x") is None


def test_equal_nans_are_no_difference() -> None:
    assert difference([math.nan, torch.tensor([math.nan])], [math.nan, torch.tensor([math.nan])], "x") is None


def test_a_missing_component_is_a_difference_and_their_order_is_not() -> None:
    assert state_difference({"a": 1, "b": 2}, {"b": 2, "a": 1}) is None
    assert state_difference({"a": 1, "b": 2}, {"a": 1}) is not None


def test_live_tensors_stay_in_place_and_take_the_new_content() -> None:
    live = Live()
    live.update({"a": torch.zeros(4), "b": torch.ones(2)})
    first = live.state["a"]
    live.update({"a": torch.full((4,), 3.0), "b": torch.ones(5)})
    assert live.state["a"] is first
    assert first.tolist() == [3.0] * 4
    assert live.state["b"].shape == (5,)


def test_live_tensors_are_not_those_of_the_series() -> None:
    given = torch.zeros(4)
    live = Live()
    live.update({"a": given})
    live.scribble()
    assert given.tolist() == [0.0] * 4


def test_scribbling_changes_every_element() -> None:
    live = Live()
    live.update({"f": torch.arange(6.0), "h": torch.arange(6).bfloat16(), "d": torch.tensor([True, False])})
    before = {name: tensor.clone() for name, tensor in live.state.items()}
    live.scribble()
    assert live.state["d"].tolist() == [False, True]
    assert all(bool((live.state[name] != before[name]).all()) for name in before)


def test_a_file_that_was_not_finished_does_not_appear(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), durable_file(str(tmp_path / "file")) as stream:
        stream.write(b"half")
        raise ZeroDivisionError
    assert not (tmp_path / "file").exists()


def test_sizes_leave_out_what_they_are_told_to(tmp_path: Path) -> None:
    for path, size in (("a", 3), ("cache/b", 50), ("store/c", 4), ("store/cache", 60)):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(bytes(size))
    assert size_below(str(tmp_path)) == 117
    assert size_below(str(tmp_path), skipping=("cache",)) == 7


def test_peers_that_are_not_here_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown(TorchSave):
        packages: ClassVar[tuple[str, ...]] = ("torch", "no-such-package")

    peer: Peer = Unknown(str(tmp_path), str(tmp_path))
    assert peer.why_not() == "Python package no-such-package is not installed"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert PEERS["borg-torch"](str(tmp_path), str(tmp_path)).why_not() == "borg is not on the path"
    assert PEERS["torch"](str(tmp_path), str(tmp_path)).why_not() is None


@pytest.mark.parametrize(
    ("count", "wanted", "numbers"),
    [
        (1, 3, [0]),
        (2, 3, [0, 1]),
        (3, 3, [0, 1, 2]),
        (30, 3, [0, 14, 29]),
        (31, 5, [0, 7, 15, 22, 30]),
        (30, 4, [0, 9, 14, 19, 29]),
        (5, 99, [0, 1, 2, 3, 4]),
        (30, 0, [0, 14, 29]),
    ],
)
def test_snapshots_to_restore_lie_at_equal_distances(count: int, wanted: int, numbers: list[int]) -> None:
    assert evenly(count, wanted) == numbers


def result_of(name: str, restores_from: str, difference: str | None, failure: str | None = None) -> PeerResult:
    """Three commits of 10 MB, of which the middle one is disturbed, and restores of all."""
    commits = [
        Commit(0, 10_000_000, False, stall_s=0.010, durable_s=0.1, added_bytes=4_000_000, peak_bytes=7_000_000),
        Commit(1, 10_000_000, True, stall_s=0.002, durable_s=9.9, added_bytes=1_000_000, peak_bytes=9_000_000),
        Commit(2, 10_000_000, False, stall_s=0.004, durable_s=0.2, added_bytes=2_500_000, peak_bytes=8_000_000),
    ]
    restores = [
        Restore(0, 10_000_000, restore_s=0.5, peak_bytes=1_000_000, difference=None),
        Restore(1, 10_000_000, restore_s=2.0, peak_bytes=1_000_000, difference=difference),
        Restore(2, 10_000_000, restore_s=1.0, peak_bytes=12_000_000, difference=None),
    ]
    return PeerResult(
        name=name,
        product="product",
        version="1.2",
        level="level",
        restores_from=restores_from,
        durability="",
        is_asynchronous=True,
        runs_programs=False,
        failure=failure,
        commits=commits,
        restores=restores,
        closing_bytes=-600_000,
    )


def test_tables_say_what_was_measured() -> None:
    exact, lossy = result_of("one", OWN_FILES, None), result_of("two", REPLAY, "policy: tensor differs")
    missing = PeerResult("three", "p", "", "", BOUNDED, "", False, False, "three is not on the path")
    result = CorpusResult("A", 3, "alternating", [exact, lossy, missing])
    assert report.title(result) == "A: 3 commits, 30.0 MB raw, alternating"
    rows = [dict(zip(report.HEADERS, row, strict=True)) for row in report.rows(result)]
    assert rows[0] == {
        "peer": "one",
        "version": "1.2",
        "options": "level",
        "stored MB": "6.90",
        "share of raw": "0.2300",
        "last commit MB": "2.500",
        "commit MB/s": "75.0",  # between 100 and 50; the disturbed one does not count
        "stall ms, median / max": "4.0 / 10.0",
        "restore s, first / middle / last": "0.5 / 2 / 1",
        "worst restore": "2 s, 5 MB/s",
        "independent": "yes",
        "exact": "yes",
        "peak MB": "12",
    }
    assert (rows[1]["independent"], rows[1]["exact"]) == ("no", "NO")
    assert report.remarks(result) == [
        "three: three is not on the path",
        "two: commit 1 did not come back: policy: tensor differs",
    ]
    assert len(rows) == 2


def test_results_come_back_from_json_and_print_in_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = CorpusResult("A", 3, "alternating", [result_of("one", OWN_FILES, None, "close: gone")])
    document = {"corpora": [asdict(result)]}
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(document))
    assert corpus_result(json.loads(path.read_text())["corpora"][0]) == result
    assert command.main(["--table", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "### A: 3 commits, 30.0 MB raw, alternating" in printed
    assert "| one | 1.2 | level | 6.90 | 0.2300 |" in printed
    assert "* one: close: gone" in printed


@pytest.mark.full
def test_pictures_name_every_peer_that_ran(tmp_path: Path) -> None:
    """In a process of its own: matplotlib keeps font files open."""
    ours, other = result_of("casckpt-fast", OWN_FILES, None), result_of("other", REPLAY, None)
    missing = PeerResult("absent", "p", "", "", BOUNDED, "", False, False, "not on the path")
    result = CorpusResult("A", 3, "alternating", [ours, other, missing])
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"corpora": [asdict(result)]}))
    command_line = [sys.executable, "-m", "benchmarks.peers", "--table", str(path), "--plots", str(tmp_path / "plots")]
    subprocess.run(command_line, check=True, capture_output=True, timeout=300)
    drawn = ElementTree.parse(tmp_path / "plots" / "A.svg")
    words = {"".join(element.itertext()).strip() for element in drawn.iter()}
    assert {"casckpt-fast", "other", "A: 3 commits of 10.0 MB"} <= words
    assert "absent" not in words


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--folder", "x", "--work", "y"]
    assert command.main(["--corpus", "A", "--peers", "torch,nobody", *places]) == 2
    assert "unknown: nobody" in capsys.readouterr().err
    assert command.main(["--corpus", "nowhere", *places]) == 2
    assert "unknown: nowhere" in capsys.readouterr().err
    assert command.main(["--corpus", "A"]) == 2


@pytest.mark.full
def test_a_run_restores_everything_exactly_and_leaves_only_figures(tmp_path: Path) -> None:
    corpora, work, figures = tmp_path / "corpora", tmp_path / "work", tmp_path / "figures.json"
    series = build("S", str(corpora), quick=True)
    arguments = ["--corpus", "S", "--folder", str(corpora), "--work", str(work), "--json", str(figures)]
    assert command.main([*arguments, "--peers", "casckpt-balanced,torch,dcp,dcp-async-kept"]) == 0
    assert list(work.iterdir()) == []
    (plain,) = json.loads(figures.read_text())["corpora"]
    result = corpus_result(plain)
    assert [peer.name for peer in result.peers] == ["casckpt-balanced", "torch", "dcp", "dcp-async-kept"]
    for peer in result.peers:
        assert peer.failure is None
        assert [commit.index for commit in peer.commits] == list(range(series.count))
        assert [commit.raw_bytes for commit in peer.commits] == [series.raw_bytes(n) for n in range(series.count)]
        assert all(0 < commit.stall_s <= commit.durable_s and commit.added_bytes > 0 for commit in peer.commits)
        assert [restore.difference for restore in peer.restores] == [None] * len(peer.restores)
        assert peer.restores[-1].index == series.count - 1
    assert [peer.closing_bytes for peer in result.peers[1:]] == [0, 0, 0]
    assert sum(commit.added_bytes for commit in result.peers[1].commits) >= sum(
        series.raw_bytes(n) for n in range(series.count)
    )


@pytest.mark.full
def test_a_failed_restore_is_told_and_the_next_one_works(tmp_path: Path) -> None:
    build("S", str(tmp_path / "corpora"), quick=True)
    places = {"corpora": str(tmp_path / "corpora"), "corpus": "S", "work": str(tmp_path / "work")}
    worker, restorer = Worker("torch", **places), Restorer(**places)
    try:
        worker.ask("commit", index=0, scribbles=False)
        with pytest.raises(WorkerError, match="No such file"):
            restorer.restore(worker, 1)
        assert restorer.restore(worker, 0)["difference"] is None
        with pytest.raises(WorkerError, match="IndexError"):
            worker.ask("commit", index=99, scribbles=False)
    finally:
        worker.remove()
        restorer.remove()
