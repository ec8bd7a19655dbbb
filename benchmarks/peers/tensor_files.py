"""One file per snapshot that holds named tensors: safetensors, and the two compressors that know floats, ZipNN and
OpenZL.

The compressors get *sections*: every tensor of 4 KiB or more by itself with its own dtype, and the smaller ones of
each dtype together. That is their best use; a whole serialized file would hide from them what is a float. Whatever
does not shrink is stored as it is. The file is a length, a compressed JSON header (skeleton, tensors, sections) and
the sections.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from importlib import import_module
from typing import Any

import numpy as np
import torch
import zstandard

from benchmarks.peers._disk import durable_file, fsync, publish
from benchmarks.peers._tree import Tensor, as_bytes, dtype_name, dtype_named, flatten, unflatten
from benchmarks.peers.contract import FILE_DURABILITY, Peer, State, Wait, nothing_left

ALONE_SIZE = 4096  # bytes from which a tensor is a section of its own: weights and moments do not mix well
HEADER_LENGTH_SIZE = 8
ZSTD_LEVEL = 3
GENERIC = "floats split, or generic"
ZIPNN_DTYPES = ("float32", "bfloat16", "float16")
FLOAT_NODES = {"float32": "Float32Deconstruct", "bfloat16": "BFloat16Deconstruct", "float16": "Float16Deconstruct"}


class Safetensors(Peer):
    """`safetensors.torch.save_file`, with the skeleton in the file's metadata."""

    product = "safetensors"
    packages = ("safetensors", "torch")
    durability = FILE_DURABILITY

    def load(self) -> None:
        """Import it."""
        import_module("safetensors.torch")

    def begin(self, index: int, state: Any) -> Wait:
        """One file."""
        unfinished = self.path(index) + ".tmp"
        save_safetensors(state, unfinished)
        fsync(unfinished)
        publish(unfinished, self.path(index))
        return nothing_left

    def restore(self, index: int, template: State | None) -> State:
        """All tensors."""
        return load_safetensors(self.path(index))


def save_safetensors(state: State, path: str) -> None:
    """Write a state to a file."""
    skeleton, tensors = flatten(state)
    named = {f"{number:05}": tensor for number, tensor in enumerate(tensors)}
    import_module("safetensors.torch").save_file(named, path, metadata={"skeleton": json.dumps(skeleton)})


def load_safetensors(path: str) -> State:
    """Read a state, each tensor into memory of its own."""
    with import_module("safetensors").safe_open(path, framework="pt") as file:
        # What safetensors gives is a view of the mapped file until it is copied.
        tensors = [file.get_tensor(name).clone() for name in sorted(file.keys())]
        skeleton = json.loads(file.metadata()["skeleton"])
    state: State = unflatten(skeleton, tensors)
    return state


class SectionFile(Peer):
    """A file of compressed sections; what compresses them is the subclass."""

    durability = FILE_DURABILITY

    @abstractmethod
    def compress(self, plain: Any, dtype: str) -> bytes:
        """One section: an array of uint8 that holds elements of `dtype`."""

    @abstractmethod
    def decompress(self, payload: bytearray, dtype: str) -> Any:
        """The bytes of a section, in a buffer."""

    def begin(self, index: int, state: Any) -> Wait:
        """One file."""
        skeleton, tensors = flatten(state)
        sections: list[Any] = []
        payloads: list[Any] = []
        for dtype, numbers in _groups(tensors):
            parts = [as_bytes(tensors[number]) for number in numbers]
            plain = parts[0] if len(parts) == 1 else np.concatenate(parts)
            compressed = self.compress(plain, dtype)
            is_smaller = len(compressed) < len(plain)
            payloads.append(compressed if is_smaller else plain)
            sections.append([dtype, numbers, len(payloads[-1]), is_smaller])
        shapes = [list(tensor.shape) for tensor in tensors]
        facts = json.dumps({"skeleton": skeleton, "shapes": shapes, "sections": sections}).encode()
        header = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(facts)
        with durable_file(self.path(index)) as stream:
            for part in (len(header).to_bytes(HEADER_LENGTH_SIZE, "little"), header, *payloads):
                stream.write(part)
        return nothing_left

    def restore(self, index: int, template: State | None) -> State:
        """All sections, one after the other; small tensors of one dtype share memory."""
        with open(self.path(index), "rb") as stream:
            stored_header = stream.read(int.from_bytes(stream.read(HEADER_LENGTH_SIZE), "little"))
            header = json.loads(zstandard.ZstdDecompressor().decompress(stored_header))
            shapes = header["shapes"]
            tensors: list[Any] = [None] * len(shapes)
            for dtype, numbers, length, is_smaller in header["sections"]:
                stored = bytearray(length)
                stream.readinto(stored)
                elements = _elements(self.decompress(stored, dtype) if is_smaller else stored, dtype)
                pieces = torch.split(elements, [math.prod(shapes[number]) for number in numbers])
                for number, piece in zip(numbers, pieces, strict=True):
                    tensors[number] = piece.reshape(shapes[number])
        state: State = unflatten(header["skeleton"], tensors)
        return state


def _groups(tensors: list[Tensor]) -> list[tuple[str, list[int]]]:
    """dtype and tensor numbers of each section."""
    small: dict[str, list[int]] = {}
    found = []
    for number, tensor in enumerate(tensors):
        dtype = dtype_name(tensor.dtype)
        if tensor.nbytes >= ALONE_SIZE:
            found.append((dtype, [number]))
        else:
            small.setdefault(dtype, []).append(number)
    return found + list(small.items())


def _elements(plain: Any, dtype: str) -> Tensor:
    """A buffer as one run of elements; copied where it may not be written to."""
    array = np.frombuffer(plain, dtype=np.uint8)
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(dtype_named(dtype))


class ZipNN(SectionFile):
    """ZipNN with its default method on float sections. It refuses other dtypes, so those get zstd."""

    product = "ZipNN"
    packages = ("zipnn", "torch")

    def load(self) -> None:
        """Import it."""
        import_module("zipnn")

    def compress(self, plain: Any, dtype: str) -> bytes:
        """On all cores, as it chooses by itself."""
        if dtype not in ZIPNN_DTYPES:
            return zstandard.ZstdCompressor(level=ZSTD_LEVEL, threads=-1).compress(plain)
        # It works in place on what it is given, so it gets a copy, as its own tools make by reading the file.
        codec = import_module("zipnn").ZipNN(input_format="byte", bytearray_dtype=dtype)
        compressed: bytes = codec.compress(bytearray(plain))
        return compressed

    def decompress(self, payload: bytearray, dtype: str) -> Any:
        """The reverse."""
        if dtype not in ZIPNN_DTYPES:
            return zstandard.ZstdDecompressor().decompress(payload)
        return import_module("zipnn").ZipNN(input_format="byte", bytearray_dtype=dtype).decompress(bytes(payload))


class OpenZL(SectionFile):
    """OpenZL: floats split into exponents and the rest, each stream in the smallest of several ways.

    The compressor's own trainer is not in the Python package, so the graph is written by hand. It is the smallest found
    among those that its nodes for floats allow; the trials that it makes at each commit cost speed. At the `level`
    GENERIC it also tries the library's generic compressor on every section of floats: a third of the speed, up to a
    point smaller.
    """

    product = "OpenZL"
    packages = ("openzl", "torch")

    def load(self) -> None:
        """Import it."""
        self._library = import_module("openzl.ext")
        self._compressors: dict[str, Any] = {}

    def compress(self, plain: Any, dtype: str) -> bytes:
        """One frame."""
        library = self._library
        if dtype not in self._compressors:
            self._compressors[dtype] = self._compressor(dtype)
        context = library.CCtx()
        context.ref_compressor(self._compressors[dtype])
        context.set_parameter(library.CParam.FormatVersion, library.MAX_FORMAT_VERSION)
        kind = library.Type.Numeric if dtype in FLOAT_NODES else library.Type.Serial
        elements = plain.view(f"u{dtype_named(dtype).itemsize}") if dtype in FLOAT_NODES else plain
        compressed: bytes = context.compress([library.Input(kind, elements)])
        return compressed

    def decompress(self, payload: bytearray, dtype: str) -> Any:
        """The reverse."""
        return self._library.DCtx().decompress(bytes(payload))[0].content.as_nparray()

    def _compressor(self, dtype: str) -> Any:
        """What to do with sections of one dtype."""
        graphs, nodes = self._library.graphs, self._library.nodes
        compressor = self._library.Compressor()

        def smallest(*ways: Any) -> Any:
            return graphs.BruteForce(list(ways))(compressor)

        serial = smallest(graphs.Store()(compressor), graphs.Entropy()(compressor), graphs.Zstd()(compressor))
        start = serial
        if dtype in FLOAT_NODES:
            fraction = smallest(graphs.Store()(compressor), nodes.TransposeSplit()(compressor, serial))
            start = getattr(nodes, FLOAT_NODES[dtype])()(compressor, sign_frac=fraction, exponent=serial)
            if self.level == GENERIC:
                start = smallest(start, graphs.Compress()(compressor))
        compressor.select_starting_graph(start)
        compressor.set_parameter(self._library.CParam.FormatVersion, self._library.MAX_FORMAT_VERSION)
        return compressor
