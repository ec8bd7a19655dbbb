"""Readings of clocks that environments keep: no part of a training's state, and different in every run.

Gymnasium's RecordEpisodeStatistics notes when an episode began by a clock that starts with the process, and how long
episodes took. Captured, the first would be nonsense in another process, and both would make equal trainings differ. So
a restore starts the clock now, and durations of episodes from before it are NaN: unknown.
"""

from __future__ import annotations

import math
import time
from typing import Any

import gymnasium
import numpy as np

_STATISTICS = (gymnasium.wrappers.RecordEpisodeStatistics, gymnasium.wrappers.vector.RecordEpisodeStatistics)
_READINGS = ("episode_start_time", "episode_start_times", "time_queue")


def without(value: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that are no readings of a clock."""
    if not isinstance(value, _STATISTICS):
        return attributes
    return {name: item for name, item in attributes.items() if name not in _READINGS}


def restart(value: Any) -> None:
    """After a restore: episodes under way begin now, finished ones took an unknown time."""
    if not isinstance(value, _STATISTICS):
        return
    now = time.perf_counter()
    if isinstance(value, _STATISTICS[0]):
        value.episode_start_time = now
    else:
        value.episode_start_times = np.full(value.num_envs, now)
    value.time_queue.clear()
    value.time_queue.extend([np.float64(math.nan)] * len(value.return_queue))
