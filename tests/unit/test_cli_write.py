"""`tag`, `untag`, `annotate`, `retire`: what they add to the timeline, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

import casckpt
from tests.unit.cli_stores import call, make_store


@pytest.fixture
def store(store_path: Path) -> Path:
    """One run "main" with steps 1 to 3."""
    with casckpt.open(store_path, create=True) as store:
        for step in (1, 2, 3):
            store.commit(step, {"a": {"n": step}}, metrics={"return": float(step)})
    return store_path


def test_a_tag_names_a_snapshot_for_every_later_command(store: Path) -> None:
    called = call("tag", store, "best", 2, "--json")
    assert called.code == 0
    assert (called.json["tag"], called.json["snapshot"]["step"]) == ("best", 2)
    assert call("show", store, "best", "--json").json["snapshot"]["step"] == 2
    assert list(call("tag", store, "--json").json["tags"]) == ["best"]
    assert call("untag", store, "best").code == 0
    assert call("show", store, "best").code == 3
    assert call("tag", store).out == "run main has no tags\n"


def test_a_tag_without_a_reference_means_the_latest(store: Path) -> None:
    assert call("tag", store, "now", "--json").json["snapshot"]["step"] == 3


def test_a_taken_tag_is_code_9_and_a_missing_one_3(store: Path) -> None:
    assert call("tag", store, "best", 2).code == 0
    called = call("tag", store, "best", 3)
    assert called.code == 9
    assert "best" in called.err
    assert call("show", store, "best", "--json").json["snapshot"]["step"] == 2
    assert call("untag", store, "nonesuch").code == 3


@pytest.mark.parametrize("name", ["latest", "12", "deadbeef", "a/b", "a@b"])
def test_a_tag_that_reads_like_something_else_is_code_2(store: Path, name: str) -> None:
    assert call("tag", store, name, 1).code == 2
    assert call("tag", store, "--json").json["tags"] == {}


def test_annotations_join_metrics_and_labels_and_keep_the_id(store: Path) -> None:
    before = call("show", store, 2, "--json").json["snapshot"]
    called = call("annotate", store, 2, "-m", "eval=3.5", "-m", "n=7", "-m", "note=a=b", "--label", "who=me", "--json")
    assert called.code == 0
    after = call("show", store, 2, "--json").json["snapshot"]
    assert after["metrics"] == {"return": 2.0, "eval": 3.5, "n": 7, "note": "a=b"}
    assert after["labels"] == {"who": "me"}
    assert after["id"] == before["id"]
    assert called.json["snapshot"] == after


@pytest.mark.parametrize("options", [(), ("-m", "eval"), ("-m", "=3"), ("-l", "who")])
def test_annotations_that_say_nothing_are_code_2(store: Path, options: tuple[str, ...]) -> None:
    assert call("annotate", store, 2, *options).code == 2
    assert call("show", store, 2, "--json").json["snapshot"]["metrics"] == {"return": 2.0}


def test_a_retired_snapshot_is_hidden_and_still_there(store: Path) -> None:
    assert call("retire", store, 3).code == 0
    assert [row["step"] for row in call("log", store, "--json").json["rows"]] == [2, 1]
    assert call("show", store, "--json").json["snapshot"]["step"] == 2
    assert call("show", store, 3, "--json").json["snapshot"]["is_retired"] is True


def test_a_store_with_several_runs_asks_which_one(store_path: Path) -> None:
    make_store(store_path)
    for arguments in (("tag", "x", "1"), ("retire", "1"), ("annotate", "1", "-m", "a=1"), ("untag", "good")):
        called = call(arguments[0], store_path, *arguments[1:])
        assert called.code == 2
        assert "walker, other" in called.err
    assert call("retire", store_path, 1, "--run", "wlaker").code == 3
    assert call("annotate", store_path, 1, "-m", "a=1", "--run", "other").code == 0
    assert call("show", store_path, 1, "--run", "other", "--json").json["snapshot"]["metrics"]["a"] == 1


def test_a_training_that_is_open_goes_on_after_a_command_wrote(store: Path) -> None:
    with casckpt.open(store) as training:
        assert call("tag", store, "best", 2).code == 0
        assert call("annotate", store, 3, "-m", "eval=1").code == 0
        assert training.commit(4, {"a": {"n": 4}}).step == 4
        assert list(training.tags()) == ["best"]
    assert [row["step"] for row in call("log", store, "--json").json["rows"]] == [4, 3, 2, 1]


def test_the_message_of_a_busy_store_is_code_5(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from casckpt.errors import BusyError
    from casckpt.store.store import Store

    def tag(*_: object) -> None:
        raise BusyError("held by process 7. Wait.", holder="process 7")

    monkeypatch.setattr(Store, "tag", tag)
    called = call("tag", store, "x", 1)
    assert (called.code, called.err) == (5, "casckpt: held by process 7. Wait.\n")
