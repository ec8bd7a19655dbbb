"""Records whose bases are a trap: circles, endless chains, towers that double, wrong sizes, numbers that lie.

Whatever they say: a quick typed error or the right bytes, no deep recursion, bounded memory, and everything that does
not need them restores.
"""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from casckpt.errors import CasckptError, CorruptionError, IncompleteError
from casckpt.format.pack import PackRow
from casckpt.ids import ObjectId
from casckpt.testing.trees import difference as unlike
from tests.corruption import forging
from tests.corruption.forging import COUNT, FIRST, STATE, Forged, chunk, difference, doubled, forge, id_of, raw
from tests.unit.stores import open_store

pytestmark = [
    pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning"),
    pytest.mark.timeout(120),  # a tower of 2^40 would take years
]
MEMORY_MAX = 16 << 20


@pytest.fixture
def forged(store_path: Path) -> Path:
    forging.make(store_path)
    return store_path


@contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX
    finally:
        tracemalloc.stop()


def check_refused(path: Path, kinds: Any = (CorruptionError, IncompleteError)) -> None:
    """The component with forged chunks is refused by name, everywhere; the other one is as it was."""
    with open_store(path) as store:
        assert store.steps() == [1]
        with pytest.raises(kinds, match="step 1") as caught:
            store.restore(1)
        assert "numbers" in str(caught.value)
        assert unlike({"other": STATE["other"]}, store.restore(1, only=["other"])) is None
        for read_data in (True, False):
            report = store.verify(read_data=read_data)
            named = {user[3] for problem in report.problems for user in problem.snapshots}
            assert named <= {"numbers"}, report
            if read_data:
                assert named == {"numbers"}, report
        check_continued(store)


def check_continued(store: Any) -> None:
    """What was bad is stored again, standalone, and heals the old snapshot; what changes is stored, too."""
    second = {**STATE, "other": {"y": np.arange(5)}}
    store.commit(2, second)
    assert unlike(second, store.restore(2)) is None
    assert unlike(STATE, store.restore(1)) is None
    third = {**second, "numbers": {"x": STATE["numbers"]["x"] + (np.arange(COUNT * 512) % 7 == 0)}}
    store.commit(3, third)
    assert unlike(third, store.restore(3)) is None
    assert store.verify(read_data=True).ok


def check_restored(path: Path) -> None:
    with open_store(path) as store:
        assert unlike(STATE, store.restore(1)) is None
        assert store.verify(read_data=True).ok
        check_continued(store)


# --- towers ---


def chain(length: int, depth: Any = lambda at: at) -> list[Forged]:
    """chunk(FIRST) on chunk(1000) on chunk(1001) …; `length` bases below, the last one raw."""
    numbers = [FIRST, *range(1000, 1000 + length)]
    links = [difference(one, two, depth=depth(length - at)) for at, (one, two) in enumerate(pairwise(numbers))]
    return [*links, raw(numbers[-1])]


@pytest.mark.few(1)
@pytest.mark.parametrize("depth", [lambda at: min(at, 255), lambda at: 0, lambda at: 255], ids=["true", "0", "255"])
@pytest.mark.parametrize("length", [65, 1000])
def test_chain_that_no_encoder_makes_is_refused(forged: Path, length: int, depth: Any) -> None:
    forge(forged, chain(length, depth))
    with bounded_memory():
        check_refused(forged)


@pytest.mark.few(3)
@pytest.mark.parametrize("depth", [lambda at: at, lambda at: 0, lambda at: 255], ids=["true", "0", "255"])
@pytest.mark.parametrize("length", [1, 48, 60])
def test_depth_that_lies_does_not_matter_while_the_chain_can_be_decoded(forged: Path, length: int, depth: Any) -> None:
    forge(forged, chain(length, depth))
    check_restored(forged)


def tower(height: int, *, is_good: bool) -> list[Forged]:
    """chunk(FIRST) on an object twice, that on another one twice, …: 2^height ways down."""
    plain, found = np.frombuffer(chunk(FIRST), "<i4"), []
    objects = [ObjectId(forging.blake3((plain - at).tobytes()).digest()) for at in range(height + 1)]
    for one, two in pairwise(objects):
        found.append(doubled(one, two, depth=height - len(found), delta=1))
    lowest = (plain - height).tobytes()
    header = msgspec.structs.replace(raw(FIRST).header, object_id=objects[-1], payload_check=objects[-1][:16])
    return [*found, Forged(header, lowest if is_good else lowest[:-1] + b"?")]


@pytest.mark.parametrize("height", [2, 40])
def test_tower_that_doubles_is_decoded_once_a_floor(forged: Path, height: int) -> None:
    forge(forged, tower(height, is_good=True))
    check_restored(forged)


@pytest.mark.few(1)
@pytest.mark.parametrize("height", [2, 40, 63])
def test_tower_on_a_damaged_object_is_refused_at_once(forged: Path, height: int) -> None:
    forge(forged, tower(height, is_good=False))
    with bounded_memory():
        check_refused(forged)


def test_tower_whose_every_floor_has_a_second_record_is_refused_at_once(forged: Path) -> None:
    """Each floor twice: from the floor below, and from itself."""
    floors = tower(40, is_good=False)
    again = [doubled(each.header.object_id, each.header.object_id, depth=0) for each in floors[:-1]]
    forge(forged, [*floors, *again])
    check_refused(forged)


@pytest.mark.parametrize("height", [2, 40])
def test_tower_whose_top_is_wrong_is_refused_at_once(forged: Path, height: int) -> None:
    floors = tower(height, is_good=True)
    top = floors[0].header
    forge(forged, [doubled(top.object_id, top.bases[0], depth=height, delta=2), *floors[1:]])
    check_refused(forged)


# --- circles ---


@pytest.mark.parametrize("depth", [0, 1, 255])
def test_object_that_is_its_own_base_is_refused(forged: Path, depth: int) -> None:
    forge(forged, [difference(FIRST, FIRST, depth=depth)])
    check_refused(forged)


@pytest.mark.parametrize("size", [2, 3, COUNT])
def test_circle_is_refused(forged: Path, size: int) -> None:
    numbers = [FIRST + at for at in range(size)]
    forge(forged, [difference(one, two) for one, two in zip(numbers, [*numbers[1:], FIRST], strict=True)])
    check_refused(forged)


@pytest.mark.few(2)
@pytest.mark.parametrize("depth", [0, 255])
@pytest.mark.parametrize("size", [1, 2, COUNT])
def test_circle_beside_good_records_costs_nothing(forged: Path, size: int, depth: int) -> None:
    """Preferred or not: each object also has a record that needs none of the others."""
    numbers = [FIRST + at for at in range(size)]
    circle = [difference(one, two, depth=depth) for one, two in zip(numbers, [*numbers[1:], FIRST], strict=True)]
    forge(forged, [*map(raw, numbers), *circle])
    check_restored(forged)


def test_circle_of_which_one_object_has_a_good_record_is_broken_there(forged: Path) -> None:
    numbers = [FIRST + at for at in range(5)]
    circle = [difference(one, two, depth=0) for one, two in zip(numbers, [*numbers[1:], FIRST], strict=True)]
    forge(forged, [raw(numbers[2], depth=7), *circle])
    check_restored(forged)


# --- records that are wrong in themselves ---


def _with_base_count(count: int) -> Forged:
    good = difference(FIRST, FIRST + 1)
    return Forged(msgspec.structs.replace(good.header, bases=good.header.bases * count), good.payload)


WRONG: dict[str, Sequence[Forged]] = {
    "no base": [_with_base_count(0)],
    "two bases": [_with_base_count(2)],
    "255 bases": [_with_base_count(255)],
    "base that is nowhere": [difference(FIRST, 5000)],
    "base that is nowhere, four down": chain(4)[:-1],
    "base of another size": [
        difference(FIRST, 5000),
        Forged(
            msgspec.structs.replace(raw(5000).header, plain_size=4088, stored_size=4088, object_id=id_of(5000)),
            chunk(5000)[:-8],
        ),
    ],
    "base of other content than its address": [
        difference(FIRST, FIRST + 1),
        Forged(msgspec.structs.replace(raw(FIRST + 1).header, payload_check=id_of(3)[:16]), chunk(3)),
    ],
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", WRONG)
def test_record_that_is_wrong_is_refused(forged: Path, name: str) -> None:
    forge(forged, WRONG[name])
    check_refused(forged)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", WRONG)
def test_record_that_is_wrong_beside_a_good_one_costs_nothing(forged: Path, name: str) -> None:
    """The bad one is preferred: depth 0, and the newest."""
    bad = [Forged(msgspec.structs.replace(each.header, depth=0), each.payload) for each in WRONG[name]]
    good = {each.header.object_id: FIRST + at for at in range(2) for each in [raw(FIRST + at)]}
    forge(forged, [*(raw(good[each.header.object_id], depth=9) for each in bad if each.header.object_id in good), *bad])
    check_restored(forged)


def test_codec_of_a_base_that_is_not_known_is_told_and_hides_nothing(forged: Path) -> None:
    unknown = msgspec.structs.replace(raw(5000).header, codec=200)
    forge(forged, [difference(FIRST, 5000), Forged(unknown, chunk(5000))])
    with open_store(forged) as store:
        with pytest.raises(CasckptError, match="codec 200"):
            store.restore(1)
        report = store.verify(read_data=True)
        assert [user[3] for problem in report.problems for user in problem.snapshots] == ["numbers"], report


def test_commit_on_bases_that_cannot_be_decoded_here_does_without(forged: Path) -> None:
    unknown = msgspec.structs.replace(raw(FIRST).header, codec=200)
    forge(forged, [Forged(unknown, chunk(FIRST))])
    changed = {**STATE, "numbers": {"x": STATE["numbers"]["x"] + (np.arange(COUNT * 512) % 7 == 0)}}
    with open_store(forged) as store:
        store.commit(2, changed)
        assert unlike(changed, store.restore(2)) is None


@pytest.mark.parametrize("count", [256, 300])
def test_footer_row_with_more_bases_than_a_record_can_have_is_damage(forged: Path, count: int) -> None:
    def change(rows: list[PackRow]) -> None:
        rows[0] = msgspec.structs.replace(rows[0], bases=bytes(32 * count))

    forging.write_pack(forged, forging.records_of(forged), change)
    shutil.rmtree(forged / "index")
    with open_store(forged) as store:  # the records are found without the table
        assert unlike(STATE, store.restore(1)) is None
        assert not store.verify().ok  # the table
