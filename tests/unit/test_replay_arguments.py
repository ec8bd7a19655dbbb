"""Arguments of the wrong type: an error of casckpt, before anything is done, that says which one it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from casckpt.errors import InvalidInputError
from casckpt.integrations.replay import Sb3Buffer, TianshouBuffer, TorchRlBuffer, rings
from casckpt.replay import Arrays, Position, Ring, Sliced
from tests.unit.rings import PlainRing
from tests.unit.stores import open_store

Call = tuple[Callable[[], Any], str]  # and what its error says first


def _of_view(view: Any) -> Iterator[Call]:
    for wrong in ("3", 2.5, None, [3], True):
        yield lambda wrong=wrong: view.rows(wrong, 20), "start="
        yield lambda wrong=wrong: view.rows(10, wrong), "stop="
        yield lambda wrong=wrong: view.last(wrong), "row_count="
        if wrong is not None:
            yield lambda wrong=wrong: view.trimmed(rows=wrong), "rows="
            yield lambda wrong=wrong: view.trimmed(since_step=wrong), "since_step="
    for age in ("3", [3], True, -1, float("nan")):
        yield lambda age=age: view.trimmed(max_age_s=age), "max_age_s="
    for rows in (12, "12", None, ["12"], [12.5], [True, False], [[12]]):
        yield lambda rows=rows: view.take(rows), "rows="
    for columns in ("obs", b"obs", 3):
        yield lambda columns=columns: view.rows(10, 12, columns), "columns="
        yield lambda columns=columns: view.take([12], columns), "columns="
        yield lambda columns=columns: list(view.batches(columns)), "columns="
        yield lambda columns=columns: list(view.mapped(columns)), "columns="
        for form in ("table", "reader", "dataset"):
            yield lambda columns=columns, form=form: view.to_arrow(columns, form=form), "columns="
        yield lambda columns=columns: view.write("x", "arrow", columns), "columns="
    yield lambda: view.to_arrow(form=["table"]), "form="
    yield lambda: view.write("x", "csv"), "file_format="
    yield lambda: view.write(0, "arrow"), "path="
    yield lambda: view.copy_into(view), "a RingView is no ring buffer"


def _of_ring(live: PlainRing) -> Iterator[Call]:
    ring = live.ring()
    for name in ("keep_rows", "keep_steps"):
        for wrong in ("3", 2.5, True, 0):
            yield lambda name=name, wrong=wrong: live.ring(**{name: wrong}), f"{name}="
    yield lambda: live.ring(is_raw="yes"), "is_raw="
    yield lambda: live.ring(trust=["counter"]), "trust="
    yield lambda: live.ring(on_capacity=None), "on_capacity="
    yield lambda: live.ring(episode_end=3), "episode_end=3"
    for name in ("rows", "since_step", "max_age_s"):
        yield lambda name=name: ring.restoring(**{name: "3"}), f"{name}="
    yield lambda: ring.restoring(open_episode=3), "open_episode="
    yield lambda: ring.cold(["updates"]), "dependents="
    yield lambda: ring.cold({"updates": 0}), r"dependents\['updates'\]="
    yield lambda: ring.cold({}, reset="yes"), "reset="


def _of_adapters(live: PlainRing) -> Iterator[Call]:
    def arrays(columns: Any = live.columns(), owner: Any = live, **options: Any) -> Any:  # noqa: B008
        return Arrays(columns, owner, **{"total": "total", **options})

    yield lambda: arrays([live.obs]), "columns="
    yield lambda: arrays({"x": [1, 2, 3]}), "columns need one row per slot"
    yield lambda: arrays({"x": np.float32(1)}), "columns need one row per slot"
    yield lambda: arrays(mutable="obs"), "mutable="
    yield lambda: arrays(mutable=3), "mutable="
    yield lambda: arrays(total=3), "total="
    yield lambda: arrays(total=None, position="position", full=True), "full="
    yield lambda: arrays(owner={"total": "many"}), "'total' of a dict is 'many'"
    yield lambda: arrays(owner={"total": None}), "'total' of a dict is None"
    rows = [np.zeros(3)]
    yield lambda: Sliced(3, capacity=3), "buffer="
    yield lambda: Sliced(rows, capacity="3"), "capacity="
    yield lambda: Sliced(rows, capacity=0), "capacity="
    yield lambda: Sliced(rows, capacity=3, load=rows), "load="
    yield lambda: Sliced(rows, capacity=3, total=1), "total="
    for wrong in (None, (10, 0, 0, 0), Position("10", 0, 0, 0), Position(10, 0, 0, 1.5)):  # type: ignore[arg-type]
        own = SimpleNamespace(position=lambda wrong=wrong: wrong, columns=dict, mutable=dict, place=print)
        yield lambda own=own: Ring(own), r"position\(\)"
    own = SimpleNamespace(position=lambda: Position(10, 0, 0, 0), columns=list, mutable=dict, place=print)
    yield lambda: Ring(own), r"columns\(\)="
    for adapter in (Sb3Buffer, TianshouBuffer, TorchRlBuffer):
        for other in (None, live, "buffer"):
            yield lambda adapter=adapter, other=other: adapter(other), "a .* is no buffer of"
    yield lambda: rings(None), "a builtins.NoneType is no buffer of"


def test_what_is_of_the_wrong_type_is_named(store_path: Path) -> None:
    live = PlainRing(20)
    live.add(30)
    with open_store(store_path) as store:
        store.commit(1, {"replay": live.ring()})
        view = store.restore(1)["replay"]
        calls = [*_of_view(view), *_of_ring(live), *_of_adapters(live)]
        for call, text in calls:
            with pytest.raises(InvalidInputError, match="^" + text):
                call()
        assert len(calls) > 80
        for path in ("replay/columns", "replay/columns/obs"):
            with pytest.raises(InvalidInputError, match="'replay' is a ring, whose rows are read from its view"):
                store.restore(1, only=[path])
        assert store.restore(1, only=["replay/total"]) == {"replay": {"total": 30}}
        ring = live.ring()
        with pytest.raises(InvalidInputError, match="components 'a' and 'b' are the same Ring"):
            store.commit(2, {"a": ring, "b": ring})
        assert view.rows(np.int64(10), np.uint8(12), np.array(["obs"]))["obs"].shape == (2, 24)
        assert [rows.keys() for _, rows in view.batches(iter(["obs", "done"]))] == [{"obs", "done"}] * len(
            view.segments()
        )
