"""`log`, `show`, `diff`, `runs`, `branches`, `du`, `verify` and `audit` on a store without damage."""

from __future__ import annotations

import datetime
import os
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import casckpt
from casckpt.cli.audit import imports_of
from tests.unit.cli_stores import WEIGHTS, call, make_store, weights

WEIGHT_BYTES = 4 * WEIGHTS


class Sample:
    """A store made once for this file; nobody changes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ids = make_store(path)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(tmp_path_factory.mktemp("look") / "store")


def test_nothing_that_looks_changes_a_file_or_needs_to_write(sample: Sample, tmp_path: Path) -> None:
    def times() -> dict[Path, int]:  # leases of readers come and go
        paths = (path for path in sorted(sample.path.rglob("*")) if not {"index", "leases"} & set(path.parts))
        return {path: path.stat().st_mtime_ns for path in paths if path != sample.path}

    before = times()
    for arguments in (["log"], ["show", "good", "--run", "walker"], ["verify", "--read-data"], ["du"], ["audit"]):
        assert call(arguments[0], sample.path, *arguments[1:]).code == 0
    assert times() == before


# --- log ---


def test_log_lists_the_newest_first_with_metrics_sizes_and_states(sample: Sample) -> None:
    document = call("log", sample.path, "--run", "walker", "--json").json
    rows = document["rows"]
    assert [(row["branch"], row["step"], row["state"]) for row in rows] == [
        ("side", 3, "mixed"),
        ("main", 4, "consistent"),
        ("main", 2, "consistent"),
        ("main", 1, "consistent"),
    ]
    assert [row["id"] for row in rows] == [sample.ids[name] for name in ("side@3", "main@4", "main@2", "main@1")]
    assert [row["tags"] for row in rows] == [[], [], ["good"], []]
    assert [row["snapshot"]["metrics"] for row in rows[1:]] == [{"return": 6.0}, {"return": 3.0}, {"return": 1.5}]
    assert document["hidden_retired_count"] == 1
    assert document["has_more"] is False


def test_log_sizes_are_those_of_the_state_and_of_the_files(sample: Sample) -> None:
    rows = call("log", sample.path, "--run", "walker", "--branch", "main", "--retired", "--json").json["rows"]
    first = rows[-1]["snapshot"]
    assert 2 * WEIGHT_BYTES <= first["logical_bytes"] <= 2 * WEIGHT_BYTES + 200
    assert 2 * WEIGHT_BYTES <= first["new_bytes"] <= 2 * WEIGHT_BYTES + 200
    second = rows[-2]
    assert WEIGHT_BYTES <= second["snapshot"]["new_bytes"] <= WEIGHT_BYTES + 100
    assert second["snapshot"]["dedup_ratio"] == pytest.approx(2.0, abs=0.01)
    on_disk = sum(
        path.stat().st_size for folder in ("packs", "timeline") for path in sample.path.rglob(f"{folder}/*/*")
    )
    everything = call("log", sample.path, "--all-runs", "--retired", "-n", "0", "--json").json["rows"]
    assert sum(row["snapshot"]["stored_bytes"] for row in everything) <= on_disk
    assert sum(row["snapshot"]["stored_bytes"] for row in everything) >= on_disk - 4096  # entries that are no commits


def test_log_shows_retired_ones_on_request(sample: Sample) -> None:
    rows = call("log", sample.path, "--run", "walker", "--retired", "--json").json["rows"]
    assert [(row["step"], row["branch"]) for row in rows if row["state"] == "retired"] == [(3, "main")]
    text = call("log", sample.path, "--run", "walker").out
    assert "1 retired snapshot not shown" in text


def test_log_follows_one_branch_into_its_ancestors(sample: Sample) -> None:
    rows = call("log", sample.path, "--run", "walker", "--branch", "side", "--json").json["rows"]
    assert [(row["branch"], row["step"]) for row in rows] == [("side", 3), ("main", 2), ("main", 1)]


def test_log_takes_the_run_written_last_and_names_the_others(sample: Sample) -> None:
    document = call("log", sample.path, "--json").json
    assert document["run"] == "other"
    assert [row["run"] for row in document["rows"]] == ["other"]
    assert [run["name"] for run in document["runs"]] == ["walker", "other"]
    text = call("log", sample.path).out
    assert "run walker: 5 snapshots; branches main (head 4), side (head 3 from" in text


def test_log_of_all_runs_is_in_the_order_of_publication(sample: Sample) -> None:
    rows = call("log", sample.path, "--all-runs", "--json").json["rows"]
    assert [(row["run"], row["step"]) for row in rows] == [
        ("other", 1),
        ("walker", 3),
        ("walker", 4),
        ("walker", 2),
        ("walker", 1),
    ]


@pytest.mark.parametrize(("count", "steps", "has_more"), [(1, [3], True), (2, [3, 4], True), (4, [3, 4, 2, 1], False)])
def test_log_stops_after_n_and_says_so(sample: Sample, count: int, steps: list[int], has_more: bool) -> None:
    document = call("log", sample.path, "--run", "walker", "-n", count, "--json").json
    assert [row["step"] for row in document["rows"]] == steps
    assert document["has_more"] is has_more
    assert ("older ones: -n 0" in call("log", sample.path, "--run", "walker", "-n", count).out) is has_more


def test_log_of_a_wrong_run_or_branch_is_code_3_and_lists_what_there_is(sample: Sample) -> None:
    called = call("log", sample.path, "--run", "wlaker")
    assert called.code == 3
    assert "other, walker" in called.err
    called = call("log", sample.path, "--run", "walker", "--branch", "sid")
    assert called.code == 3
    assert "main, side" in called.err


def test_log_refuses_options_that_contradict_each_other(sample: Sample) -> None:
    assert call("log", sample.path, "--all-runs", "--run", "walker").code == 2


def test_log_of_an_empty_store(store_path: Path) -> None:
    casckpt.open(store_path, create=True).close()
    called = call("log", store_path)
    assert called.code == 0
    assert "no snapshot yet" in called.out
    assert call("log", store_path, "--json").json["rows"] == []


def test_metrics_that_json_lacks_are_text(sample: Sample) -> None:
    assert call("log", sample.path, "--json").json["rows"][0]["snapshot"]["metrics"] == {"loss": "NaN"}


def test_names_and_metrics_cannot_steer_the_terminal(store_path: Path) -> None:
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"s": {"evil\x1b[2J": 1}}, metrics={"m\x1b[31m": 1.0}, labels={"l": "[bold]x\x07"})
    outputs = [call("log", store_path), call("show", store_path, "--leaves")]
    assert all("\x1b" not in called.out and "\x07" not in called.out for called in outputs)
    assert "m\\x1b[31m=1" in outputs[0].out
    assert "[bold]x" in outputs[1].out


@pytest.mark.full
def test_a_large_history_is_listed_without_reading_all_of_it(store_path: Path) -> None:
    with casckpt.open(store_path, create=True) as store:
        for step in range(60):
            store.commit(step, {"a": {"step": step}})
    program = (
        "import sys\n"
        "def hook(event, args):\n"
        "    if event == 'open' and 'timeline/' in str(args[0]): print(args[0], file=sys.stderr)\n"
        "sys.addaudithook(hook)\n"
        "from casckpt.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "log", str(store_path), "-n", "5"], capture_output=True, text=True, check=True
    )
    entries = {line for line in done.stderr.splitlines() if "timeline/" in line}
    assert 5 <= len(entries) <= 8


# --- show ---


def test_show_says_everything_of_a_snapshot(sample: Sample) -> None:
    document = call("show", sample.path, "good", "--run", "walker", "--json").json
    snapshot = document["snapshot"]
    assert snapshot["id"] == sample.ids["main@2"]
    assert snapshot["parent"] == sample.ids["main@1"]
    assert (snapshot["run"], snapshot["branch"], snapshot["step"]) == ("walker", "main", 2)
    assert snapshot["metrics"] == {"return": 3.0}
    assert snapshot["labels"] == {"at": "2"}
    assert document["tags"] == ["good"]
    assert document["writer"]["pid"] == os.getpid()
    assert document["context"]["config"] == {"lr": 0.5}
    assert document["context"]["environment"]["numpy"] == np.__version__
    assert {name: part["step"] for name, part in document["components"].items()} == dict.fromkeys(
        ("counters", "frozen", "policy"), 2
    )
    assert {part["state"] for part in document["components"].values()} == {"whole"}
    created = datetime.datetime.fromisoformat(snapshot["created_at"])
    assert abs(datetime.datetime.now(datetime.timezone.utc) - created) < datetime.timedelta(hours=1)


def test_show_gives_each_components_own_step(sample: Sample) -> None:
    document = call("show", sample.path, "side", "--run", "walker", "--json").json
    assert {name: part["step"] for name, part in document["components"].items()} == {
        "counters": 3,
        "frozen": 2,
        "policy": 2,
    }
    assert document["snapshot"]["is_consistent"] is False
    assert "mixed" in call("show", sample.path, "side", "--run", "walker").out


@pytest.mark.parametrize("ref", ["4", "main", "main@4", "id", "prefix"])
def test_every_form_of_a_reference_works(sample: Sample, ref: str) -> None:
    wanted = sample.ids["main@4"]
    forms = {"id": wanted, "prefix": wanted[:8], "4": "main@4"}
    found = call("show", sample.path, forms.get(ref, ref), "--run", "walker", "--json").json
    assert found["snapshot"]["id"] == wanted


def test_a_step_of_another_branch_is_named_in_the_error(sample: Sample) -> None:
    called = call("show", sample.path, "4", "--run", "walker")  # the current branch is "side"
    assert called.code == 3
    assert "main@4" in called.err


def test_show_leaves_lists_paths_types_shapes_bytes_and_scalars(store_path: Path) -> None:
    state = {
        "net": {"w": np.zeros((3, 5), np.float16), "n": 7, "none": None, "raw": bytes(5000)},
        "top": np.zeros(4, np.uint8),
    }
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, state)
    leaves = call("show", store_path, "--leaves", "--json").json["leaves"]
    rows = {leaf["path"]: leaf for rows in leaves.values() for leaf in rows}
    assert set(rows) == {"net/w", "net/n", "net/none", "net/raw", "top"}
    assert [rows["net/w"][key] for key in ("kind", "dtype", "shape", "size_bytes")] == ["numpy", "<f2", [3, 5], 30]
    assert [rows["net/n"][key] for key in ("kind", "dtype", "value")] == ["scalar", "int", "7"]
    assert rows["net/none"]["value"] == "None"
    assert rows["top"]["size_bytes"] == 4
    text = call("show", store_path, "--leaves").out
    assert "3×5" in text


# --- diff ---


def test_diff_counts_what_differs_and_exits_with_1(sample: Sample) -> None:
    called = call("diff", sample.path, "main@1", "main@2", "--run", "walker", "--json")
    assert called.code == 1
    assert called.json["is_equal"] is False
    components = {each["name"]: each for each in called.json["components"]}
    assert components["frozen"]["change"] == "equal"
    (leaf,) = components["policy"]["leaves"]
    changed = weights(1) != weights(2)
    largest = np.abs(weights(1).astype(float) - weights(2).astype(float)).max()
    assert (leaf["path"], leaf["changed_count"], leaf["element_count"]) == ("policy/w", changed.sum(), WEIGHTS)
    assert leaf["largest_change"] == pytest.approx(largest)
    (leaf,) = components["counters"]["leaves"]
    assert (leaf["before"], leaf["after"], leaf["largest_change"]) == ("1", "2", 1.0)


def test_diff_of_equal_snapshots_exits_with_0(sample: Sample) -> None:
    called = call("diff", sample.path, "good", "main@2", "--run", "walker")
    assert called.code == 0
    assert "equal" in called.out


def test_diff_shows_twenty_leaves_of_a_component_and_all_on_request(store_path: Path) -> None:
    with casckpt.open(store_path, create=True) as store:
        for step in (1, 2):
            store.commit(step, {"many": {f"n{i:02d}": step for i in range(25)}})
    text = call("diff", store_path, 1, 2).out
    assert text.count("  many/n") == 20
    assert "5 more: --all" in text
    assert call("diff", store_path, 1, 2, "--all").out.count("  many/n") == 25
    assert len(call("diff", store_path, 1, 2, "--json").json["components"][0]["leaves"]) == 25


# --- runs, branches ---


def test_runs_and_branches(sample: Sample) -> None:
    runs = call("runs", sample.path, "--json").json["runs"]
    assert [(run["name"], run["snapshot_count"]) for run in runs] == [("walker", 5), ("other", 1)]
    assert runs[0]["tags"] == {"good": sample.ids["main@2"]}
    branches = call("branches", sample.path, "--run", "walker", "--json").json["branches"]
    assert [(each["name"], each["head_step"], each["fork"], each["is_current"]) for each in branches] == [
        ("main", 4, None, False),
        ("side", 3, sample.ids["main@2"], True),
    ]
    assert "*  side" in call("branches", sample.path, "--run", "walker").out


# --- du ---


def test_du_adds_up_to_the_folder(sample: Sample) -> None:
    document = call("du", sample.path, "--json").json
    on_disk = sum(path.stat().st_size for path in sample.path.rglob("*") if path.is_file())
    assert document["total_bytes"] == on_disk
    packs = list(sample.path.glob("packs/*/*"))
    assert document["files"]["packs"] == {"files": len(packs), "bytes": sum(path.stat().st_size for path in packs)}
    assert document["unreferenced_bytes"] == document["duplicate_bytes"] == document["unreadable_count"] == 0
    assert document["unnamed_packs"] == document["leftovers"] == []


def test_du_charges_each_byte_to_the_first_who_needs_it(sample: Sample) -> None:
    document = call("du", sample.path, "--json").json
    shares = {(each["run"], each["component"]): each for each in document["shares"]}
    frozen, policy, other = (shares[key] for key in (("walker", "frozen"), ("walker", "policy"), ("other", "policy")))
    assert frozen["snapshot_count"] == 4
    assert frozen["logical_bytes"] == pytest.approx(4 * WEIGHT_BYTES, rel=0.001)
    assert frozen["new_bytes"] == pytest.approx(WEIGHT_BYTES, rel=0.001)
    assert 0.7 * WEIGHT_BYTES < frozen["stored_bytes"] < 1.05 * WEIGHT_BYTES
    assert 3 * 0.7 * WEIGHT_BYTES < policy["stored_bytes"] < 3 * 1.05 * WEIGHT_BYTES  # steps 1, 2 and 4
    assert other["stored_bytes"] < 2000  # run "walker" has it already
    assert 0.7 * WEIGHT_BYTES < document["retired_bytes"] < 1.05 * WEIGHT_BYTES + 2000  # the policy of step 3


def test_du_names_packs_without_a_commit_and_leftovers(sample: Sample, store_path: Path) -> None:
    make_store(store_path)
    pack_id = "ab" + "0" * 30
    (store_path / "packs" / "ab").mkdir(exist_ok=True)
    (store_path / "packs" / "ab" / pack_id).write_bytes(b"x" * 500)
    (store_path / "tmp" / "00000000-1-1-00").write_bytes(b"y" * 70)
    document = call("du", store_path, "--json").json
    assert document["unnamed_packs"] == [{"pack": pack_id, "bytes": 500}]
    assert document["leftovers"] == [{"name": "00000000-1-1-00", "size_bytes": 70, "pid": 1, "owner": "unknown"}]
    text = call("du", store_path).out
    assert "1 pack (500 B) that no commit names" in text
    assert "tmp/00000000-1-1-00: 70 B" in text


# --- verify ---


@pytest.mark.parametrize("read_data", [False, True])
def test_verify_of_a_good_store_is_code_0(sample: Sample, read_data: bool) -> None:
    called = call("verify", sample.path, *["--read-data"] * read_data, "--json")
    assert called.code == 0
    document = called.json
    assert (document["ok"], document["problems"], document["affected"]) == (True, [], [])
    assert document["snapshot_count"] == 6
    assert document["is_data_read"] is read_data
    assert (document["read_bytes"] > 5 * WEIGHT_BYTES) is read_data
    assert ("Add --read-data" in call("verify", sample.path, *["--read-data"] * read_data).out) is not read_data


# --- audit ---


class Odd:
    """Only pickle represents this."""

    def __init__(self, value: Any) -> None:
        self.value = value


def test_audit_lists_pickles_by_path_with_what_they_import_and_exits_with_1(store_path: Path) -> None:
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"a": {"odd": Odd(os.getcwd), "n": 1}, "b": {"n": 2}}, allow_pickle=True)
        store.commit(2, {"a": {"n": 1}, "b": {"n": 2}})
    called = call("audit", store_path, 1, "--json")
    assert called.code == 1
    (leaf,) = called.json["leaves"]
    assert (leaf["path"], leaf["run"], leaf["step"]) == ("a/odd", "main", 1)
    assert set(leaf["imports"]) >= {f"{Odd.__module__}.Odd", "posix.getcwd"}
    assert call("audit", store_path).code == 0
    assert call("audit", store_path, "--all").code == 1
    assert "a/odd" in call("audit", store_path, "--all").out


def test_audit_runs_no_pickle(store_path: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"a": {"bad": Hostile()}}, allow_pickle=True)
    called = call("audit", store_path, "--json")
    assert called.json["leaves"][0]["imports"] == ["posix.mkdir"]
    assert not marker.exists()


def test_audit_of_a_store_without_pickles_is_code_0(sample: Sample) -> None:
    called = call("audit", sample.path, "--all", "--json")
    assert (called.code, called.json["ok"], called.json["leaves"]) == (0, True, [])
    assert called.json["snapshot_count"] == 6


@pytest.mark.parametrize(
    ("pickled", "imports"),
    [
        (b"cos\nsystem\n.", ["os.system"]),  # protocol 0: GLOBAL
        (b"(S'x'\nios\nsystem\n.", ["os.system"]),  # INST
        (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93.", ["os.system"]),  # strings, memoized, STACK_GLOBAL
        (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x940h\x00h\x01\x93.", ["os.system"]),  # names from the memo
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x06getpid\x93.", ["os.system", "system.getpid"]),
        (b"\x80\x04)\x93.", ["?.?"]),
        (b"\x80\x02\x82\x01.", ["copyreg extension 1"]),
        (b"\x80\x04K\x01.", []),
    ],
)
def test_imports_are_read_off_the_instructions(pickled: bytes, imports: list[str]) -> None:
    assert list(pickletools.genops(pickled))
    assert imports_of(pickled) == (tuple(imports), "")


def test_a_cut_pickle_gives_the_imports_before_the_cut() -> None:
    found, error = imports_of(b"cos\nsystem\nX\xff\xff")
    assert found == ("os.system",)
    assert "not a whole pickle" in error
