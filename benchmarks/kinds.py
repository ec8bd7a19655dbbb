"""T5k: the worst restore of T5 for other kinds of content: what each optimizer, target and adapter leaves behind.

One small network is trained on a fixed, seeded task, and everything that a run would commit is committed after each
step (or each few), into a store per level. As in T5, a restore runs in a new process, timed from the open, and its
baseline is the restore of a store that holds the last state alone, every chunk raw. Beside the time by the clock stands
processor time, of all threads, which a busy machine changes less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import casckpt
from benchmarks._harness import Measurement, Settings, absolute, scratch
from benchmarks.chains import RESTORE_TARGETS, slowest_paired

State = dict[str, Any]
Training = Callable[[int, int], Iterator[State]]

_WIDTH = 1536  # weights of 28 MB
_COMMIT_COUNT = 20
_POLYAK = 0.995
_LORA_RANK = 8
_CHANGED_SHARE = 0.01  # of the rows of the table of which few change


def kinds(settings: Settings) -> Iterator[Measurement]:
    """T5k for every kind of `KINDS`, at every level; for the first alone where states are small."""
    width = min(_WIDTH, int((settings.size_bytes / 64) ** 0.5))
    for name in list(KINDS)[: None if width == _WIDTH else 1]:
        with scratch(settings) as folder:
            steps = _commit_everywhere(folder, KINDS[name](width, min(_COMMIT_COUNT, settings.commit_count)))
            plain = f"{folder}/plain"
            for level, target in RESTORE_TARGETS.items():
                pairs = slowest_paired(f"{folder}/{level}", plain, steps, settings.pair_count, look=_restore_s)
                for at, clock in enumerate(("", ", processor time")):
                    ours, theirs = (statistics.median(side[at] for side in sides) for sides in zip(*pairs, strict=True))
                    yield absolute(
                        "T5k",
                        f"{name}, {level}: worst restore{clock}",
                        [one[at] / other[at] for one, other in pairs],
                        "×",
                        target=target if width == _WIDTH and not clock else None,
                        subject=f"{ours * 1e3:.0f} ms",
                        baseline=f"{theirs * 1e3:.0f} ms",
                    )


def _restore_s(path: str, step: int) -> float:
    """Seconds of processor time in this process: enough to find the slowest step."""
    start = time.process_time()
    with casckpt.open(path, read_only=True) as store:
        store.restore(step)
    return time.process_time() - start


def _commit_everywhere(folder: str, states: Iterator[State]) -> list[int]:
    """Commit each state into a store of each level, and the last one into one in which every chunk is raw."""
    stores = {level: casckpt.open(f"{folder}/{level}", create=True, level=level) for level in RESTORE_TARGETS}
    steps: list[int] = []
    for step, state in enumerate(states, 1):
        for store in stores.values():
            store.commit(step, state)
        steps.append(step)
    for store in stores.values():
        store.close()
    with casckpt.open(f"{folder}/plain", create=True, level="fast") as store:
        store.commit(steps[-1], state)
    return steps


def _network(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
    )


def _step(network: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    dtype = next(network.parameters()).dtype
    inputs = torch.randn(64, width, dtype=dtype)
    loss = (network(inputs) - inputs.roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _optimized(
    make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **options: Any
) -> Training:
    """A network and its optimizer, one step between commits."""

    def train(width: int, count: int) -> Iterator[State]:
        network = _network(width).to(dtype)
        optimizer = make(network.parameters(), **options)
        for _ in range(count):
            _step(network, optimizer, width)
            yield {"network": network.state_dict(), "optimizer": optimizer.state_dict()}

    return train


def _polyak(steps_between: int) -> Training:
    """A network, its Adam, and a target that follows it; the target moves at every step."""

    def train(width: int, count: int) -> Iterator[State]:
        network, target = _network(width), _network(width)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
        for _ in range(count):
            for _ in range(steps_between):
                _step(network, optimizer, width)
                with torch.no_grad():
                    for mine, its in zip(target.parameters(), network.parameters(), strict=True):
                        mine.mul_(_POLYAK).add_(its, alpha=1 - _POLYAK)
            yield {
                "network": network.state_dict(),
                "target": target.state_dict(),
                "optimizer": optimizer.state_dict(),
            }

    return train


def _merged_lora(width: int, count: int) -> Iterator[State]:
    """A frozen network, low-rank additions that are trained, and the sum of both that samplers get."""
    base = [parameter.detach() for parameter in _network(width).parameters() if parameter.ndim == 2]
    down = [nn.Parameter(torch.randn(_LORA_RANK, width) / width**0.5) for _ in base]
    up = [nn.Parameter(torch.zeros(width, _LORA_RANK)) for _ in base]
    optimizer = torch.optim.AdamW([*down, *up], lr=1e-4)
    for _ in range(count):
        inputs = torch.randn(64, width)
        hidden = inputs
        for weight, a, b in zip(base, down, up, strict=True):
            hidden = torch.tanh(hidden @ (weight + b @ a).T)
        loss = (hidden - inputs.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        merged = [(weight + b @ a).detach() for weight, a, b in zip(base, down, up, strict=True)]
        adapter = [each.detach() for each in (*down, *up)]
        yield {"base": base, "adapter": adapter, "merged": merged, "optimizer": optimizer.state_dict()}


def _few_rows(width: int, count: int) -> Iterator[State]:
    """A table of which one row in a hundred is changed between commits, and an Adam over the rows."""
    torch.manual_seed(0)
    table = nn.Embedding(3 * width, width, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-3)
    for _ in range(count):
        rows = torch.randint(3 * width, (max(1, int(_CHANGED_SHARE * 3 * width)),))
        optimizer.zero_grad()
        table(rows).square().mean().backward()
        optimizer.step()  # type: ignore[no-untyped-call]
        yield {"table": table.state_dict(), "optimizer": optimizer.state_dict()}


KINDS: dict[str, Training] = {
    "AdamW": _optimized(torch.optim.AdamW, lr=1e-4),
    "Adam, all bf16": _optimized(torch.optim.Adam, torch.bfloat16, lr=1e-4),
    "SGD, momentum": _optimized(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "SGD, Nesterov": _optimized(torch.optim.SGD, lr=1e-3, momentum=0.9, nesterov=True),
    "RMSprop": _optimized(torch.optim.RMSprop, lr=1e-4),
    "Polyak, each step": _polyak(1),
    "Polyak, each 4th step": _polyak(4),
    "merged LoRA": _merged_lora,
    "few rows change": _few_rows,
}
