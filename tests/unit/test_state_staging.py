"""Staged copies: independent of the live state, bounded in number, and honest about writes during the copy."""

from __future__ import annotations

import contextlib
import mmap
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.errors import BusyError, ConcurrentMutationError, StoreWarning
from casckpt.state import Captured, Staging, capture
from casckpt.state import _torch as door
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


def test_a_state_that_moves_in_memory_is_copied_from_where_it_lies() -> None:
    memory = torch.arange(600_000, dtype=torch.uint8)
    staging = Staging()
    for offset, size in ((0, 550_001), (1, 550_001), (16, 550_001), (7, 9), (32, 16), (0, 599_984), (16, 599_984)):
        live = {"first": memory[offset : offset + size].clone(), "second": memory[offset : offset + size]}
        captured = capture("c", live)
        (copy,) = staged = staging.stage([captured])
        expected = bytes(memory[offset : offset + size].numpy())
        assert contents(copy) == [expected] * len(copy.blocks)
        assert len(copy.blocks) == 2
        staging.release(staged)


@pytest.mark.full
def test_torch_may_be_imported_after_the_first_copy() -> None:
    code = """if True:
        import sys
        import numpy as np
        from casckpt.state import Staging, capture
        staging, live, previous = Staging(), {"x": np.zeros(100_000)}, None
        for step in range(6):
            if step == 3:
                assert "torch" not in sys.modules
                import torch
            live["x"] += 1
            previous = capture("c", live, previous=previous)
            (copy,) = staged = staging.stage([previous])
            assert bytes(copy.blocks.view(0, 0, 800_000)) == np.full(100_000, step + 1.0).tobytes()
            staging.release(staged)
        print("six")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("six\n", 0), done.stderr


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

    def copy_while_another_thread_writes(slot: Any, one: Captured, device: Any) -> None:
        real(slot, one, device)
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


# --- what a device copies beside the caller: which blocks, where to, and what waits for it ---


class Layer:
    """A device layer that notes what it is asked for and copies nothing."""

    def __init__(self, lockable: int = 1 << 40) -> None:
        self.lockable = lockable
        self.locked: list[int] = []
        self.started: list[list[int]] = []
        self.waited = 0

    def takes(self, source: Any) -> bool:
        return isinstance(source, Remote)

    def lock(self, buffer: Any, address: int, size: int) -> None:
        assert address % mmap.PAGESIZE == 0 and len(buffer) >= size
        if size > self.lockable:
            raise RuntimeError("cudaHostRegister: error 2")
        self.locked.append(size)

    def start(self, copies: list[tuple[int, Any]]) -> Any:
        self.started.append([address for address, _ in copies])

        def wait() -> None:
            self.waited += 1

        return wait


class Remote:
    """The source of a block that lies on a device, where nobody may read it on the caller's time."""

    def __call__(self, start: int, stop: int) -> memoryview:
        raise AssertionError("a block of a device was copied by the caller")


REMOTE, BESIDE = 5000, 301  # elements of a block on a device, and of one in memory


def remote_state() -> tuple[dict[str, torch.Tensor], Captured]:
    live = {"near": torch.ones(BESIDE), "far": torch.zeros(REMOTE), "column": torch.ones(20, 3)[:, 1]}
    captured = capture("c", live)
    captured.blocks.sources[1] = Remote()
    return live, captured


def test_blocks_of_a_device_are_copied_by_its_layer_and_all_others_here() -> None:
    layer, (_, captured) = Layer(), remote_state()
    staging = Staging(device=layer)
    (copy,) = staging.stage([captured])
    assert layer.started == [[copy.blocks.addresses[1]]]
    assert [contents(copy)[block] for block in (0, 2)] == [contents_of(captured, block) for block in (0, 2)]
    assert len(layer.locked) == 1 and layer.locked[0] >= 4 * (REMOTE + BESIDE)
    assert layer.waited == 0  # the caller goes on


def contents_of(captured: Captured, block: int) -> bytes:
    return bytes(captured.blocks.view(block, 0, captured.blocks.size(block)))


def test_copies_of_a_device_are_waited_for_once_and_by_whoever_reads_them() -> None:
    layer = Layer()
    staging = Staging(device=layer)
    live, captured = remote_state()
    first, second = staging.stage([captured]), staging.stage([captured])
    assert layer.waited == 0
    staging.settle(second)
    assert layer.waited == 1
    staging.settle(first), staging.settle(first)
    assert layer.waited == 2
    staging.release(first), staging.release(second)
    addresses = [one[0].blocks.addresses for one in (first, second)]
    for _ in range(4):  # the same two buffers, page-locked once
        staged = staging.stage([captured])
        assert staged[0].blocks.addresses in addresses
        staging.settle(staged)
        staging.release(staged)
    assert (len(layer.locked), layer.waited) == (2, 6)
    assert live["near"][0] == 1.0


def test_memory_for_a_device_is_locked_and_touched_when_it_is_reserved() -> None:
    layer, (_, captured) = Layer(), remote_state()
    staging = Staging(device=layer)
    staging.reserve([captured])
    assert (len(layer.locked), len(layer.started), layer.waited) == (2, 2, 2)
    staging.release(staging.stage([captured]))
    assert len(layer.locked) == 2


def test_component_that_moves_to_a_device_gets_locked_memory_and_back_again_keeps_it() -> None:
    layer = Layer()
    staging = Staging(slot_count=1, device=layer)
    here = capture("c", remote_state()[0])
    staging.release(staging.stage([here]))
    assert layer.locked == []
    live, there = remote_state()  # other tensors, at other addresses
    staged = staging.stage([there])
    assert len(layer.locked) == 1
    staging.settle(staged)
    staging.release(staged)
    back = capture("c", {name: tensor.clone() for name, tensor in live.items()})
    (copy,) = staging.stage([back])
    assert contents(copy) == contents(back) and len(layer.started) == len(layer.locked) == 1


@pytest.mark.parametrize("kind", ["moved", "second component fails"])
def test_copy_that_is_refused_is_waited_for_before_its_memory_is_used_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer()
    staging = Staging(device=layer)
    live, captured = remote_state()
    others = [capture("d", {"a": torch.ones(7)})]
    if kind == "moved":
        live["near"].add_(1)
        with pytest.raises(ConcurrentMutationError):
            staging.stage([captured, *others])
    else:
        monkeypatch.setattr(module._Slot, "_pair", _out_of_memory_for("d", module._Slot._pair))
        with pytest.raises(MemoryError):
            staging.stage([captured, *others])
    assert (len(layer.started), layer.waited) == (1, 1)
    assert staging.has_room("c") and staging.latest() == {}


def _out_of_memory_for(component: str, real: Any) -> Any:
    def pair(slot: Any, captured: Captured) -> Any:
        if captured.component == component:
            raise MemoryError
        return real(slot, captured)

    return pair


def test_memory_that_cannot_be_locked_is_said_and_the_copy_made_all_the_same() -> None:
    layer = Layer(lockable=100)
    staging = Staging(slot_count=1, device=layer)
    with pytest.warns(StoreWarning, match=r"could not be page-locked \(cudaHostRegister: error 2\)"):
        staged = staging.stage([remote_state()[1]])
    assert len(layer.started) == 1
    staging.settle(staged)
    assert layer.waited == 1


def test_every_page_of_the_memory_is_there_and_it_begins_with_one() -> None:
    for size in (1, 5 << 20):
        buffer, address = module._allocate(size)
        assert bytes(buffer) == b"\x01" * size and address % mmap.PAGESIZE == 0


def test_slot_that_could_not_grow_is_made_anew_by_the_next_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(slot_count=1)
    small, large = capture("c", {"a": torch.ones(10)}), capture("c", {"a": torch.ones(1 << 20)})
    staging.release(staging.stage([small]))
    with monkeypatch.context() as patch:

        def refuse(*arguments: Any, **options: Any) -> Any:
            raise OSError(12, "Cannot allocate memory")

        patch.setattr(module.mmap, "mmap", refuse)
        with pytest.raises(MemoryError, match="4194304 bytes for a copy of a component"):
            staging.stage([large])
    for captured in (small, large, small):
        (copy,) = staged = staging.stage([captured])
        assert contents(copy) == contents(captured)
        staging.release(staged)


@pytest.mark.full
def test_memory_belongs_to_one_process_alone() -> None:
    code = (
        "import os\n"
        "from casckpt.state.staging import _allocate\n"
        "buffer = memoryview(_allocate(1 << 20)[0]).cast('B')\n"
        "if not os.fork(): buffer[0] = 7; os._exit(0)\n"
        "os.wait(); print(buffer[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.full
def test_without_a_device_nothing_of_cuda_is_touched() -> None:
    code = (
        "import torch\n"
        "def touched(*a, **k): raise AssertionError('CUDA was touched')\n"
        "for name in ('is_available', 'cudart', 'current_stream', 'Stream', '_lazy_init'):\n"
        "    setattr(torch.cuda, name, touched)\n"
        "from casckpt.state import *\n"
        "s = Staging(); c = capture('c', {'a': torch.ones(1 << 10)}); s.reserve([c]); x = s.stage([c]); s.settle(x)\n"
        "print('untouched')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("untouched\n", "")


class Runtime:
    """What CUDA's runtime does here: an error that nobody took stays for the next kernel of whoever comes."""

    def __init__(self) -> None:
        self.pending = 0
        self.flags: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.flags.append(flags)
        self.pending = 2
        return self.pending

    def kernel(self, *arguments: Any, **options: Any) -> None:
        pending, self.pending = self.pending, 0
        if pending:
            raise RuntimeError(f"CUDA error: {pending}")


def test_error_of_memory_that_cannot_be_locked_is_not_left_to_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", runtime.kernel)
    with pytest.raises(RuntimeError, match="cudaHostRegister of 4096 bytes: error 2"):
        door.CudaCopies.lock(bytearray(4096), 0, 4096)
    runtime.kernel()  # of the training: nothing is raised here
    assert runtime.flags == [1]  # cudaHostRegisterPortable: for every device


def test_blocks_of_a_device_are_read_in_the_order_of_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever thread reads them: a thread's own current stream does not wait for the caller's."""
    current = threading.local()
    current.stream = "the caller's"
    read_in: list[str] = []

    @contextlib.contextmanager
    def stream(chosen: str) -> Iterator[None]:
        before, current.stream = getattr(current, "stream", "the thread's own"), chosen
        yield
        current.stream = before

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current.stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    real = door._bytes_of

    def noting(tensor: torch.Tensor) -> memoryview:
        read_in.append(getattr(current, "stream", "the thread's own"))
        return real(tensor)

    monkeypatch.setattr(door, "_bytes_of", noting)
    whole, column = torch.arange(12.0), torch.arange(12.0).reshape(4, 3)[:, 1]
    sources = [door.DeviceSource(whole, whole.data_ptr(), whole.nbytes), door.compact_source(column)]
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.extend(bytes(source(0, 16)) for source in sources))
    reader.start(), reader.join()
    assert found == [np.arange(4, dtype=np.float32).tobytes(), np.array([1, 4, 7, 10], np.float32).tobytes()]
    assert read_in == ["the caller's"] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_that_a_gpu_cannot_lock_leaves_its_next_kernel_alone() -> None:
    with pytest.raises(RuntimeError, match="cudaHostRegister"):
        door.CudaCopies.lock(bytearray(1), 4096, 1 << 50)
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_durable_commit_waits_for_the_stream_that_writes(store_path: Path) -> None:
    side, weights = torch.cuda.Stream(), torch.zeros(1 << 22, device="cuda")
    torch.cuda.synchronize()
    with casckpt.open(store_path, create=True) as store, torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        weights.fill_(3)
        store.commit(1, {"policy": {"w": weights}})
        assert store.restore(1)["policy"]["w"].eq(3).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copy_from_a_gpu_is_of_one_instant_however_long_it_takes() -> None:
    weights = torch.arange(1 << 26, dtype=torch.float32, device="cuda")
    expected = weights.cpu()
    staging = Staging()
    captured = capture("c", {"w": weights, "here": torch.ones(3)})
    staging.reserve([captured])
    before = torch.cuda.memory_allocated()
    staged = staging.stage([captured])
    assert torch.cuda.memory_allocated() == before  # no second copy in device memory
    weights.zero_()  # queued behind the copy
    staging.settle(staged)
    assert contents(staged[0])[0] == expected.numpy().tobytes()
    torch.cuda.synchronize()
    assert not weights.any()


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
