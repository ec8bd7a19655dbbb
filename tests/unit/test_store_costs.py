"""What a restore of any snapshot decodes, counted over the records below it, against what the level allows.

Each record that a restore decodes counts once, with the cost of its own form, whatever the cost in the records above it
says; so a budget that forgets a leaf shows. Opening a store counts for nothing here, so that small states say as much
as large ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.corpora._adamw import WideAdamW
from casckpt.codec.contract import PREDICTION, Encoded
from casckpt.codec.formulas import KINDS
from casckpt.codec.level import COST_UNIT, LEVELS, decode_cost, missed_cost, prediction_cost
from casckpt.codec.models import ROUNDING
from casckpt.format.record import CHUNK
from casckpt.ids import ObjectId
from casckpt.index.tables import Place
from casckpt.store import components
from casckpt.testing.anatomy import dissect
from casckpt.testing.trees import difference
from tests.unit.stores import open_store

SIZE = 132  # a square float32 matrix is 68 KiB: a block of its own
SLACK = 1.25  # one step may lead beyond the mean


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(components, "OPENING_SIZE", 0)
    monkeypatch.setattr(components, "PREDICTED_SIZE_MIN", 0)
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def work_of_each_step(store: Any) -> dict[int, float]:
    """Decoding work of each snapshot, in units of reading and hashing it."""
    anatomy, reader = dissect(store.path), store._keeper.reader
    ids = list(anatomy.records)
    places = {key: found[0] for key, found in zip(ids, reader.locate(ids), strict=True) if found}
    own = {key: _own_cost(reader, key, place) * place.plain_size for key, place in places.items() if place.plain_size}
    found = {}
    for _, snapshot in anatomy.commits.values():
        chunks = {each for each in set().union(*anatomy.reach(snapshot).values()) if each in own}
        below, waiting = set[ObjectId](), list(chunks)
        while waiting:
            object_id = waiting.pop()
            if object_id not in below:
                below.add(object_id)
                waiting += places[object_id].bases
        size = sum(places[each].plain_size for each in chunks)
        found[snapshot.step] = sum(own.get(each, 0) for each in below) / size / COST_UNIT
    return found


def _own_cost(reader: Any, object_id: ObjectId, place: Place) -> int:
    header, _ = reader.read_record(object_id, place)
    if header.kind != CHUNK:
        return 0
    if header.codec == PREDICTION:
        kind = header.params[0]
        least = prediction_cost(kind, header.params[3 + 4 * len(KINDS[kind].bounds)])
        return max(least, missed_cost(header.stored_size / place.plain_size))
    form = Encoded(header.codec, header.codec_version, header.params, b"", header.stored_size)
    return decode_cost(form, place.plain_size)


# --- what is trained ---


def _network(
    seed: int = 0, layer_count: int = 2, size: int = SIZE, dtype: torch.dtype = torch.float32
) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*[torch.nn.Linear(size, size, bias=False, dtype=dtype) for _ in range(layer_count)])


def _train(net: torch.nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    size, dtype = net[0].in_features, net[0].weight.dtype
    (net(torch.randn(16, size, dtype=dtype)) - torch.randn(16, size)).square().mean().backward()
    optimizer.step()


def _copied(**parts: Any) -> dict[str, Any]:
    return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


def by(make: Callable[..., torch.optim.Optimizer], count: int = 24, **options: Any) -> Iterator[dict[str, Any]]:
    """One network and one optimizer."""
    net = _network()
    optimizer = make(net.parameters(), **options)
    for _ in range(count):
        _train(net, optimizer)
        yield _copied(net=net, optimizer=optimizer)


def narrow(make: Callable[..., torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    """bf16 weights, of which some move at every step and others hardly ever."""
    net = _network(layer_count=3, size=2 * SIZE, dtype=torch.bfloat16)
    optimizer = make(
        [{"params": layer.parameters(), "lr": 10.0**-power} for layer, power in zip(net, (3, 4, 6), strict=True)]
    )
    for _ in range(24):
        _train(net, optimizer)
        yield _copied(net=net, optimizer=optimizer)


def followed() -> Iterator[dict[str, Any]]:
    """A target that follows, and a rounded copy of the network."""
    net, target = (_network(seed, 1, 2 * SIZE) for seed in (0, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(24):
        _train(net, optimizer)
        with torch.no_grad():
            for old, new in zip(target.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 0.01)
        yield _copied(net=net, target=target, optimizer=optimizer, rounded=copy.deepcopy(net).bfloat16())


def in_turns(turn_length: int = 5) -> Iterator[dict[str, Any]]:
    """Agents of a league, each trained for a while by itself, then frozen while the next one is."""
    nets = [_network(seed, 1) for seed in range(4)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in nets]
    for step in range(5 * turn_length):
        number = step // turn_length % 4
        _train(nets[number], optimizers[number])
        agents = {f"net_{at}": net for at, net in enumerate(nets)}
        yield _copied(**agents, **{f"optimizer_{at}": each for at, each in enumerate(optimizers)})


def population() -> Iterator[dict[str, Any]]:
    """Members that take over each other's weights and train on."""
    nets = [_network(seed, 1) for seed in range(4)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in nets]
    for step in range(24):
        loser, winner = step % 4, (step * 7 + 1) % 4
        nets[loser].load_state_dict(nets[winner].state_dict())
        optimizers[loser].load_state_dict(copy.deepcopy(optimizers[winner].state_dict()))
        for net, optimizer in zip(nets, optimizers, strict=True):
            _train(net, optimizer)
        agents = {f"net_{at}": net for at, net in enumerate(nets)}
        yield _copied(**agents, **{f"optimizer_{at}": each for at, each in enumerate(optimizers)})


def scaled(count: int = 24) -> Iterator[dict[str, Any]]:
    """SGD with momentum, whose steps something scales afterwards."""
    net = _network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(count):
        before = copy.deepcopy(net)
        _train(net, optimizer)
        with torch.no_grad():
            for weight, old in zip(net.parameters(), before.parameters(), strict=True):
                weight.copy_(old + 0.93 * (weight - old))
        yield _copied(net=net, optimizer=optimizer)


def forks() -> Iterator[dict[str, Any]]:
    """Members of which at each step all but one are made of the first one and trained on: without optimizers."""
    nets = [_network(seed, 1) for seed in range(4)]
    for step in range(24):
        for number, net in enumerate(nets):
            if number != step % 4:
                net.load_state_dict(copy.deepcopy(nets[step % 4].state_dict()))
            torch.manual_seed(24 * number + step)
            _train(net, torch.optim.Adam(net.parameters(), lr=1e-4))
        yield _copied(**{f"net_{at}": net for at, net in enumerate(nets)})


def compressible(count: int = 6) -> Iterator[dict[str, Any]]:
    """Numbers of which half of the bytes say nothing: float32 from bf16, rows of zeros, small integers."""
    torch.manual_seed(0)
    reference = torch.randn(SIZE, SIZE).bfloat16().float()
    for _ in range(count):
        moments, tokens = torch.randn(2 * SIZE, SIZE), torch.randint(0, 9000, (SIZE, SIZE), dtype=torch.int32)
        moments[::2] = 0
        yield {"data": {"reference": reference, "moments": moments, "tokens": tokens}}


HISTORIES: dict[str, tuple[str, Callable[[], Iterator[dict[str, Any]]]]] = {
    "compressible": ("fast", compressible),
    "AdamW": ("balanced", lambda: by(torch.optim.AdamW, lr=1e-3)),
    "forks": ("balanced", forks),
    "bf16": ("small", lambda: narrow(torch.optim.AdamW)),
    "bf16, moments of float32": ("small", lambda: narrow(WideAdamW)),
    "RMSprop": ("balanced", lambda: by(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.9)),
    "targets and copies": ("balanced", followed),
    "turns": ("balanced", in_turns),
    "population": ("balanced", population),
}


@pytest.mark.full
@pytest.mark.parametrize("name", HISTORIES)
def test_no_step_of_a_history_takes_more_decoding_than_its_level_allows(store_path: Path, name: str) -> None:
    """Resumed after every fifth commit: a new handle knows no more than what it finds."""
    level, history = HISTORIES[name]
    kept = {}
    for step, state in enumerate(history()):
        if step % 5 == 0:
            store = open_store(store_path, level=level)
        kept[step] = state
        store.commit(step, state)
        if step % 5 == 4:
            store.close()
    store.close()
    with open_store(store_path) as store:
        for step, counted in work_of_each_step(store).items():
            assert counted <= SLACK * LEVELS[level].cost_max, step
        for step, state in kept.items():
            assert difference(dict(sorted(state.items())), store.restore(step)) is None


@pytest.mark.parametrize(
    ("level", "history"),
    [("balanced", lambda: by(torch.optim.NAdam, lr=1e-3)), ("small", scaled)],
    ids=["NAdam", "SGD, steps scaled"],
)
def test_formulas_that_are_nearly_right_cost_what_they_miss(
    store_path: Path, level: str, history: Callable[[], Iterator[dict[str, Any]]]
) -> None:
    """They save something and are taken, and leave dense differences behind: then no step leads beyond the mean."""
    with open_store(store_path, level=level) as store:
        for step, state in enumerate(history()):
            store.commit(step, state)
        counted = work_of_each_step(store)
    assert max(counted.values()) <= LEVELS[level].cost_max


@pytest.mark.full
def test_rounded_copies_cost_nothing_at_any_step_of_a_long_history(store_path: Path) -> None:
    """However long the chains of their originals are, and also where these begin anew."""
    with open_store(store_path) as store:
        for step, state in enumerate(followed()):
            store.commit(step, state)
        anatomy, reader = dissect(store.path), store._keeper.reader
        for _, snapshot in anatomy.commits.values():
            chunks = anatomy.reach(snapshot)["rounded"]
            places = [(each, reader.locate([each])[0][0]) for each in chunks if len(anatomy.plain[each]) > SIZE * SIZE]
            assert len(places) == 1
            for object_id, place in places:
                header, _ = reader.read_record(object_id, place)
                assert (header.codec, header.params[0]) == (PREDICTION, ROUNDING), snapshot.step
