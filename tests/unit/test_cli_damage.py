"""Every command on damaged stores: it answers with rows and codes, and never with a traceback (`call` checks that)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import casckpt
from tests.unit.cli_stores import call, entry_path, flip, make_store, weights

COMMIT_1, COMMIT_2, COMMIT_3, COMMIT_4, TAG, RETIRE, SIDE, OTHER = range(1, 9)  # timeline entries of `make_store`


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("damage") / "store"
    make_store(path)
    return path


@pytest.fixture(params=["index", "no index"])
def store(whole: Path, store_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy to damage: with an index of its own that saw it whole, or without one."""
    shutil.copytree(whole, store_path, ignore=shutil.ignore_patterns("index"))
    if request.param == "index":
        casckpt.open(store_path).close()
    return store_path


def states(store: Path) -> dict[str, str]:
    """State of each row of `log`: snapshots by branch@step, other rows by entry."""
    rows = call("log", store, "--all-runs", "--retired", "-n", 0, "--json").json["rows"]
    return {
        f"{row['branch']}@{row['step']}" if row["run"] == "walker" else str(row["seq"]): row["state"] for row in rows
    }


def pack_of(store: Path, seq: int) -> Path:
    """The one pack that a commit brought."""
    (pack,) = call("dump", store, seq, "--json").json["fields"]["body"]["body"]["packs"]
    pack_id = pack["pack_id"]
    return store / "packs" / pack_id[:2] / pack_id


def verified(store: Path, *options: str) -> Any:
    """What `verify` says of a damaged store; every command after it must still work."""
    called = call("verify", store, *options, "--json")
    assert called.code == 1
    assert called.json["ok"] is False
    assert call("verify", store, *options).code == 1
    assert call("log", store).code == call("du", store).code == call("runs", store).code == 0
    return called.json


def test_a_whole_copy_is_whole(store: Path) -> None:
    assert states(store) == {
        "main@1": "consistent",
        "main@2": "consistent",
        "main@3": "retired",
        "main@4": "consistent",
        "side@3": "mixed",
        str(OTHER): "consistent",
    }
    assert call("verify", store).code == 0


def test_a_flipped_byte_in_an_entry_is_a_row_in_the_log(store: Path) -> None:
    flip(entry_path(store, COMMIT_4), 150)
    found = states(store)
    damaged = {name for name, state in found.items() if state == "damaged"}
    assert damaged in ({"main@4"}, {str(COMMIT_4)})  # an index that saw it whole knows the step
    assert {found["main@1"], found["main@2"]} == {"consistent"}
    text = call("log", store, "--run", "walker").out
    assert "digest mismatch" in text
    assert "casckpt verify" in text
    assert any("digest mismatch" in problem["message"] for problem in verified(store)["problems"])


def test_a_cut_newest_entry_is_a_row_in_the_log(store: Path) -> None:
    path = entry_path(store, OTHER)
    path.write_bytes(path.read_bytes()[:40])
    assert states(store)[str(OTHER)] == "damaged"
    assert states(store)["main@4"] == "consistent"
    document = verified(store)
    assert any("40 bytes" in problem["message"] for problem in document["problems"])


def test_a_missing_entry_is_a_row_in_the_log(store: Path) -> None:
    entry_path(store, COMMIT_2).unlink()
    found = states(store)
    incomplete = {name for name, state in found.items() if state == "incomplete"}
    assert incomplete >= {"main@2"} or incomplete >= {str(COMMIT_2)}
    assert found["main@1"] == "consistent"
    verified(store)


def test_a_missing_pack_makes_its_steps_incomplete_and_no_others(store: Path) -> None:
    pack_of(store, COMMIT_4).unlink()
    found = states(store)
    assert {name for name, state in found.items() if state == "incomplete"} == {"main@4"}
    document = verified(store)
    assert {(row["branch"], row["step"]) for row in document["affected"]} == {("main", 4)}
    assert document["affected"][0]["run"] == "walker"
    assert "policy" in document["affected"][0]["components"]
    assert "frozen" not in document["affected"][0]["components"]
    called = call("show", store, "main@4", "--run", "walker", "--json")
    assert called.code == 0
    parts = called.json["components"]
    assert (parts["policy"]["state"], parts["frozen"]["state"]) == ("incomplete", "whole")
    assert call("show", store, "main@4", "--run", "walker", "--leaves").code == 0


def test_commands_that_need_the_lost_data_fail_with_a_message(store: Path, tmp_path: Path) -> None:
    pack_of(store, COMMIT_4).unlink()
    for arguments in (("diff", store, "main@1", "main@4"), ("export", store, "main@4", tmp_path / "out")):
        called = call(*arguments, "--run", "walker")
        assert called.code in (4, 7)
        assert "policy" in called.err or "counters" in called.err
    assert not list((tmp_path / "out").glob("*"))
    assert call("export", store, "main@2", tmp_path / "out", "--run", "walker").code == 0


def test_a_cut_pack_is_damage_of_its_steps(store: Path) -> None:
    pack = pack_of(store, COMMIT_4)
    pack.write_bytes(pack.read_bytes()[:-1000])
    assert {name for name, state in states(store).items() if state not in ("consistent", "mixed", "retired")} == {
        "main@4"
    }
    assert {row["step"] for row in verified(store)["affected"]} <= {4}


def test_a_flipped_byte_of_data_is_found_by_reading_it(store: Path) -> None:
    pack = pack_of(store, COMMIT_1)
    flip(pack, pack.stat().st_size // 3)
    assert call("verify", store).code == 0  # its files have the right sizes
    document = verified(store, "--read-data")
    (problem,) = document["problems"]
    assert problem["kind"] == "corrupt"
    components = {(row["run"], row["branch"], row["step"]): row["components"] for row in document["affected"]}
    assert set(components) in (
        {("walker", "main", 1), ("other", "main", 1)},  # the first policy
        {("walker", "main", step) for step in (1, 2, 3, 4)} | {("walker", "side", 3)},  # the frozen component
    )
    assert all(names in (["policy"], ["frozen"]) for names in components.values())
    text = call("verify", store, "--read-data").out
    assert "1 problem found" in text


def test_a_damaged_document_is_read_from_its_copy(store: Path) -> None:
    (store / "casckpt.json").write_bytes(b"{")
    assert call("log", store).code == 0
    called = call("dump", store, "document", "--json")
    assert called.code == 1
    assert {check["what"]: check["ok"] for check in called.json["checks"]} == {
        "casckpt.json": True,
        "copy in timeline entry 0": True,
        "casckpt.json decodes": False,
        "entry 0 decodes": True,
        "both are equal": False,
    }
    assert called.json["fields"]["casckpt.json"] == b"{".hex()


def test_a_store_with_both_documents_damaged_is_corruption_for_every_command(store: Path) -> None:
    (store / "casckpt.json").write_bytes(b"{")
    flip(entry_path(store, 0), 100)
    for command in ("log", "show", "verify", "du", "audit"):
        called = call(command, store)
        assert (called.code, called.out) == (4, "")
        assert "casckpt.json" in called.err
    assert call("dump", store, "document").code == 1
    assert call("dump", store, COMMIT_1).code == 0  # single records can still be looked at
    called = call("doctor", store, "--json")
    assert called.code == 1
    assert any("casckpt.json" in each["text"] for each in called.json["findings"] if each["level"] == "problem")


def test_du_does_not_call_packs_of_damaged_entries_unfinished(store: Path) -> None:
    flip(entry_path(store, COMMIT_4), 150)
    document = call("du", store, "--json").json
    assert document["unreadable_count"] >= 1
    assert "never finished" not in call("du", store).out


def test_garbage_in_the_index_changes_no_answer(store: Path) -> None:
    expected = states(store)
    shutil.rmtree(store / "index", ignore_errors=True)
    (store / "index").write_bytes(b"garbage")
    assert states(store) == expected
    assert (store / "index").read_bytes() == b"garbage"
    findings = call("doctor", store, "--json").json["findings"]
    assert [each["level"] for each in findings if each["topic"] == "index"] == ["warn"]
    called = call("dump", store, "index", "--json")
    assert (called.code, called.json["checks"][0]["ok"]) == (1, False)


@pytest.mark.full
@pytest.mark.parametrize("damage", ["delete", "empty", "zero", "flip", "half"])
def test_no_damage_to_any_file_makes_a_command_fail_without_a_message(
    whole: Path, store_path: Path, damage: str
) -> None:
    files = [path.relative_to(whole) for folder in ("timeline", "packs") for path in whole.glob(f"{folder}/*/*")]
    for file in [Path("casckpt.json"), *files]:
        shutil.rmtree(store_path, ignore_errors=True)
        shutil.copytree(whole, store_path, ignore=shutil.ignore_patterns("index"))
        _damage(store_path / file, damage)
        assert call("log", store_path, "--all-runs").code == 0, file
        assert call("verify", store_path, "--read-data").code in (0, 1), file
        assert call("du", store_path).code == 0, file
        assert call("audit", store_path, "--all").code in (0, 1), file


def _damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "delete":
        path.unlink()
    elif how == "flip":
        flip(path, len(data) // 2)
    else:
        path.write_bytes({"empty": b"", "zero": bytes(len(data)), "half": data[: len(data) // 2]}[how])


# --- what verify remembers ---


def damaged_chunk(store: Path) -> Path:
    """Turn over one bit in the middle of the pack that step 4 brought."""
    pack = pack_of(store, COMMIT_4)
    flip(pack, pack.stat().st_size // 2)
    return pack


def test_what_verify_finds_is_stored_again_by_the_next_commit(store: Path) -> None:
    damaged_chunk(store)
    assert call("verify", store, "--read-data").code == 1
    state = {"policy": {"w": weights(4)}, "frozen": {"w": weights(99)}, "counters": {"step": 4}}
    with casckpt.open(store, run="again") as opened:
        opened.commit(1, state)
        assert (opened.restore(1)["policy"]["w"] == weights(4)).all()


def test_verify_of_a_store_that_cannot_be_written_only_reads(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged_chunk(store)
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.name != "lock.mdb"}
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert call("verify", store, "--read-data").code == 1
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.name != "lock.mdb"} == before


def test_verify_reads_where_opening_for_writing_fails(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from casckpt.store import opening

    real, modes = opening.open_store, []

    def refusing(path: Any, *, read_only: bool = False) -> Any:
        modes.append(read_only)
        if not read_only:
            raise casckpt.StorageError("read-only file system", errno=30, path=str(path))
        return real(path, read_only=True)

    monkeypatch.setattr(opening, "open_store", refusing)
    assert call("verify", store).code == 0
    assert modes == [False, True]
