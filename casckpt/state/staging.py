"""Copies of captured components in reused memory, so that training may go on while they are written.

Each component has two *slots* that alternate (more where more saves may be under way); a slot is taken by `stage` and
given back by `release`. Components that are saved at different rates do not disturb each other's. Buffers grow to what
is needed and stay: fresh pages cost seven times a warm copy, and are paid once, by `reserve` if that is called. All
blocks of a component in CPU
memory are copied by one `torch._foreach_copy_` over views that are kept as long as the addresses stay the same: one
call gives up the GIL once, where a copy per tensor would queue behind every busy Python thread. The views are pieces of
at most 512 KiB, which torch copies on the calling thread, so that neither the user's thread count nor a busy core
matters. Without torch, plain memoryview copies do. What lies on a CUDA device is copied by a *device layer*
(`_torch.CudaCopies`) into page-locked slots while the caller goes on; whoever commits waits for that by `settle`.

A copy is one instant only if nobody writes meanwhile: torch's version counters are compared before and after, and
samples of the copy with the live memory. What moved is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import warnings
from collections.abc import Callable, Collection
from typing import Any, Protocol

from casckpt.errors import BusyError, ConcurrentMutationError, StoreWarning
from casckpt.state.blocks import Blocks
from casckpt.state.capture import Captured
from casckpt.state.memory import window
from casckpt.state.walk import Kept

SLOT_COUNT = 2
_ALIGNMENT = 64
_HUGE_FROM = 4 << 20  # bytes: a huge page is 2 MiB, of which small components would waste most
_STEP = 8 << 20  # bytes of a device or strided block copied at a time
_SAMPLE_COUNT, _SAMPLE_SIZE = 64, 512


class DeviceLayer(Protocol):
    """Copies that go on beside the caller; see `_torch.CudaCopies`."""

    def takes(self, source: Any) -> bool:
        """Whether a block with this source is copied here."""

    def lock(self, buffer: Any, address: int, size: int) -> None:
        """Page-lock the memory of a buffer that such copies will arrive in, for as long as it lives.

        Raises:
            RuntimeError: so much cannot be locked.
        """

    def start(self, copies: list[tuple[int, Any]]) -> Callable[[], None]:
        """Start copies of sources to addresses; what is returned waits for them."""


def _arrived() -> None:
    """What waits for copies where there are none."""


class _Slot:
    """One of a component's buffers, with the views of its last copy.

    Attributes:
        arrive: waits for what a device layer still copies into the buffer.
    """

    def __init__(self) -> None:
        self.arrive: Callable[[], None] = _arrived
        self.is_locked = False  # or could not be
        self.taken_by: list[Captured] | None = None
        self.buffer: Any = None
        self.address = 0
        self.capacity = 0
        self.offsets: list[int] = []
        self.addresses: list[int] = []
        self.extents: Any = None  # of the capture that `sources` was made for
        self.runs: list[tuple[int, int, bool]] = []  # what `targets` was made for
        self.targets: list[Any] = []
        self.sources: list[Any] | None = None
        self.is_torch = False  # whether both are tensors

    def fit(self, captured: Captured, device: DeviceLayer | None) -> None:
        """Make room, and place every block."""
        position = 0
        self.offsets = []
        for size, _ in captured.structure.blocks:
            self.offsets.append(position)
            position += -(-size // _ALIGNMENT) * _ALIGNMENT
        if position > self.capacity:
            self.buffer = self.extents = self.sources = None  # the old one goes before the new one comes, if it does
            self.runs, self.targets, self.capacity = [], [], 0
            self.buffer, self.address = _allocate(position)
            self.capacity, self.is_locked = position, False
        if device is not None and not self.is_locked:
            self.is_locked = True
            try:
                device.lock(self.buffer, self.address, self.capacity)
            except RuntimeError as error:
                warnings.warn(
                    f"{self.capacity} bytes of memory could not be page-locked ({error}): copies from the device keep "
                    "training waiting. Allow more locked memory, or register less.",
                    StoreWarning,
                    stacklevel=2,
                )

    def copy(self, captured: Captured, device: DeviceLayer | None) -> None:
        """Copy every block; what a device layer takes has arrived when `arrive` returns."""
        kept, sources = captured.kept, captured.blocks.sources
        taken = [] if device is None else [block for block, source in sources.items() if device.takes(source)]
        if self.extents is not kept.extents and self.extents != kept.extents:
            self.fit(captured, device if taken else None)
            self.sources = None
        self.extents = kept.extents
        if self.sources is None or self.is_torch != ("torch" in sys.modules):
            self.addresses = [self.address + offset for offset in self.offsets]
            self.sources = self._pair(captured)
        if device is not None and taken:
            self.arrive = device.start([(self.addresses[block], sources[block]) for block in taken])
        if self.is_torch:
            from casckpt.state import _torch

            _torch.copy_pieces(self.targets, self.sources)
        else:
            for target, source in zip(self.targets, self.sources, strict=True):
                target[:] = source
        for block in sources.keys() - set(taken):
            self._copy_stepwise(captured.blocks, block)

    def settle(self) -> None:
        """Wait for what is still being copied here."""
        arrive, self.arrive = self.arrive, _arrived
        arrive()

    def _pair(self, captured: Captured) -> list[Any]:
        """Views of the blocks, cut as `targets` is; that is made anew only where sizes or alignments are new."""
        blocks = captured.blocks
        live = [block for block in range(len(self.offsets)) if block not in blocks.sources]
        found = [(blocks.addresses[block], blocks.size(block), blocks.addresses[block] % 16 == 0) for block in live]
        runs = [(self.addresses[block], *run[1:]) for block, run in zip(live, found, strict=True)]
        is_torch = "torch" in sys.modules
        if self.runs != runs or self.is_torch != is_torch:
            self.targets, self.runs, self.is_torch = _views(runs, is_torch), runs, is_torch
        return _views(found, is_torch)

    def _copy_stepwise(self, blocks: Blocks, block: int) -> None:
        size = blocks.size(block)
        target = window(self.address + self.offsets[block], size, writable=True)
        for start in range(0, size, _STEP):
            stop = min(start + _STEP, size)
            target[start:stop] = blocks.view(block, start, stop)

    def captured(self, captured: Captured) -> Captured:
        """The component, backed by this slot."""
        blocks = Blocks(captured.blocks.sizes, self.addresses, {})
        held = Kept([self.buffer], captured.kept.extents, {}, captured.kept.surveys)
        parts = (captured.structure, captured.structure_bytes, captured.scalars)
        return Captured(captured.component, *parts, blocks, held, captured.plan)


def _views(runs: list[tuple[int, int, bool]], is_torch: bool) -> list[Any]:
    """Views of runs of memory, each (address, size, whether 16 divides it and what it is copied to or from)."""
    if is_torch:
        from casckpt.state import _torch

        return _torch.pieces(runs)
    return [window(address, size, writable=True) for address, size, _ in runs]


def _allocate(size: int) -> tuple[Any, int]:
    """Memory of this process alone with all of its pages touched, and the address of its first page.

    Large ones lie in huge pages where the system has them: fewer faults now, and fewer misses in every copy.

    Raises:
        MemoryError: there is not so much.
    """
    kind = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, size, **kind)
    except OSError as error:
        raise MemoryError(
            f"{size} bytes for a copy of a component: {error}. Register less, or save durably."
        ) from error
    if size >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = (ctypes.c_char * size).from_buffer(memory)
    address = ctypes.addressof(buffer)
    ctypes.memset(address, 1, size)
    return buffer, address


class Staging:
    """Slots for copies of captured components. One thread stages at a time; any thread may settle and release.

    Args:
        slot_count: how many copies of a component there may be at once.
        device: copies what lies on a device; None for CUDA's.

    Memory: at most `slot_count` times the state.
    """

    def __init__(self, slot_count: int = SLOT_COUNT, device: DeviceLayer | None = None) -> None:
        self.slot_count = slot_count
        self._device = device
        self._slots: dict[str, list[_Slot]] = {}
        self._copies: dict[str, Captured] = {}

    def latest(self) -> dict[str, Captured]:
        """The last copy of each component, whose memory a later `stage` writes over; empty before the first."""
        return dict(self._copies)

    def reserve(self, captured: list[Captured]) -> None:
        """Do in all free slots what a first copy has to do, so that no later `stage` pays for fresh pages and views."""
        for one in captured:
            for slot in self._slots_of(one.component):
                if slot.taken_by is None:
                    slot.copy(one, self._device_layer())
                    slot.settle()

    def components(self) -> list[str]:
        """Those that have memory here."""
        return list(self._slots)

    def keep(self, components: Collection[str]) -> None:
        """Let go of the memory of all other components."""
        for component in self._slots.keys() - set(components):
            if all(slot.taken_by is None for slot in self._slots[component]):
                del self._slots[component]
                self._copies.pop(component, None)

    def has_room(self, component: str) -> bool:
        """Whether a copy of this component could be taken now."""
        return any(slot.taken_by is None for slot in self._slots_of(component))

    def stage(self, captured: list[Captured]) -> list[Captured]:
        """Copy every block; the result may be read after `settle`, until it is given to `release`.

        Cost when warm: about one memcpy of the bytes. The calling thread copies; other Python threads run meanwhile.

        Raises:
            BusyError: all slots of a component are in use.
            ConcurrentMutationError: something wrote to the state during the copy; nothing is taken.
        """
        slots = [self._free_slot(one.component) for one in captured]
        staged = []
        try:
            for slot, one in zip(slots, captured, strict=True):
                slot.copy(one, self._device_layer())
                staged.append(slot.captured(one))
            _refuse_moved(captured, staged)
        except BaseException:
            for slot in slots:
                slot.settle()  # nobody else writes to memory that a copy is on its way to
            raise
        for slot, one in zip(slots, staged, strict=True):
            slot.taken_by = staged
            others = self._slots[one.component]
            others.append(others.pop(others.index(slot)))  # the one used longest ago comes first
        self._copies.update({one.component: one for one in staged})
        return staged

    def _slots_of(self, component: str) -> list[_Slot]:
        return self._slots.setdefault(component, [_Slot() for _ in range(self.slot_count)])

    def _free_slot(self, component: str) -> _Slot:
        for slot in self._slots_of(component):
            if slot.taken_by is None:
                return slot
        raise BusyError(
            f"all staging buffers of {component!r} hold commits that are still being written. Wait for one of them."
        )

    def settle(self, staged: list[Captured]) -> None:
        """Wait until a copy has arrived, wherever its state lies."""
        for slot in self._slots_of_copy(staged):
            slot.settle()

    def release(self, staged: list[Captured]) -> None:
        """Give slots back; the staged components may not be read afterwards."""
        for slot in self._slots_of_copy(staged):
            slot.taken_by = None

    def _slots_of_copy(self, staged: list[Captured]) -> list[_Slot]:
        return [slot for slots in list(self._slots.values()) for slot in slots if slot.taken_by is staged]

    def _device_layer(self) -> DeviceLayer | None:
        if self._device is None and "torch" in sys.modules:
            from casckpt.state import _torch

            self._device = _torch.CudaCopies()  # nothing of CUDA is touched before it takes something
        return self._device


def _refuse_moved(captured: list[Captured], staged: list[Captured]) -> None:
    moved = [path for one in captured for path in one.moved()]
    if not moved:
        pairs = zip(captured, staged, strict=True)
        moved = [live.component for live, copy in pairs if not _samples_agree(live.blocks, copy.blocks)]
    if moved:
        raise ConcurrentMutationError(
            f"{', '.join(moved[:5])}: changed while being copied. Commit from the thread that owns the state, "
            "or hold its lock.",
            paths=moved,
        )


def _samples_agree(live: Blocks, copy: Blocks) -> bool:
    """Compare up to 64 evenly spread pieces of 512 bytes."""
    step = max(1, len(live) // _SAMPLE_COUNT)
    per_block = max(1, _SAMPLE_COUNT // max(len(live), 1))
    for block in range(0, len(live), step):
        size = live.size(block)
        for part in range(per_block):
            start = (size - _SAMPLE_SIZE) * (part + 1) // (per_block + 1) if size > _SAMPLE_SIZE else 0
            stop = min(size, start + _SAMPLE_SIZE)
            if block not in live.sources and live.view(block, start, stop) != copy.view(block, start, stop):
                return False
    return True
