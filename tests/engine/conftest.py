"""A store under a clock that tests move, for every test of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.clocks import Clock, Disk, open_timed


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def disk(clock: Clock) -> Disk:
    return Disk(clock)


@pytest.fixture
def store(store_path: Path, clock: Clock, disk: Disk) -> Iterator[Any]:
    with open_timed(store_path, clock, disk) as opened:
        yield opened
        disk.is_open.set()
