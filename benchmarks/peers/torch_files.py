"""One file per snapshot, made by `torch.save`: plain, through zstd, or as a difference to the file before.

All of them make their file durable by fsync before and after a rename: torch.save and zstd promise nothing.
"""

from __future__ import annotations

import io
import os
from typing import Any

import torch
import zstandard

from benchmarks.peers._disk import durable_file, publish, run_program
from benchmarks.peers.contract import FILE_DURABILITY, REPLAY, Peer, State, Wait, nothing_left


class TorchSave(Peer):
    """`torch.save` of the whole state, and `torch.load` without pickled code."""

    product = "torch.save"
    packages = ("torch",)
    durability = FILE_DURABILITY

    def begin(self, index: int, state: Any) -> Wait:
        """One file."""
        with durable_file(self.path(index)) as stream:
            torch.save(state, stream)
        return nothing_left

    def restore(self, index: int, template: State | None) -> State:
        """All of the file."""
        state: State = torch.load(self.path(index), weights_only=True)
        return state


class TorchSaveZstd(Peer):
    """`torch.save` into a zstd stream that compresses on all cores; `level` is zstd's."""

    product = "torch.save + zstd"
    packages = ("zstandard", "torch")
    durability = FILE_DURABILITY

    def version(self) -> str:
        """That of the library, which is what compresses."""
        return f"libzstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}"

    def begin(self, index: int, state: Any) -> Wait:
        """One file; nothing is written uncompressed."""
        compressor = zstandard.ZstdCompressor(level=int(self.level), threads=-1)
        with durable_file(self.path(index)) as stream, compressor.stream_writer(stream, closefd=False) as writer:
            torch.save(state, writer)
        return nothing_left

    def restore(self, index: int, template: State | None) -> State:
        """Decompressed in memory, then loaded."""
        with open(self.path(index), "rb") as stream, zstandard.ZstdDecompressor().stream_reader(stream) as reader:
            state: State = torch.load(io.BytesIO(reader.read()), weights_only=True)
        return state


class ZstdPatch(Peer):
    """`zstd --patch-from`: the first file compressed, every other one as a difference to the one before it.

    The newest uncompressed file has to stay for the next difference; it is not counted as stored. A restore
    decompresses the first file and applies every difference up to the one asked for. `level` is zstd's.
    """

    product = "zstd --patch-from"
    packages = ("torch",)
    program = "zstd"
    restores = REPLAY
    durability = FILE_DURABILITY

    def version(self) -> str:
        """That of the program."""
        return run_program(["zstd", "--version"]).decode().split(" v")[1].split(",")[0]

    def begin(self, index: int, state: Any) -> Wait:
        """torch.save into scratch, then one compressed file."""
        plain, before = (os.path.join(self.scratch, f"{n:05}.pt") for n in (index, index - 1))
        torch.save(state, plain)
        unfinished = self.path(index) + ".tmp"
        base = [f"--patch-from={before}"] if index else []
        run_program(["zstd", f"-{self.level}", "-T0", "-q", *base, *LONG, plain, "-o", unfinished])
        with open(unfinished, "rb") as stream:
            os.fsync(stream.fileno())
        publish(unfinished, self.path(index))
        if index:
            os.unlink(before)
        return nothing_left

    def restore(self, index: int, template: State | None) -> State:
        """Replays the chain through files in scratch, each removed when the next one is there."""
        plain: list[str] = []
        for number in range(index + 1):
            plain.append(os.path.join(self.scratch, f"restored-{number:05}.pt"))
            base = [f"--patch-from={plain[-2]}"] if number else []
            run_program(["zstd", "-d", "-q", *base, *LONG, self.path(number), "-o", plain[-1]])
            if number:
                os.unlink(plain[-2])
        state: State = torch.load(plain[-1], weights_only=True)
        os.unlink(plain[-1])
        return state


LONG = ["--long=31"]  # a window of 2 GiB, so that all of the base is in reach; needed on both sides
