"""What a process with compiled kernels stores, one without restores, and the other way round; both on one chain.

Each process trains the same from the same seed and keeps what it committed; of the restores only digests are told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from casckpt.codec.contract import DIFFERENCE, PLANES, PREDICTION
from casckpt.codec.level import LEVELS
from casckpt.testing.anatomy import dissect
from tests.unit.kernel_ways import with_kernels
from tests.unit.stores import open_store

pytestmark = [pytest.mark.full, with_kernels]

PROGRAM = """
import hashlib, json, sys
import torch, casckpt
from casckpt.codec.formulas import has_kernels

path, level, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(5)
torch.set_num_threads(1)
MAKERS = {
    "AdamW": lambda w: torch.optim.AdamW([w], lr=1e-3, foreach=False),
    "fused": lambda w: torch.optim.Adam([w], lr=1e-4, fused=True),
    "foreach": lambda w: torch.optim.Adam([w], lr=1e-4, foreach=True),
    "SGD": lambda w: torch.optim.SGD([w], lr=1e-2, momentum=0.9),
    "Nesterov": lambda w: torch.optim.SGD([w], lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda w: torch.optim.RMSprop([w], lr=1e-3, foreach=False),
    "centered": lambda w: torch.optim.RMSprop([w], lr=1e-3, centered=True, foreach=False),
}
weights = {
    f"{name} {dtype}": torch.nn.Parameter(torch.randn(160, 160).to(dtype))
    for dtype in (torch.float32, torch.bfloat16) for name in MAKERS
}
optimizers = {name: MAKERS[name.split()[0]](weight) for name, weight in weights.items()}
mean = weights["AdamW torch.float32"].detach().clone()
double = torch.randn(5000, dtype=torch.float64)

def train():
    for weight in weights.values():
        weight.grad = torch.randn_like(weight).bfloat16().to(weight.dtype)
    for optimizer in optimizers.values():
        optimizer.step()
    mean.mul_(0.995).add_(weights["AdamW torch.float32"].detach(), alpha=0.005)
    double[::7] += 1e-9

def digest(value):
    found = hashlib.sha256()
    def add(value):
        if isinstance(value, dict):
            for key in sorted(value, key=repr):
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        elif isinstance(value, torch.Tensor):
            found.update(str(value.dtype).encode())
            found.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())
    add(value)
    return found.hexdigest()

committed = {}
with casckpt.open(path, create=True, level=level) as store:
    for step in range(1, last + 1):
        train()
        if step >= first:
            policy = {"weights": dict(weights), "mean": mean, "double": double}
            store.commit(step, {"policy": policy, **optimizers})
            states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
            committed[step] = digest(policy), {name: digest(state) for name, state in states.items()}
with casckpt.open(path, read_only=True, level=level) as store:
    restored = {}
    for step in store.steps():
        state = store.restore(step)
        restored[step] = digest(state.pop("policy")), {name: digest(state[name]) for name in optimizers}
    print(json.dumps([has_kernels(), committed, restored, store.verify(read_data=True).ok]))
"""


def run(store: Path, level: str, steps: range, *, is_compiled: bool) -> tuple[dict[str, object], dict[str, object]]:
    """Commit some steps in a process of its own, and restore all: digests by step."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("CASCKPT_KERNELS", None)
    if not is_compiled:
        environment["CASCKPT_KERNELS"] = "0"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(store), level, str(steps.start), str(steps.stop - 1)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    has_kernels, committed, restored, is_sound = json.loads(done.stdout)
    assert has_kernels == is_compiled
    assert is_sound
    return committed, restored


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_first_compiled", [True, False], ids=["compiled first", "numpy first"])
def test_processes_with_and_without_kernels_restore_each_others_steps(
    store_path: Path, level: str, is_first_compiled: bool
) -> None:
    """The second process goes on with the chain of the first, and the first kind reads all of it."""
    expected = {}
    for number, steps in enumerate((range(1, 5), range(5, 9), range(9, 10))):
        committed, restored = run(store_path, level, steps, is_compiled=is_first_compiled == (number != 1))
        expected |= committed
        assert restored == expected
    if level != "fast":
        with open_store(store_path, read_only=True) as store:
            places = store._keeper.reader.locate(list(dissect(store_path).records))
        codecs = {place.codec for found in places for place in found}
        assert {PLANES, DIFFERENCE, PREDICTION} <= codecs
