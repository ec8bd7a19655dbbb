"""(b, S06) SIGKILL to a real process at its n-th changing system call, LMDB's included.

The child runs the shared history without torch and appends a mark before and after each act. A failure prints the
call and its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from casckpt.testing import killing
from casckpt.testing.invariants import check_store, check_usable
from casckpt.testing.workload import HISTORIES, oracle_of

PARTS = 4
QUICK_STRIDES = {"every kind of entry": 163, "training": 139}
FULL_STRIDES = {"every kind of entry": 1, "training": 5}  # its operations are many and alike
AT_A_TIME = 2  # children run while the parent checks what others left

pytestmark = pytest.mark.skipif(killing.why_not() is not None, reason=str(killing.why_not()))


def _arguments(folder: Path, history: str) -> list[str]:
    folder.mkdir()
    return [str(folder / "store"), str(folder / "marks"), history]


@dataclass(frozen=True)
class Points:
    """Every (call, number) at which a child that runs the history can be killed."""

    history: str
    calls: list[tuple[str, int]]


@pytest.fixture(scope="module")
def victims() -> Iterator[killing.Victims]:
    with killing.Victims("casckpt.testing.workload:main") as found:
        yield found


@pytest.fixture(scope="module", params=HISTORIES)
def points(
    request: pytest.FixtureRequest, victims: killing.Victims, tmp_path_factory: pytest.TempPathFactory
) -> Points:
    counts = victims.count_calls(*_arguments(tmp_path_factory.mktemp("counted") / "run", request.param))
    wanted = {"fdatasync", "linkat" if "linkat" in counts else "link", "flock", "writev"}  # the last is LMDB's
    assert wanted <= counts.keys(), counts
    found = [(call, number) for call, count in counts.items() for number in range(1, count + 1)]
    return Points(request.param, found)


def _check(folder: Path, history: str) -> None:
    marks: list[tuple[str, str]] = []
    if (folder / "marks").exists():
        for line in (folder / "marks").read_text().splitlines():
            what, _, name = line.partition("\t")
            if name in {act.name for act in HISTORIES[history]}:  # the last line may be cut
                marks.append((what, name))
    check_store(str(folder / "store"), oracle_of(marks))
    check_usable(str(folder / "store"), HISTORIES[history][0].run)


def _kill_all(victims: killing.Victims, history: str, points: list[tuple[str, int]], tmp_path: Path) -> int:
    """Kill a child at each point and check what it left; returns how many were really killed."""
    running: list[tuple[str, Path, killing.Victim]] = []
    killed_count = 0

    def finish() -> Iterator[bool]:
        label, folder, victim = running.pop(0)
        try:
            yield victims.finish(victim)
            _check(folder, history)
        except Exception as error:
            raise AssertionError(f"killed at {label}: {error!r}") from error

    try:
        for call, number in points:
            folder = tmp_path / f"{call}-{number}"
            running.append((f"{call} {number}", folder, victims.start(_arguments(folder, history), call, number)))
            if len(running) >= AT_A_TIME:
                killed_count += sum(finish())
        while running:
            killed_count += sum(finish())
    finally:
        for _, _, victim in running:
            victims.finish(victim)
    return killed_count


@pytest.mark.few(1)
def test_some_kills_leave_acknowledged_snapshots_whole(
    points: Points, victims: killing.Victims, tmp_path: Path
) -> None:
    assert _kill_all(victims, points.history, points.calls[:: QUICK_STRIDES[points.history]], tmp_path) > 0


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_kill_leaves_acknowledged_snapshots_whole(
    points: Points, victims: killing.Victims, tmp_path: Path, part: int
) -> None:
    mine = points.calls[part :: PARTS * FULL_STRIDES[points.history]]
    killed_count = _kill_all(victims, points.history, mine, tmp_path)
    assert killed_count >= 0.9 * len(mine)  # threads take turns: the last few numbers may not be reached
