"""Stores and calls for the tests of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from click.testing import CliRunner

import casckpt
from casckpt.cli._group import casckpt as command

WEIGHTS = 40_000  # float32: more than fits into a timeline entry, so that commits make packs


class Called(NamedTuple):
    """What a call of the command line gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as the one JSON document that it must be; NaN and Infinity are no JSON."""
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} in JSON")


def call(*arguments: object) -> Called:
    """Run `casckpt` with these arguments in this process; a traceback in its output is a failure of every test."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert "Traceback" not in result.output
    return Called(result.exit_code, result.stdout, result.stderr)


def weights(seed: int) -> np.ndarray[Any, Any]:
    """Numbers that no encoding shrinks much."""
    return np.random.default_rng(seed).standard_normal(WEIGHTS).astype(np.float32)


def make_store(path: Path) -> dict[str, str]:
    """Run "walker" with a branch, a tag, a mixed and a retired snapshot, and run "other"; returns ids by name.

    ========  ==========  =====  ==============================================
    run       branch      step
    ========  ==========  =====  ==============================================
    walker    main        1      all components
    walker    main        2      policy changed; tagged "good"
    walker    main        3      policy changed; retired
    walker    main        4      policy changed
    walker    side        3      counters alone, on step 2: mixed
    other     main        1      the first policy again
    ========  ==========  =====  ==============================================
    """
    ids = {}
    with casckpt.open(path, create=True, run="walker") as store:
        for step in (1, 2, 3, 4):
            state = {"policy": {"w": weights(step)}, "frozen": {"w": weights(99)}, "counters": {"step": step}}
            ids[f"main@{step}"] = store.commit(
                step, state, metrics={"return": step * 1.5}, labels={"at": str(step)}, config={"lr": 0.5}
            ).id
        store.tag("good", 2)
        store.retire(3)
        store.resume(2, branch="side")
        ids["side@3"] = store.commit(3, {"counters": {"step": 3}}, inherit=["policy", "frozen"]).id
    with casckpt.open(path, run="other") as store:
        ids["other"] = store.commit(1, {"policy": {"w": weights(1)}}, metrics={"loss": float("nan")}).id
    return ids


def entry_path(path: Path, seq: int) -> Path:
    """The file of a timeline entry."""
    return path / "timeline" / f"{0:014d}" / f"{seq:020d}"


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
