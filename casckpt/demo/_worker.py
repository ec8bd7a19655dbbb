"""The process that trains: `python -m casckpt.demo._worker`, started (and once killed) by `_drive.py`.

It writes one JSON object per line to its standard output and nothing else; whatever else it has to say goes to
standard error, which the parent shows. Each event has a member `event`:

==========  =====================================================================================================
started     `step` resumed from (0: a new run), `report`: what was restored, as text
collected   `step` under way: its rollout is collected, its optimisation comes next
committed   `step`, `branch`, `metrics`, byte counts, and the times of the commit and of `torch.save` of the same state
finished    `digests` of the live values by component, `draws`: the next numbers of every random stream
==========  =====================================================================================================
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from typing import Any, TextIO

import torch

import casckpt
from casckpt.demo._ppo import Ppo, PpoConfig
from casckpt.demo._proof import digest_components, draw_next, plain_state
from casckpt.demo._train import train

EXIT_INTERRUPTED = 130  # what shells use for SIGINT


def main() -> int:
    """Train as the arguments say; returns the exit code."""
    arguments = _parser().parse_args()
    events, sys.stdout = sys.stdout, sys.stderr  # a library that prints must not break the event stream
    warnings.showwarning = _show_warning
    torch.set_num_threads(1)  # the sum of a reduction depends on how threads share it
    torch.use_deterministic_algorithms(True)
    reporter = _Reporter(events, arguments.baseline)
    try:
        ppo = train(
            arguments.store,
            PpoConfig(**json.loads(arguments.config)),
            reporter,
            run=arguments.run,
            update_count=arguments.updates,
            ref=arguments.ref if arguments.ref is not None else "latest",
            reseed=arguments.reseed,
        )
        reporter.emit("finished", digests=digest_components(ppo.state()), draws=draw_next(ppo))
        ppo.close()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except casckpt.CasckptError as error:
        print(f"casckpt: {error}", file=sys.stderr)
        return 1
    return 0


class _Reporter:
    """Emits events, and measures `torch.save` of the same state beside every commit."""

    def __init__(self, events: TextIO, baseline_folder: str) -> None:
        self._events = events
        self._folder = baseline_folder

    def emit(self, event: str, **facts: Any) -> None:
        print(json.dumps({"event": event, **facts}), file=self._events, flush=True)

    def started(self, ppo: Ppo, report: casckpt.RestoreReport) -> None:
        self.emit("started", step=ppo.counters["update"], report=str(report))

    def collected(self, ppo: Ppo) -> None:
        self.emit("collected", step=ppo.counters["update"] + 1)

    def committed(self, ppo: Ppo, snapshot: casckpt.Snapshot, *, commit_s: float) -> None:
        torch_save_s, torch_save_bytes = save_with_torch(ppo.state(), self._folder)
        self.emit(
            "committed",
            step=snapshot.step,
            branch=snapshot.branch,
            metrics=dict(snapshot.metrics),
            logical_bytes=snapshot.logical_bytes,
            new_bytes=snapshot.new_bytes,
            stored_bytes=snapshot.stored_bytes,
            commit_s=commit_s,
            torch_save_s=torch_save_s,
            torch_save_bytes=torch_save_bytes,
        )


def save_with_torch(state: dict[str, Any], folder: str) -> tuple[float, int]:
    """Replace `folder/state.pt` as durably as a commit is: temporary file, fsync, rename, fsync of the folder.

    Returns:
        Seconds taken (gathering the state included, as in a commit) and the size of the file in bytes.
    """
    before = time.perf_counter()
    temporary = os.path.join(folder, "state.pt.tmp")
    with open(temporary, "wb") as file:
        torch.save(plain_state(state), file)
        file.flush()
        os.fsync(file.fileno())
        size_bytes = file.tell()
    os.replace(temporary, os.path.join(folder, "state.pt"))
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return time.perf_counter() - before, size_bytes


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    print(f"{category.__name__}: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="casckpt.demo._worker", description="One training process of the demo.")
    parser.add_argument("--store", required=True, help="path of the store")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--config", required=True, help="PpoConfig as JSON")
    parser.add_argument("--updates", required=True, type=int, help="update to stop after")
    parser.add_argument("--baseline", required=True, help="folder in which torch.save is measured")
    parser.add_argument("--ref", type=int, help="step to go on from; the newest by default")
    parser.add_argument("--reseed", type=int, help="leave the recorded random streams for this seed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
