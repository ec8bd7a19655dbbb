"""Which series there are, and how one is made once: in a temporary folder that is renamed when it is complete.

A build is reproducible bit by bit in one environment (the same versions and processor): every recipe seeds its
generators, and runs on one thread. The process's own thread count and global generator are put back afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from benchmarks.corpora import _control, _dqn, _finetune, _league, _pixels, _replay, _sac, _synthetic
from benchmarks.corpora._series import Compose, Recorder, Series, read_marker, tensor_bytes, write_marker

SEED = 1
VERSIONED = ("torch", "numpy", "gymnasium", "ale-py", "safetensors")


@dataclass(frozen=True)
class Recipe:
    """A training run: `train(config, recorder)` with a config of the real size or the quick one."""

    train: Callable[[Any, Recorder], None]
    config: Any
    quick: Any
    compose: Compose | None = None


RECIPES: dict[str, Recipe] = {
    "A": Recipe(_control.train, _control.ControlConfig(), _control.QUICK),
    "B": Recipe(_pixels.train, _pixels.PixelsConfig(), _pixels.QUICK),
    "C": Recipe(_dqn.train, _dqn.DqnConfig(), _dqn.QUICK, _dqn.compose),
    **{
        f"D-{variant}-{apart}": Recipe(
            _finetune.train,
            _finetune.FinetuneConfig(variant, apart),
            _finetune.quick(variant, apart),
            _finetune.compose,
        )
        for variant in ("fp32", "bf16", "bf16-fp32", "lora")
        for apart in (1, 4)
    },
    "E": Recipe(_sac.train, _sac.SacConfig(), _sac.quick(64)),
    "E-1": Recipe(_sac.train, _sac.SacConfig(steps_apart=1), _sac.quick(1)),
    "F": Recipe(_league.train, _league.LeagueConfig(), _league.QUICK),
    "R-clean": Recipe(_replay.train, _replay.ReplayConfig(), _replay.quick("seaquest"), _replay.compose),
    "R-camera": Recipe(_replay.train, _replay.ReplayConfig(None, commit_count=6), _replay.quick(None), _replay.compose),
    "S": Recipe(_synthetic.train, _synthetic.SyntheticConfig(), _synthetic.QUICK, _synthetic.compose),
}
NAMES: tuple[str, ...] = tuple(RECIPES)


def build(name: str, folder: str, *, quick: bool = False) -> Series:
    """Make a series in `folder`/`name`, or only open it if it is there.

    `quick` makes a series of the same form in seconds: few commits of small networks, and nothing is downloaded. Real
    ones take up to eight minutes of one core each, and D fetches a wheel of 84 MB into `folder` once. A build that was
    killed leaves a folder `.building-…`, which may be removed.

    Raises:
        ValueError: There is no such series, or what is there was made with other parameters.
        ModuleNotFoundError: ale-py is needed and missing.
    """
    recipe = _recipe(name)
    config = recipe.quick if quick else recipe.config
    path = os.path.join(folder, name)
    if read_marker(path) is None:
        os.makedirs(folder, exist_ok=True)
        with _finished_folder(path) as unfinished:
            recorder = Recorder(unfinished, os.path.join(folder, "downloads"))
            start = time.monotonic()
            with _reproducible():
                recipe.train(config, recorder)
            facts = {
                "name": name,
                "is_quick": quick,
                "parameters": asdict(config),
                "versions": _versions(),
                "build_s": round(time.monotonic() - start, 1),
                "steps": recorder.steps,
            }
            series = Series(unfinished, recorder.steps, facts, recipe.compose)
            facts["raw_bytes"] = [tensor_bytes(series.state(index)) for index in range(series.count)]
            write_marker(unfinished, facts)
    series = load(folder, name)
    if series.facts["parameters"] != json.loads(json.dumps(asdict(config))):
        raise ValueError(f"{path} holds {name} made with other parameters (quick or older ones): remove it first")
    return series


def load(folder: str, name: str) -> Series:
    """Open a finished series.

    Raises:
        FileNotFoundError: It is not there, or was not finished.
    """
    path = os.path.join(folder, name)
    facts = read_marker(path)
    if facts is None:
        raise FileNotFoundError(
            f"no finished series in {path}: run `python -m benchmarks.corpora build {name} --folder {folder}`"
        )
    return Series(path, list(facts["steps"]), facts, _recipe(name).compose)


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"there is no series {name}; there are {', '.join(RECIPES)}")
    return RECIPES[name]


@contextlib.contextmanager
def _finished_folder(path: str) -> Iterator[str]:
    """A new folder that becomes `path` if all goes well, and vanishes otherwise."""
    parent, name = os.path.split(path)
    unfinished = os.path.join(parent, f".building-{name}-{os.getpid()}")
    os.mkdir(unfinished)
    try:
        yield unfinished
        os.rename(unfinished, path)
    except BaseException:  # an interrupted build of 8 GB must not stay
        shutil.rmtree(unfinished)
        raise


@contextlib.contextmanager
def _reproducible() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            yield
    finally:
        torch.set_num_threads(threads)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
