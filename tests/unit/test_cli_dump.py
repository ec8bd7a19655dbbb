"""`casckpt dump`: each kind of record, whole and damaged, against what the format's own decoders say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import casckpt
from casckpt.cli.dump import lines_of
from casckpt.format.record import CHUNK, MANIFEST, STRUCTURE
from casckpt.testing.anatomy import dissect
from tests.unit.cli_stores import call, entry_path, flip, make_store


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests that change nothing in it."""
    path: Path = tmp_path_factory.mktemp("dump") / "store"
    make_store(path)
    return path


@pytest.fixture
def store(whole: Path, store_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(whole, store_path)
    return store_path


def checks(document: Any) -> dict[str, bool]:
    return {check["what"]: check["ok"] for check in document["checks"]}


def test_entries_are_decoded(whole: Path) -> None:
    document = call("dump", whole, 1, "--json").json
    body = document["fields"]["body"]
    assert body["body"]["kind_of_entry"] == "commit"
    assert (body["body"]["run"], body["body"]["step"]) == ("walker", 1)
    assert document["size_bytes"] == entry_path(whole, 1).stat().st_size
    assert document["fields"]["magic"] == b"CASENTR1".hex()
    assert all(checks(document).values())
    kinds = {n: call("dump", whole, n, "--json").json["fields"]["body"]["body"]["kind_of_entry"] for n in (0, 5, 6)}
    assert kinds == {0: "create", 5: "tag", 6: "retire"}


def test_every_record_of_every_file_is_listed_with_its_place(whole: Path) -> None:
    anatomy = dissect(str(whole))
    regions = {(region.path, region.offset): region for region in anatomy.regions if region.name.endswith("magic")}
    for file in [*whole.glob("packs/*/*"), *(entry_path(whole, seq) for seq in range(9))]:
        name = file.name if file.parent.parent.name == "packs" else str(int(file.name))
        relative = str(file.relative_to(whole))
        expected = {
            (offset, region.object_id.hex())
            for (path, offset), region in regions.items()
            if path == relative and region.object_id is not None and "record" in region.name
        }
        document = call("dump", whole, name, "--json").json
        assert {(part["offset"], part["object_id"]) for part in document["parts"]} == expected
        assert all(part["is_payload_good"] for part in document["parts"])


@pytest.mark.parametrize("kind", [CHUNK, MANIFEST, STRUCTURE])
def test_objects_are_found_by_prefix_and_decoded(whole: Path, kind: int) -> None:
    name = {CHUNK: "chunk", MANIFEST: "manifest", STRUCTURE: "structure"}[kind]
    part = next(
        part
        for pack in whole.glob("packs/*/*")
        for part in call("dump", whole, pack.name, "--json").json["parts"]
        if part["kind"] == name
    )
    document = call("dump", whole, part["object_id"][:16], "--json").json
    assert document["thing"] == f"object {part['object_id']}"
    assert document["fields"]["kind"] == name
    assert document["size_bytes"] == part["plain_size"]
    assert part["offset"] in [each["offset"] for each in document["parts"]]
    content = document["fields"]["content"]
    if kind == CHUNK:
        plain = dissect(str(whole)).plain
        assert bytes.fromhex(content) == plain[bytes.fromhex(part["object_id"])]  # type: ignore[index]
    else:
        assert content["version"] == 1


def test_a_snapshot_is_an_object_too(whole: Path) -> None:
    snapshot = call("show", whole, "good", "--run", "walker", "--json").json["snapshot"]
    content = call("dump", whole, f"object:{snapshot['id'][:12]}", "--json").json["fields"]["content"]
    assert (content["step"], content["parent"]) == (2, snapshot["parent"])


def test_document_and_index(whole: Path) -> None:
    document = call("dump", whole, "document", "--json").json
    assert (
        document["fields"]["casckpt.json"]["store_id"] == json.loads((whole / "casckpt.json").read_text())["store_id"]
    )
    index = call("dump", whole, "index", "--json").json
    assert index["ok"] is True
    assert index["fields"]["rows"]["snaps"] == 6
    assert index["fields"]["applied"]["seq"] == 8
    (folder,) = (each for each in (whole / "index").iterdir() if each.is_dir())
    assert json.loads(index["fields"]["pointer"])["generation"] == int(folder.name)


@pytest.mark.parametrize("thing", ["", "abc", "zzzzzzzz", "entry:x", "deadbeef@", "../x"])
def test_what_means_nothing_is_code_2(whole: Path, thing: str) -> None:
    called = call("dump", whole, thing)
    assert called.code == 2
    assert called.out == ""


@pytest.mark.parametrize("thing", ["99", "entry:7777", "f" * 32, "pack:00000000", "object:" + "e" * 64])
def test_what_is_not_there_is_code_3(whole: Path, thing: str) -> None:
    assert call("dump", whole, thing).code == 3


def test_an_ambiguous_prefix_is_code_2(store: Path) -> None:
    for last in "01":
        folder = store / "packs" / "aa"
        folder.mkdir(exist_ok=True)
        (folder / ("a" * 31 + last)).write_bytes(b"")
    called = call("dump", store, "pack:aaaaaaaa")
    assert called.code == 2
    assert "2 packs" in called.err


# --- damaged ---


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 100, -1])
def test_a_cut_entry_shows_what_is_left(store: Path, size: int) -> None:
    path = entry_path(store, 1)
    path.write_bytes(path.read_bytes()[:size])
    called = call("dump", store, 1, "--json")
    assert called.code == 1
    assert checks(called.json)["everything"] is False
    assert ("body_size" in called.json["fields"]) is (size == -1 or size >= 64)
    assert call("dump", store, 1).code == 1


def test_each_check_of_an_entry_fails_by_itself(store: Path) -> None:
    whole = entry_path(store, 1).read_bytes()
    for offset, failing in ((10, {"header check", "number"}), (50, {"header check"}), (80, set())):
        entry_path(store, 1).write_bytes(whole)
        flip(entry_path(store, 1), offset)
        failed = {what for what, is_ok in checks(call("dump", store, 1, "--json").json).items() if not is_ok}
        assert failed - {"body"} == {*failing, "digest of all bytes", "everything"}


def test_a_pack_without_its_footer_is_scanned(store: Path) -> None:
    pack = max(store.glob("packs/*/*"), key=lambda path: path.stat().st_size)
    whole = call("dump", store, pack.name, "--json").json
    pack.write_bytes(pack.read_bytes()[:-100])
    called = call("dump", store, pack.name, "--json")
    assert called.code == 1
    assert called.json["fields"]["table"].startswith("scanned")
    assert checks(called.json)["trailer"] is False
    assert called.json["parts"] == whole["parts"]


def test_a_damaged_payload_is_marked(store: Path) -> None:
    pack = max(store.glob("packs/*/*"), key=lambda path: path.stat().st_size)
    part = max(call("dump", store, pack.name, "--json").json["parts"], key=lambda part: part["stored_size"])
    flip(pack, part["offset"] + part["header_size"] + 5)
    called = call("dump", store, pack.name, "--json")
    assert called.code == 1
    assert [each["object_id"] for each in called.json["parts"] if not each["is_payload_good"]] == [part["object_id"]]
    assert "DAMAGED" in call("dump", store, pack.name).out
    called = call("dump", store, part["object_id"], "--json")
    assert called.code == 1
    assert checks(called.json)["content has this address"] is False


def test_a_damaged_record_header_is_told(store: Path) -> None:
    pack = max(store.glob("packs/*/*"), key=lambda path: path.stat().st_size)
    part = call("dump", store, pack.name, "--json").json["parts"][0]
    flip(pack, part["offset"] + 20)
    document = call("dump", store, pack.name, "--json").json
    assert "header check failed" in document["parts"][0]["error"]
    assert call("dump", store, pack.name).code == 1


def test_a_file_that_is_no_pack_is_told(store: Path) -> None:
    pack = next(iter(store.glob("packs/*/*")))
    pack.write_bytes(b"not a pack")
    called = call("dump", store, pack.name, "--json")
    assert called.code == 1
    assert called.json["fields"]["header"] == b"not a pack".hex()


def test_a_folder_without_a_store_is_code_3(tmp_path: Path) -> None:
    for thing in ("document", "index", "1", "deadbeef"):
        assert call("dump", tmp_path, thing).code == 3


# --- text ---


def test_long_bytes_are_cut_in_text_and_whole_on_request(store_path: Path) -> None:
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"a": {"raw": np.arange(2048, dtype=np.uint32).astype(np.uint8)}})
    chunk = next(
        part
        for part in call("dump", store_path, 1, "--json").json["parts"]
        if part["kind"] == "chunk" and part["plain_size"] == 2048
    )
    text = call("dump", store_path, chunk["object_id"]).out
    assert "1536 more bytes: --all" in text
    assert "000001e0" in text
    assert "00000200" not in text
    assert "000007e0" in call("dump", store_path, chunk["object_id"], "--all").out


def test_fields_become_indented_lines() -> None:
    value = {"a": 1, "id": b"\x01\x02", "magic": b"CREC", "list": [1, 2], "rows": [{"x": None}], "none": {}}
    assert lines_of(value, None) == [
        "a: 1",
        "id: 0102",
        "magic: CREC",
        "list: 1, 2",
        "rows:",
        "  0:",
        "    x: None",
        "none: none",
    ]
