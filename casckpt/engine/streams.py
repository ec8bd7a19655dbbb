"""Streams of random numbers for workers: each has its own, by index and restart, from one root seed.

Workers (environment processes, data loaders, actors) that are seeded from a clock, or all alike, cannot be repeated.
Here the seed of worker `i` after its `r`-th restart is a digest of `(root, i, r)`: known without asking anybody,
different for each, and the same in every run with this root. A worker that died and is started anew gets a new stream,
so it does not play the same episodes again.
"""

from __future__ import annotations

import random
from typing import Any

from casckpt.errors import MismatchError
from casckpt.state.seeding import seed_generator, seed_globals, stream_seed


class WorkerStreams:
    """A Checkpointable: the root seed, and how often each worker was started anew.

    Args:
        root: an integer from 0 to 2**63 - 1.

    Raises:
        InvalidInputError: `root` is no such integer.
    """

    def __init__(self, root: int) -> None:
        stream_seed(root)
        self.root = root
        self.restarts: dict[int, int] = {}

    def seed(self, worker: int, purpose: str = "") -> int:
        """The seed of a worker's stream as it runs now, from 0 to 2**63 - 1; `purpose` tells several apart."""
        return stream_seed(self.root, "worker", worker, self.restarts.get(worker, 0), purpose)

    def restarted(self, worker: int) -> int:
        """Note that a worker is started anew; the seed of its new stream."""
        self.restarts[worker] = self.restarts.get(worker, 0) + 1
        return self.seed(worker)

    def python(self, worker: int) -> random.Random:
        """A generator of Python for this worker."""
        return random.Random(self.seed(worker, "python"))

    def start(self, worker: int, generator: Any) -> None:
        """Start a live generator (of random, numpy or torch) on this worker's stream."""
        seed_generator(generator, self.seed(worker, "own"))

    def seed_process(self, worker: int) -> None:
        """In the worker's process: start python's, numpy's and torch's global generators on its stream."""
        seed_globals(self.seed(worker, "globals"))

    def state_dict(self) -> dict[str, Any]:
        """Root and restarts."""
        return {"root": self.root, "restarts": dict(self.restarts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the restarts of `state`.

        Raises:
            MismatchError: it has another root; nothing was changed.
        """
        if state["root"] != self.root:
            raise MismatchError(
                f"WorkerStreams: expected root {state['root']}, found {self.root}. Make it with the root of the "
                "snapshot, or leave this component out to begin new streams"
            )
        self.restarts = dict(state["restarts"])
