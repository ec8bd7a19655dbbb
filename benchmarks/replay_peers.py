"""T9p: a checkpoint of a ring with 1 % new rows beside the same ring written whole, as people do it.

Each peer gets the very arrays of the ring: Stable-Baselines3 and TorchRL have them as the storage of a buffer of
theirs. All files are synced; a peer that is not installed is left out, and told.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

import casckpt
from benchmarks._harness import MIB, Measurement, Settings, Timed, absolute, folder_size, paired, scratch
from benchmarks.replay import ROW_SHARE, FullRing
from casckpt.replay import Ring

Write = Callable[[str], None]


def peers(settings: Settings) -> Iterator[Measurement]:
    """T9p: seconds and bytes of a checkpoint, ÷ those of each peer."""
    buffer = FullRing(settings.size_bytes)
    new_rows = max(1, buffer.capacity // ROW_SHARE)
    steps = itertools.count(1)
    for name, (package, make) in _PEERS.items():
        if find_spec(package) is None:
            print(f"T9p: {name}: {package} is not installed", file=sys.stderr)
            continue
        write = make(buffer)
        with scratch(settings) as folder, casckpt.open(f"{folder}/store", create=True) as store:
            whole = f"{folder}/whole"
            ring = buffer.ring("counter")
            store.commit(next(steps), {"replay": ring})
            before = folder_size(store.path)
            count = itertools.count()

            def commit(_: Any, store: Any = store, ring: Ring = ring, count: Iterator[int] = count) -> None:
                next(count)
                store.commit(next(steps), {"replay": ring})

            def write_synced(_: Any, write: Write = write, whole: str = whole) -> None:
                write(whole)
                _sync(whole)

            subject = Timed(commit, lambda: buffer.add(new_rows), syncs=settings.syncs)
            baseline = Timed(write_synced, functools.partial(_remove, whole), syncs=settings.syncs)
            pairs = paired(subject, baseline, settings.pair_count)
            yield pairs.measurement("T9p", f"time ÷ {name} of the whole ring", target=1.0)
            added = (folder_size(store.path) - before) / next(count)
            size = os.path.getsize(whole) if os.path.isfile(whole) else folder_size(whole)
            case = f"bytes added ÷ {name} of the whole ring"
            subject_size, whole_size = f"{added / MIB:.2f} MiB", f"{size / MIB:.2f} MiB"
            yield absolute("T9p", case, [added / size], "×", target=0.05, subject=subject_size, baseline=whole_size)


def _pickle(buffer: FullRing) -> Write:
    def write(path: str) -> None:
        with open(path, "wb") as file:
            pickle.dump(buffer.columns(), file, protocol=5)

    return write


def _torch_save(buffer: FullRing) -> Write:
    tensors = {name: torch.from_numpy(column) for name, column in buffer.columns().items()}
    return lambda path: torch.save(tensors, path)


def _sb3(buffer: FullRing) -> Write:
    """What `save_replay_buffer` does, with the ring's arrays in a buffer that keeps each observation once."""
    import numpy as np
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer
    from stable_baselines3.common.save_util import save_to_pkl

    pixels = spaces.Box(0, 255, (84, 84), np.uint8)
    options = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    live = ReplayBuffer(1, pixels, spaces.Discrete(6), "cpu", **options)
    live.observations, live.actions = buffer.obs[:, None], buffer.action[:, None, None]
    live.rewards, live.dones = buffer.reward[:, None], buffer.done[:, None]
    live.buffer_size, live.full = buffer.capacity, True

    def write(path: str) -> None:
        with open(path, "wb") as file:  # a name would get an ending
            save_to_pkl(file, live)

    return write


def _torchrl(buffer: FullRing) -> Write:
    with warnings.catch_warnings():  # of their own imports
        warnings.simplefilter("ignore")
        from tensordict import TensorDict  # type: ignore[import-untyped]
        from torchrl.data import TensorDictReplayBuffer, TensorStorage  # type: ignore[import-untyped]

    rows = {name: torch.from_numpy(column) for name, column in buffer.columns().items()}
    live = TensorDictReplayBuffer(storage=TensorStorage(TensorDict(rows, [buffer.capacity])), batch_size=32)

    def write(path: str) -> None:
        with warnings.catch_warnings():  # nothing was ever added by a writer
            warnings.simplefilter("ignore")
            live.dumps(path)

    return write


def _hdf5(buffer: FullRing) -> Write:
    import h5py  # type: ignore[import-untyped]

    def write(path: str) -> None:
        with h5py.File(path, "w") as file:
            for name, column in buffer.columns().items():
                file.create_dataset(name, data=column)

    return write


_PEERS: dict[str, tuple[str, Callable[[FullRing], Write]]] = {
    "pickle": ("pickle", _pickle),
    "torch.save": ("torch", _torch_save),
    "SB3 save_replay_buffer": ("stable_baselines3", _sb3),
    "TorchRL dumps": ("torchrl", _torchrl),
    "HDF5": ("h5py", _hdf5),
}


def _sync(path: str) -> None:
    """Make a file, or all files below a folder, durable."""
    files = (
        [path] if os.path.isfile(path) else [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]
    )
    for each in files:
        with open(each, "rb") as written:
            os.fsync(written.fileno())


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.unlink(path)
