"""Staged copies: independent of the live state, bounded in number, and honest about writes during the copy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from casckpt.errors import BusyError, ConcurrentMutationError
from casckpt.state import Captured, Staging, capture
from casckpt.state import staging as module


def contents(captured: Captured) -> list[bytes]:
    return [bytes(captured.blocks.view(i, 0, captured.blocks.size(i))) for i in range(len(captured.blocks))]


def state() -> dict[str, Any]:
    base = torch.arange(300_000, dtype=torch.float32)
    return {
        "big": base,
        "view": base[7:99],
        "odd": torch.arange(13, dtype=torch.uint8),
        "array": np.arange(1001, dtype=np.int16),
        "column": torch.arange(20.0).reshape(4, 5)[:, 2],
        "grad": torch.nn.Parameter(torch.ones(3)),
        "blob": bytes(range(256)) * 20,
        "empty": torch.empty(0),
    }


def test_a_staged_copy_keeps_the_values_of_the_call_whatever_happens_to_the_state() -> None:
    live = state()
    captured = capture("c", live)
    expected = contents(captured)
    (copy,) = Staging().stage([captured])
    with torch.no_grad():
        live["big"].fill_(0), live["odd"].fill_(0), live["column"].fill_(9), live["grad"].fill_(9)
    live["array"][:] = 0
    assert contents(copy) == expected
    assert copy.structure_bytes == captured.structure_bytes and copy.scalars == captured.scalars
    assert copy.moved() == []


def test_buffers_and_views_are_reused_while_the_shape_of_the_state_stays() -> None:
    live = state()
    staging = Staging()
    previous = None
    addresses = []
    for value in range(6):
        live["big"].fill_(value)
        previous = capture("c", live, previous=previous)
        staged = staging.stage([previous])
        assert contents(staged[0]) == contents(previous)
        addresses.append(staged[0].blocks.addresses[0])
        staging.release(staged)
    assert len(set(addresses)) == 2, "two generations"


def test_memory_that_moved_or_grew_between_commits_is_copied_from_where_it_is_now() -> None:
    staging = Staging()
    for size in (10, 2000, 10, 300_000):
        captured = capture("c", {"a": torch.full((size,), float(size)), "b": np.full(3, size)})
        staged = staging.stage([captured])
        assert contents(staged[0]) == contents(captured)
        staging.release(staged)


def test_a_component_left_out_of_some_copies_keeps_its_memory_and_its_last_copy() -> None:
    staging = Staging()
    full, light = {"big": torch.ones(100_000)}, {"small": torch.ones(3)}
    addresses = []
    for value in range(4):
        full["big"].fill_(value)
        staged = staging.stage([capture("full", full), capture("light", light)])
        addresses.append(staged[0].blocks.addresses[0])
        expected = contents(staged[0])
        staging.release(staged)
        for _ in range(3):
            staging.release(staging.stage([capture("light", light)]))
        assert contents(staging.latest()["full"]) == expected
    assert addresses[0] == addresses[2] != addresses[1] == addresses[3]
    staging.keep({"light"})
    assert list(staging.latest()) == ["light"]


def test_memory_that_was_reserved_serves_the_first_copies() -> None:
    staging, live = Staging(), state()
    captured = capture("c", live)
    staging.reserve([captured])
    reserved = [slot.address for slot in staging._slots["c"]]
    expected = contents(captured)
    first, second = staging.stage([captured]), staging.stage([captured])
    assert contents(first[0]) == contents(second[0]) == expected
    assert [one[0].blocks.addresses[0] for one in (first, second)] == reserved


def test_a_third_generation_waits_for_a_release() -> None:
    staging = Staging()
    captured = capture("c", {"a": torch.ones(4)})
    first, second = staging.stage([captured]), staging.stage([captured])
    with pytest.raises(BusyError, match="staging"):
        staging.stage([captured])
    staging.release(first)
    third = staging.stage([captured])
    assert contents(second[0]) == contents(third[0]) == contents(captured)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_write_during_the_copy_is_refused_and_takes_no_buffer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    live: dict[str, Any] = {"t": torch.zeros(100), "n": np.zeros(100)}
    captured = capture("policy", live)
    staging = Staging()
    real = module._Slot.copy

    def copy_while_another_thread_writes(slot: Any, one: Captured) -> None:
        real(slot, one)
        if kind == "torch":
            live["t"].add_(1)
        else:
            live["n"][:] = 1

    monkeypatch.setattr(module._Slot, "copy", copy_while_another_thread_writes)
    for _ in range(3):
        with pytest.raises(ConcurrentMutationError, match="policy"):
            staging.stage([captured])
        captured = capture("policy", live)
        live["n"][:] = 0
    monkeypatch.undo()
    staging.stage([captured])


@pytest.mark.full
def test_staging_leaves_the_users_thread_count_and_torch_alone() -> None:
    code = (
        "import torch\n"
        "torch.set_num_threads(3)\n"
        "from casckpt.state import *\n"
        "s = Staging(); s.stage([capture('c', {'a': torch.ones(1 << 20)})])\n"
        "print(torch.get_num_threads())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("3\n", "")
