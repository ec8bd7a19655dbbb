"""Rows taken out: Arrow tables and files, opened by others without casckpt, and the commands that write them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars
import pyarrow.dataset
import pyarrow.ipc
import pytest
import torch
from pyarrow import parquet

from casckpt.cli import _exits
from casckpt.errors import AlreadyExistsError, CorruptionError, InvalidInputError
from casckpt.replay import Arrays, Ring
from tests.unit.cli_stores import call
from tests.unit.rings import make_ring_store
from tests.unit.stores import open_store


def test_table_has_the_rows_in_order_and_says_what_they_were(store_path: Path) -> None:
    live = make_ring_store(store_path)
    expected = live.expected(40, 140)
    with open_store(store_path) as store:
        view = store.restore(2)["replay"]
        table = view.to_arrow()
        assert table.num_rows == 100
        obs = np.array(table.column("obs").to_pylist(), np.uint8)
        np.testing.assert_array_equal(obs, expected["obs"])
        np.testing.assert_array_equal(np.array(table.column("action").to_pylist(), np.float32), expected["action"])
        np.testing.assert_array_equal(table.column("done").to_numpy().astype(bool), expected["done"])
        assert json.loads(table.schema.metadata[b"casckpt"]) == {
            "ring": 1, "first_row": 40, "total": 140, "capacity": 100, "head": 40, "tail": 40,
        }  # fmt: skip
        assert table.schema.field("done").metadata[b"dtype"] == b"|b1"
        assert table.schema.field("action").metadata[b"shape"] == b"[2]"
        table.validate(full=True)
        assert [batch.num_rows for batch in view.to_arrow(form="reader")] == [30, 30, 40]
        with pytest.raises(InvalidInputError, match="table, reader or dataset"):
            view.to_arrow(form="frame")
        lazy = view.trimmed(rows=10).to_arrow(["done"], form="reader")
        assert lazy.read_all().column("done").to_pylist() == [int(done) for done in expected["done"][-10:]]


# --- data sets ---


def test_dataset_is_scanned_again_and_again_by_segments_that_are_read_when_they_are_wanted(store_path: Path) -> None:
    live = make_ring_store(store_path)
    expected = live.expected(40, 140)
    with open_store(store_path) as store:
        view = store.restore(2)["replay"]
        read: list[int] = []
        inner = view._source.read
        view._source.read = lambda wanted: (read.extend(each.start for each in wanted), inner(wanted))[1]
        rows = view.to_arrow(["action", "done"], form="dataset")
        assert isinstance(rows, pyarrow.dataset.Dataset)
        assert rows.schema.names == ["action", "done"]
        fragments = list(rows.get_fragments())
        assert (len(fragments), read) == (3, [])
        done = [row for row in range(100) if expected["done"][row]]
        for _ in range(2):
            table = rows.to_table()
            np.testing.assert_array_equal(np.array(table.column("action").to_pylist(), np.float32), expected["action"])
            found = rows.to_table(filter=pyarrow.dataset.field("done") == 1, columns=["action"])
            np.testing.assert_array_equal(np.array(found.column(0).to_pylist(), np.float32), expected["action"][done])
        assert sorted(set(read)) == [40, 70, 100]
        read.clear()
        np.testing.assert_array_equal(fragments[1].to_table().column("done").to_numpy(), expected["done"][30:60])
        assert set(read) == {70}
        assert view.trimmed(rows=0).to_arrow(form="dataset").to_table().num_rows == 0
        del view._source.read


@pytest.mark.full
def test_dataset_is_queried_by_duckdb_and_polars(store_path: Path) -> None:
    live = make_ring_store(store_path)
    expected = live.expected(40, 140)
    sums = expected["action"].astype(float).sum(axis=0)
    with open_store(store_path) as store:
        rows = store.restore(2)["replay"].to_arrow(form="dataset")
        query = "select count(*), sum(done), sum(action[1]::double), sum(action[2]::double) from rows"
        (found,) = duckdb.sql(query).fetchall()
        assert found[:2] == (100, expected["done"].sum())
        assert found[2:] == pytest.approx(tuple(sums))
        counted = polars.scan_pyarrow_dataset(rows).filter(polars.col("done") == 1).select(polars.len()).collect()
        assert counted.item() == expected["done"].sum()


def test_dataset_of_damaged_rows_says_which_and_reads_the_others(store_path: Path) -> None:
    row = make_ring_store(store_path).log[80][0].tobytes()
    with open_store(store_path) as store:
        rows = store.restore(2)["replay"].to_arrow(["obs"], form="dataset")
        fragments = list(rows.get_fragments())
        (entry,) = [path for path in store_path.glob("timeline/*/*") if row in path.read_bytes()]
        data = bytearray(entry.read_bytes())
        data[data.index(row)] ^= 1
        entry.write_bytes(data)
        with pytest.raises(CorruptionError, match="rows 70 to 100"):
            rows.to_table()
        assert fragments[0].to_table().num_rows == 30


@pytest.mark.parametrize(
    ("column", "arrow_type"),
    [
        (np.arange(6, dtype=np.int16), "int16"),
        (np.arange(6, dtype=">f4"), "fixed_size_binary[4]"),
        (np.arange(6) * 1j, "fixed_size_binary[16]"),
        (np.arange(6).astype("M8[s]"), "int64"),
        (np.arange(6).astype("U3"), "fixed_size_binary[12]"),
        (np.arange(6, dtype=np.float16), "halffloat"),
        (np.array([(1, 2.5)] * 6, "i4,f8"), "fixed_size_binary[12]"),
        (np.full(6, np.nan, np.float32), "float"),
        (torch.arange(6, dtype=torch.bfloat16), "uint16"),
        (torch.arange(6).to(torch.float8_e5m2), "uint8"),
        (torch.arange(6) > 3, "uint8"),
        (torch.arange(12, dtype=torch.float64).reshape(6, 1, 2), "fixed_size_list<item: double not null>[2]"),
        (np.zeros((6, 0)), "fixed_size_list<item: double not null>[0]"),
    ],
)
def test_every_kind_of_column_keeps_its_bytes(store_path: Path, column: Any, arrow_type: str) -> None:
    ring = Ring(Arrays({"x": column, "n": np.arange(6)}, {"total": 6}, total="total"))
    before = plain_bytes(column)
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        table = store.restore(1)["replay"].to_arrow()
        column[:] = column[:1].copy() if isinstance(column, np.ndarray) else column[:1].clone()
        store.restore_into({"replay": ring}, 1)
        assert plain_bytes(column) == before
    assert str(table.schema.field("x").type) == arrow_type
    found = table.column("x").combine_chunks()
    values = found.values if arrow_type.startswith("fixed_size_list") else found
    stored = values.buffers()[1]
    assert (b"" if stored is None else stored.to_pybytes()) == before


def plain_bytes(column: Any) -> bytes:
    """The elements of an array or tensor in C order."""
    plain = column.view(torch.uint8).numpy() if isinstance(column, torch.Tensor) else column
    return np.ascontiguousarray(plain).tobytes()


READERS = {
    "pyarrow": "import pyarrow.dataset as ds; t = ds.dataset(path, format=kind).to_table()",
    "polars": "import polars as pl; t = (pl.read_ipc if kind == 'arrow' else pl.read_parquet)(path).to_arrow()",
    "duckdb": "import duckdb; t = duckdb.sql(f\"from '{path}'\").to_arrow_table()",
}
PROGRAM = """
import sys
path, kind = sys.argv[1:]
{reading}
print([sum(row) for row in t.column("obs").to_pylist()], t.column("done").to_pylist())
assert "casckpt" not in sys.modules
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("library", "kind"),
    [("pyarrow", "arrow"), ("pyarrow", "parquet"), ("polars", "arrow"), ("polars", "parquet"), ("duckdb", "parquet")],
)
def test_exported_file_is_opened_without_casckpt(tmp_path: Path, library: str, kind: str) -> None:
    live = make_ring_store(tmp_path / "store")
    target = tmp_path / f"rows.{kind}"
    assert call("replay", "export", tmp_path / "store", "2", "replay", target).code == 0
    program = PROGRAM.format(reading=READERS[library])
    run = subprocess.run([sys.executable, "-c", program, target, kind], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    expected = live.expected(40, 140)
    sums = expected["obs"].sum(axis=1, dtype=int).tolist()
    assert run.stdout.strip() == f"{sums} {expected['done'].astype(int).tolist()}"


def test_export_of_a_snapshot_has_the_rows_of_its_rings(tmp_path: Path) -> None:
    live = make_ring_store(tmp_path / "store")
    exported = call("export", tmp_path / "store", "2", tmp_path / "out", "--json").json
    assert exported["components"]["replay"]["rows"] == "replay.arrow"
    assert "rows" not in exported["components"]["counters"]
    table = pyarrow.ipc.open_file(tmp_path / "out" / "step_0000000002" / "replay.arrow").read_all()
    assert table.column("done").to_pylist() == live.expected(40, 140)["done"].astype(int).tolist()


def test_show_tells_where_the_ring_stood(tmp_path: Path) -> None:
    make_ring_store(tmp_path / "store")
    shown = call("replay", "show", tmp_path / "store", "1", "replay", "--json").json
    assert shown["ring"] == {"capacity": 100, "head": 70, "tail": 0, "first": 0, "total": 70}
    assert shown["columns"]["action"] == {"kind": "numpy", "dtype": "<f4", "shape": [2], "row_size": 8}
    assert shown["segments"] == [{"first_row": 0, "rows": 70, "step": 1}]
    assert shown["file"] is None
    text = call("replay", "show", tmp_path / "store", "2", "replay").out
    assert "rows 40 to 140 of capacity 100" in text
    assert "head slot 40, tail slot 40, 100 rows" in text


LIMITS = (("--since-step", 2, 70), ("--max-age", 0, 70), ("--max-age", 1e6, 100))


def test_export_of_some_columns_and_the_newest_rows(tmp_path: Path) -> None:
    live = make_ring_store(tmp_path / "store")
    target = tmp_path / "new.parquet"
    words = ("replay", "export", tmp_path / "store", "latest", "replay", target, "--column", "done", "--last", "7")
    assert call(*words, "--json").json["file"] == {"path": str(target), "format": "parquet", "rows": 7}
    table = parquet.read_table(target)
    assert table.column_names == ["done"]
    assert table.column("done").to_pylist() == live.expected(133, 140)["done"].astype(int).tolist()
    for number, (*limit, row_count) in enumerate(LIMITS):
        path = tmp_path / f"{number}.arrow"
        assert call(*words[:5], path, *limit, "--json").json["file"]["rows"] == row_count
    again = call(*words)
    assert again.code == _exits.code_of(AlreadyExistsError("x"))
    assert "is there already" in again.err
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("show", "STORE", "1", "counters"), "is no ring"),
        (("show", "STORE", "1", "nothing"), "no component"),
        (("export", "STORE", "1", "replay", "rows.csv"), "which format"),
        (("export", "STORE", "1", "replay", "OUT", "--column", "reward"), "no column"),
    ],
)
def test_what_cannot_be_shown_or_written_is_told(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    make_ring_store(tmp_path / "store")
    places = {"STORE": tmp_path / "store", "OUT": tmp_path / "out.arrow"}
    called = call("replay", *[places.get(word, word) for word in words])
    assert called.code != 0
    assert text in called.err
    assert not (tmp_path / "out.arrow").exists()
