"""The only door to torch. Imported only when a state, or a structure to restore, holds something of torch.

`describe` says where a tensor's bytes lie and what they mean; the rest makes tensors out of memory, and moves bytes
between live tensors and staging buffers.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch

from casckpt.errors import MismatchError, StoreWarning
from casckpt.format.dtypes import TORCH_ITEMSIZES
from casckpt.format.structure import PARAMETER, REQUIRES_GRAD, Leaf
from casckpt.state.memory import compact_strides, distinct_count, flat_parts, reach, window

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in TORCH_ITEMSIZES if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ITEMSIZES = {dtype: TORCH_ITEMSIZES[name] for name, dtype in DTYPES.items()}

_is_cpu, _dtype, _shape = attrgetter("is_cpu"), attrgetter("dtype"), attrgetter("shape")
_requires_grad, _version = attrgetter("requires_grad"), attrgetter("_version")
_COMPLEX = frozenset(name for name in DTYPES if name.startswith("complex"))
_CONJUGABLE = frozenset(map(DTYPES.__getitem__, _COMPLEX))

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
LEAF_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
GENERATOR = torch.Generator
_strided = torch.strided
_PIECE_SIZE = (
    512 * 1024
)  # 32,768 elements of 16 bytes: at::internal::GRAIN_SIZE, up to which torch copies on one thread

# (kind, dtype, shape, strides, flags), low address or None (copied) or -1 (empty), high address, first element, dense
Described = tuple[tuple[str, str, tuple[int, ...], tuple[int, ...] | None, int], int | None, int, int, bool]


def describe(tensor: torch.Tensor) -> Described:
    """Where a tensor's bytes lie; about 1.5 µs.

    Raises:
        ValueError: a tensor that is not plain strided memory; says why.
    """
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not _strided or tensor.is_nested:
        raise ValueError(_refusal(tensor))
    flags = (type(tensor) is Parameter) * PARAMETER + tensor.requires_grad * REQUIRES_GRAD
    shape = tensor.shape
    size = tensor.nbytes
    if not size:
        return ("torch", name, shape, None, flags), -1, 0, 0, True
    is_lazy = tensor.is_neg() or (name in _COMPLEX and tensor.is_conj())
    if not is_lazy and tensor.is_cpu and tensor.is_contiguous():
        low = tensor.data_ptr()
        return ("torch", name, shape, None, flags), low, low + size, low, True
    return _describe_unusual(tensor, ("torch", name, shape, None, flags), is_lazy)


def _describe_unusual(tensor: torch.Tensor, meta: Any, is_lazy: bool) -> Described:
    """Of a tensor that is strided, elsewhere than on the CPU, or a lazy conjugate or negative."""
    if tensor.device.type == "meta":
        raise ValueError("a tensor on the meta device has no data; materialize it (`to_empty`) first")
    kind, name, shape, _, flags = meta
    itemsize = _ITEMSIZES[tensor.dtype]
    strides = tensor.stride()
    if is_lazy:  # the memory holds other values than the tensor shows, so it cannot be shared
        return (kind, name, shape, compact_strides(shape, strides, 1), flags), None, 0, 0, False
    low = tensor.data_ptr()
    extent = (reach(shape, strides)[1] + 1) * itemsize
    if not tensor.is_cpu:
        low |= (_device_number(tensor.device) + 1) << 64
    is_dense = extent <= distinct_count(shape, strides) * itemsize
    kept = None if tensor.is_contiguous() else strides
    return (kind, name, shape, kept, flags), low, low + extent, low, is_dense


def _device_number(device: torch.device) -> int:
    return (device.index or 0) * 256 + sum(map(ord, device.type)) % 256


def _refusal(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "nested tensors are not supported; store their parts (`unbind()`)"
    if tensor.layout is not _strided:
        return f"{tensor.layout} tensors are not supported; store indices and values, or `to_dense()`"
    return f"tensors of {tensor.dtype} are not supported; store `int_repr()`, scale and zero point"


def survey(tensors: list[torch.Tensor]) -> tuple[tuple[list[Any], ...], list[int]] | None:
    """All that `describe` depends on, of many tensors: equal surveys mean equal descriptions. And their versions.

    None where a tensor is special (sparse, nested, complex, lazily negative, not on the CPU, made in inference
    mode), which is described alone. About 0.3 µs a tensor.
    """
    try:
        versions = list(map(_version, tensors))
        dtypes = list(map(_dtype, tensors))
        if not all(map(_is_cpu, tensors)) or any(map(Tensor.is_neg, tensors)) or not _CONJUGABLE.isdisjoint(dtypes):
            return None
        places = list(map(Tensor.data_ptr, tensors))
        shapes = list(map(_shape, tensors))
        in_order = list(map(Tensor.is_contiguous, tensors))
        strides = [tensor.stride() for tensor, is_plain in zip(tensors, in_order, strict=True) if not is_plain]
    except RuntimeError:  # tensors made in inference mode have no version, sparse ones no address, nested ones no shape
        return None
    types = list(map(type, tensors))
    return (places, dtypes, shapes, in_order, strides, types, list(map(_requires_grad, tensors))), versions


class DeviceSource:
    """The `size` device bytes from address `low` on, in the storage of `tensor`; called for copies of pieces of them.

    Any thread may call it: what it reads is what the stream that was current when it was made has written by then.

    Attributes:
        flat: all of them, on the device. It shares the storage and keeps it alive.
    """

    def __init__(self, tensor: torch.Tensor, low: int, size: int) -> None:
        storage = tensor.untyped_storage()
        address = low & ((1 << 64) - 1)
        self.flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        with torch.no_grad():
            self.flat.set_(storage, address - storage.data_ptr(), (size,), (1,))
        self._after_writes = _after_writes(tensor)

    def __call__(self, start: int, stop: int) -> memoryview:
        with self._after_writes():
            return _bytes_of(self.flat[start:stop])


def _after_writes(tensor: torch.Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """Makes contexts in which any thread reads a tensor after what the caller's stream does up to then.

    Each thread has a current stream of its own on a CUDA device, which does not wait for the caller's.
    """
    if not tensor.is_cuda:
        return contextlib.nullcontext
    return functools.partial(torch.cuda.stream, torch.cuda.current_stream(tensor.device))


_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device, not only for the current one


class CudaCopies:
    """Copies from CUDA devices into page-locked memory, beside the kernels of a training.

    Each device has a stream of its own for them. A copy begins when the kernels that the caller's current stream has
    been given are done, and what that stream is given later waits for the copy: so the copy is of one instant, the
    caller waits for nothing but the launch, and the device holds no second copy.

    **Written from CUDA's documentation; it has not run on a GPU yet.**
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    @staticmethod
    def takes(source: Any) -> bool:
        """Whether a block's source lies on a CUDA device, as it is stored."""
        return isinstance(source, DeviceSource) and source.flat.is_cuda

    @staticmethod
    def lock(buffer: Any, address: int, size: int) -> None:
        """Page-lock the memory of a buffer, until it is gone. It begins with a page.

        torch's own pinned memory would be rounded up to a power of two.

        Raises:
            RuntimeError: so much cannot be locked.
        """
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(address, size, _PORTABLE))
        if status:
            with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next kernel: let it be ours
                torch.ones(1, device="cuda")
            raise RuntimeError(f"cudaHostRegister of {size} bytes: error {status}")
        weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False  # CUDA may be gone by then

    def start(self, copies: list[tuple[int, DeviceSource]]) -> Callable[[], None]:
        """Start copies of sources to host addresses; returns what waits until all have arrived."""
        events = []
        by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for address, source in copies:
            by_device.setdefault(source.flat.device, []).append((address, source.flat))
        for device, runs in by_device.items():
            training: Any = torch.cuda.current_stream(device)
            own = self._stream(device)
            own.wait_stream(training)
            with torch.cuda.stream(own), torch.no_grad():
                for address, flat in runs:
                    target = torch.frombuffer(window(address, flat.numel(), writable=True), dtype=torch.uint8)
                    target.copy_(flat, non_blocking=True)
                    flat.record_stream(own)  # freed memory is not given away before the copy is done
                event = own.record_event()
            training.wait_event(event)
            events.append(event)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def compact_source(tensor: torch.Tensor) -> Callable[[int, int], memoryview]:
    """Copies of pieces of what a tensor's contiguous copy would be, without making it whole."""
    detached = tensor.detach()
    after_writes = _after_writes(tensor)
    strides = tensor.stride()
    for axis, stride in enumerate(strides):
        if not stride:
            detached = detached.narrow(axis, 0, 1)
    itemsize = _ITEMSIZES[tensor.dtype]

    def piece(start: int, stop: int) -> memoryview:
        first, last = start // itemsize, -(-stop // itemsize)
        with after_writes():
            parts = [part.resolve_conj().resolve_neg().reshape(-1) for part in flat_parts(detached, first, last)]
            whole = _bytes_of(parts[0]) if len(parts) == 1 else memoryview(b"".join(map(_bytes_of, parts)))
        return whole[start - first * itemsize : stop - first * itemsize]

    return piece


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().reshape(-1))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def generator_tree(generator: torch.Generator) -> dict[str, Any]:
    """A generator's state as a plain tree; a fresh copy."""
    return {"device": generator.device.type, "state": generator.get_state()}


def set_generator(generator: torch.Generator, tree: dict[str, Any]) -> None:
    """Put a state from `generator_tree` into a generator of the same kind of device."""
    generator.set_state(tree["state"].cpu())


def make_generator(tree: dict[str, Any]) -> torch.Generator:
    generator = torch.Generator(device=tree["device"])
    set_generator(generator, tree)
    return generator


def global_rng_trees() -> dict[str, Any]:
    """States of the global generators: the CPU's, and every CUDA device's once CUDA is in use."""
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if in_use else []}


def set_global_rngs(tree: dict[str, Any]) -> None:
    """Put states from `global_rng_trees` into the global generators; of devices that are not here, none."""
    torch.set_rng_state(tree["cpu"].cpu())
    states = tree["cuda"]
    device_count = torch.cuda.device_count() if states else 0
    for index, state in enumerate(states[:device_count]):
        torch.cuda.set_rng_state(state.cpu(), index)
    if len(states) > device_count:
        warnings.warn(
            f"the snapshot has random streams of {len(states)} CUDA devices, and {device_count} are here: the others "
            "were not restored, and what is drawn on a device differs from the run that was saved.",
            StoreWarning,
            stacklevel=2,
        )


def value_of(kind: str, payload: Any) -> Any:
    """A torch.Size, torch.dtype or torch.device from its stored payload.

    Raises:
        ValueError, TypeError, RuntimeError: not such a payload.
    """
    if kind == "torch.Size" and type(payload) is list:
        return torch.Size(payload)
    if kind == "torch.dtype" and payload in DTYPES:
        return DTYPES[payload]
    if kind == "torch.device" and type(payload) is str:
        return torch.device(payload)
    raise ValueError(f"{payload!r:.60}")


def allocate(size: int) -> torch.Tensor:
    """Fresh bytes for a block; 64-byte aligned, pages untouched."""
    return torch.empty(size, dtype=torch.uint8)


def memory_of(buffer: torch.Tensor) -> memoryview:
    """The writable memory of a buffer from `allocate`; keeps it alive."""
    return memoryview(buffer.numpy())  # type: ignore[arg-type]


def tensor_in(buffer: torch.Tensor | None, start: int, leaf: Leaf, device: Any) -> torch.Tensor:
    """The tensor of `leaf` in `buffer`, whose byte `start` is the leaf's first element."""
    dtype = DTYPES[leaf.dtype]
    if buffer is None:
        made = torch.empty(leaf.shape, dtype=dtype, device=device)
    else:
        made = torch.empty(0, dtype=dtype, device=buffer.device)
        strides = _c_strides(leaf.shape) if leaf.strides is None else leaf.strides
        made.set_(buffer.untyped_storage(), start // _ITEMSIZES[dtype], leaf.shape, strides)
    if leaf.flags & PARAMETER:
        return torch.nn.Parameter(made, requires_grad=bool(leaf.flags & REQUIRES_GRAD))
    return made.requires_grad_() if leaf.flags & REQUIRES_GRAD else made


def tensor_over(memory: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements in C order are all of `memory` (writable bytes), which it keeps alive."""
    if not memory:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(memory, dtype=torch.uint8).view(DTYPES[dtype]).reshape(shape)


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def pieces(runs: list[tuple[int, int, bool]]) -> list[torch.Tensor]:
    """Views of at most 512 KiB over runs of CPU memory, each (address, size, whether 16 divides all addresses).

    They keep nothing alive. Items of 16 bytes copy fastest, and fault where they lie at other addresses.
    """
    found: list[torch.Tensor] = []
    for address, size, is_aligned in runs:
        memory = window(address, size, writable=True)
        wide = size // 16 * 16 if is_aligned else 0
        if wide:
            items = torch.frombuffer(memory, dtype=torch.complex128, count=wide // 16)
            found += torch.split(items, _PIECE_SIZE // 16) if wide > _PIECE_SIZE else (items,)
        if wide < size:
            found += torch.split(torch.frombuffer(memory, dtype=torch.uint8, offset=wide), _PIECE_SIZE)
    return found


def copy_pieces(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy equally cut pieces, on this thread, giving up the GIL once."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)


def copy_into(live: torch.Tensor, stored: torch.Tensor) -> float:
    """Copy into a live tensor; the largest change by a cast, 0.0 where the dtypes agree."""
    with torch.no_grad():
        for axis, stride in enumerate(live.stride()):
            if not stride and live.shape[axis]:
                live, stored = live.narrow(axis, 0, 1), stored.narrow(axis, 0, 1)
        live.copy_(stored)
        if live.dtype == stored.dtype or not live.numel():
            return 0.0
        wide = torch.complex128 if live.is_complex() or stored.is_complex() else torch.float64
        change = (live.cpu().to(wide) - stored.cpu().to(wide)).abs()
        return float(torch.nan_to_num(change, nan=0.0, posinf=float("inf")).max())


def note_written(tensors: list[torch.Tensor]) -> None:
    """Tell autograd that the memory of these tensors was written behind its back."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def storages_of(module: torch.nn.Module) -> set[int]:
    """The storages of a module's parameters and buffers, by address."""
    owned = [*module.parameters(), *module.buffers()]
    return {tensor.untyped_storage().data_ptr() for tensor in owned if type(tensor) in LEAF_TYPES}


def is_in(value: Any, storages: set[int]) -> bool:
    """Whether a value of a module's state dict is memory of the module itself."""
    return type(value) in LEAF_TYPES and value.untyped_storage().data_ptr() in storages


def check_optimizer(optimizer: torch.optim.Optimizer, groups: Any, path: str) -> None:
    """Compare parameter groups, which `load_state_dict` would refuse half way.

    Raises:
        MismatchError: another number of groups, or of parameters in one.
    """
    stored = [len(group["params"]) for group in groups]
    live = [len(group["params"]) for group in optimizer.param_groups]
    if stored != live:
        raise MismatchError(
            f"{path}/param_groups: expected groups of {stored} parameters, found {live}. "
            "Build the optimizer over the parameters it was saved with.",
            path=f"{path}/param_groups",
            differences=[(f"{path}/param_groups", f"groups of {stored} parameters", f"groups of {live}")],
        )


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`load_state_dict`, and then exactly the stored dtypes.

    torch casts floating state to the parameter's dtype; state that was kept wider than its parameter (fp32 moments of
    bf16 weights) would lose bits in silence, so it is put back as it was stored.
    """
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stored_ids = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(stored_ids, parameters, strict=True):
        loaded = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(number, {}).items():
            now = loaded.get(name)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                loaded[name] = value.to(now.device)


def as_wide_arrays(dtype: str, a: Any, b: Any) -> tuple[Any, Any] | None:
    """Two byte strings of a torch dtype as float64 or complex128 arrays; None where it cannot be converted."""
    kind = DTYPES[dtype]
    wide = torch.complex128 if kind.is_complex else torch.float64
    try:
        first, second = (torch.frombuffer(bytearray(side), dtype=kind).to(wide).numpy() for side in (a, b))
    except (RuntimeError, NotImplementedError):  # packed types such as float4 have no conversion
        return None
    return first, second
