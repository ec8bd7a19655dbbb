"""Settings of an engine from a value, a mapping or a file: everything can be said, and a mistake names its key."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from casckpt.engine.config import EngineConfig, StoreConfig, read_config
from casckpt.engine.engine import CheckpointEngine
from casckpt.engine.strategy import Recent, SaveStrategy
from casckpt.errors import CasckptError, InvalidInputError, NotFoundError
from tests.unit.stores import open_store

WRITTEN = {
    "store": {"path": "runs/walker", "run": "seed-0", "verify": "off", "level": "fast", "lock_timeout_s": 5},
    "save_budget": 0.05,
    "overlap": "queue",
    "queue_size": 3,
    "async_mode": False,
    "components": {
        "policy": {"every_steps": 500, "every_seconds": 1200.5, "level": "small", "expect_change": True},
        "replay": {"lane": "best_effort", "necessity": "droppable", "recent_only": {"rows": 10, "steps": 5}},
    },
}
MEANT = EngineConfig(
    save_budget=0.05,
    overlap="queue",
    queue_size=3,
    async_mode=False,
    components={
        "policy": SaveStrategy(every_steps=500, every_seconds=1200.5, level="small", expect_change=True),
        "replay": SaveStrategy(lane="best_effort", necessity="droppable", recent_only=Recent(rows=10, steps=5)),
    },
    store=StoreConfig("runs/walker", "seed-0", True, "off", "fast", 5),
)
YAML = """
store: {path: runs/walker, run: seed-0, verify: "off", level: fast, lock_timeout_s: 5}
save_budget: 0.05
overlap: queue
queue_size: 3
async_mode: false
components:
  policy:
    every_steps: 500
    every_seconds: 1200.5
    level: small
    expect_change: true
  replay: {lane: best_effort, necessity: droppable, recent_only: {rows: 10, steps: 5}}
"""


def test_mapping_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps(WRITTEN))
    (tmp_path / "engine.yaml").write_text(YAML)
    (tmp_path / "empty.yaml").write_text("")
    for source in (WRITTEN, MEANT, str(tmp_path / "engine.json"), tmp_path / "engine.yaml"):
        assert read_config(source) == MEANT
    assert read_config(tmp_path / "empty.yaml") == read_config(None) == EngineConfig()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"save_bugdet": 0.1}, r"config: unknown key 'save_bugdet'\. There are save_budget, overlap"),
        ({"template": "ppx"}, "config: .*ppx"),
        ({"save_budget": 0}, "config: save_budget=0: expected a positive number"),
        ({"save_budget": 1.5}, "config: save_budget=1.5: a share of the time"),
        ({"save_budget": "10 %"}, "config: save_budget='10 %'"),
        ({"overlap": "drop"}, "config: overlap='drop': expected one of wait, skip, queue"),
        ({"queue_size": 0}, "config: queue_size=0"),
        ({"queue_size": 1.5}, "config: queue_size=1.5"),
        ({"async_mode": 1}, "config: async_mode=1"),
        ({"components": ["policy"]}, "config: components: expected keys and values, found list"),
        ({"components": {"a/b": {}}}, "'a/b'"),
        ({"components": {"policy": {"every": 1}}}, "config: components.policy: unknown key 'every'"),
        ({"components": {"policy": {"every_steps": -1}}}, "config: components.policy: every_steps=-1"),
        ({"components": {"policy": {"every_steps": True}}}, "config: components.policy: every_steps=True"),
        ({"components": {"policy": {"every_seconds": float("nan")}}}, "components.policy: every_seconds=nan"),
        (
            {"components": {"policy": {"lane": "fast"}}},
            "components.policy: lane='fast': expected one of critical, best",
        ),
        ({"components": {"policy": {"necessity": "no"}}}, "components.policy: necessity='no'"),
        ({"components": {"policy": {"level": "tiny"}}}, "components.policy: .*tiny"),
        ({"components": {"policy": {"expect_change": "yes"}}}, "components.policy: expect_change='yes'"),
        ({"components": {"policy": {"recent_only": {}}}}, "components.policy.recent_only: recent_only: give rows or"),
        ({"components": {"policy": {"recent_only": 5}}}, "components.policy: recent_only=5"),
        ({"components": {1: {}}}, "component name 1"),
        ({"components": {"policy": {"every_steps": "500"}}}, "components.policy: every_steps='500'"),
        ({"components": {"policy": {"every_steps": [500]}}}, r"components.policy: every_steps=\[500\]"),
        ({"components": {"policy": {1: 2}}}, "components.policy: unknown key 1"),
        ({"components": {"policy": None}}, "config: components.policy: expected keys and values, found NoneType"),
        ({"components": {"policy": {"recent_only": {"rows": "all"}}}}, "policy.recent_only: rows='all'"),
        ({"queue_size": None}, "config: queue_size=None"),
        ({"template": ["sac"]}, "config: template .*sac"),
        ({"aliases": ["policy"]}, "config: aliases: expected roles and lists of paths, found list"),
        ({"aliases": {"counters": "policy/n"}}, "config: aliases.counters='policy/n': expected a list of leaf paths"),
        ({"aliases": {"counters": [1]}}, r"config: aliases.counters=\[1\]"),
        ({"aliases": {"counters": [""]}}, r"config: aliases.counters=\[''\]"),
        ({"template": "sac", "aliases": {"countrs": ["a"]}}, "config: aliases=.*countrs.*template sac has the roles"),
        ({"maintenance": 5}, "config: maintenance: int is no setting here"),
        ({"store": {"path": ""}}, "config: store: path=''"),
        ({"store": {"run": "a"}}, "config: store: .*path"),
        ({"store": {"path": "x", "mode": "w"}}, "config: store: unknown key 'mode'"),
        ({"store": "x"}, "config: store: expected keys and values, found str"),
        ({"store": {"path": "x", "verify": False}}, "config: store: verify=False: expected one of reread, media, off"),
        ({"store": {"path": "x", "level": "tiny"}}, "config: store: .*tiny"),
        ({"store": {"path": "x", "lock_timeout_s": -1}}, "config: store: lock_timeout_s=-1: expected a positive"),
    ],
)
def test_mistake_names_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_config({**WRITTEN, **change})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"components": {"policy": {"every_steps": 1}}}, "components.policy: dict is no setting here"),
        ({"components": []}, "components: list is no setting"),
        ({"store": {"path": "x"}}, "store: dict is no setting"),
        ({"maintenance": {"every_commits": 5}}, "maintenance: dict is no setting"),
        ({"aliases": {"counters": "policy/n"}}, "aliases.counters='policy/n'"),
    ],
)
def test_value_made_by_hand_is_checked_like_a_file(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        EngineConfig(**values)


def test_file_that_is_missing_or_no_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such config file"):
        read_config(tmp_path / "engine.yaml")
    texts: dict[str, str | bytes] = {
        "a.json": "{",
        "a.yaml": "a: [1",
        "b.json": "[1]",
        "b.yaml": "- 1",
        "deep.json": "[" * 100_000,
        "deep.yaml": "[" * 5_000,
        "two.yaml": "a: 1\n---\na: 2\n",
        "code.yaml": "overlap: !!python/object/apply:os.getcwd []",
        "latin.yaml": "overlap: wärt".encode("latin-1"),
        "binary.json": bytes(range(256)),
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(InvalidInputError, match=name):
            read_config(tmp_path / name)
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("a.json", '{"overlap": "skip", "save_budget": 0.1, "overlap": "wait"}', "overlap"),
        ("b.json", '{"components": {"policy": {"every_steps": 1, "every_steps": 2}}}', "every_steps"),
        ("a.yaml", "overlap: skip\nsave_budget: 0.1\noverlap: wait\n", "overlap"),
        ("b.yaml", "components:\n  policy: {every_steps: 1}\n  policy: {every_steps: 2}\n", "policy"),
    ],
)
def test_key_that_is_there_twice_is_a_mistake(tmp_path: Path, name: str, text: str, key: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInputError, match=f"{key} is there twice"):
        read_config(tmp_path / name)


def test_sections_of_a_file_may_be_empty_and_may_be_shared(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("components:\naliases:\nstore:\nmaintenance:\nsave_budget:\n")
    assert read_config(tmp_path / "a.yaml") == EngineConfig(save_budget=None)
    (tmp_path / "b.yaml").write_text("components:\n  policy: &often {every_steps: 5}\n  counters: *often\n")
    often = SaveStrategy(every_steps=5)
    assert read_config(tmp_path / "b.yaml").components == {"policy": often, "counters": often}


def test_file_whose_parts_refer_to_each_other_a_billion_times_is_looked_at_once(tmp_path: Path) -> None:
    lines = ["a: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    with pytest.raises(InvalidInputError, match="unknown key 'a'"):
        read_config(tmp_path / "a.yaml")


def test_yaml_without_its_library_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine.yaml").write_text(YAML)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'casckpt\[yaml\]'"):
        read_config(tmp_path / "engine.yaml")


def test_strategies_of_the_config_are_those_of_the_components(store_path: Path) -> None:
    with open_store(store_path) as store:
        config = {"save_budget": 0.5, "components": {"policy": {"every_steps": 5}}}
        engine = CheckpointEngine(store, config=config, save_budget=None)  # what is given here wins
        assert engine.config.save_budget is None
        engine.register("policy", {"a": 1})
        engine.register("other", {"a": 1}, SaveStrategy(every_steps=2))
        assert [(each.every_steps, list(each.components)) for each in engine.report().layers] == [
            (2, ["other"]),
            (5, ["policy"]),
        ]
        with pytest.raises(InvalidInputError, match="overlap='never'"):
            CheckpointEngine(store, overlap="never")
        engine.close()
        with CheckpointEngine(store, config={"components": {"polcy": {"every_steps": 5}}}) as engine:
            engine.register("policy", {"a": 1})
            with pytest.raises(InvalidInputError, match=r"components \['polcy'\].*there are policy") as refused:
                engine.save(1)
        assert (refused.value.key, store.steps()) == ("components.polcy", [])


def test_engine_with_a_store_of_its_own_closes_it(tmp_path: Path) -> None:
    config = {"store": {"path": str(tmp_path / "run"), "run": "seed-0"}}
    with CheckpointEngine.open(config, training_config={"lr": 0.1}) as engine:
        engine.register("policy", {"a": 1})
        engine.save(1)
        store = engine.store
    with pytest.raises(CasckptError, match="closed"):
        store.steps()
    with CheckpointEngine.open(config) as engine:
        engine.register("policy", {"a": 0})
        assert engine.restore().step == 1
        assert engine.store.context(1).config == {"lr": 0.1}
    with pytest.raises(InvalidInputError, match="there is no `store`"):
        CheckpointEngine.open({})
