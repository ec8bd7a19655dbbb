"""The peers by name: which product with which options, in the order of the tables.

The *default* ones run when nothing is asked for. The others are options that stored no less in trials, or hardly less
at many times the cost; `--peers` takes any name, and `all`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.peers import icechunk, orbax, repositories, torch_dcp
from benchmarks.peers.contract import Peer
from benchmarks.peers.own import Casckpt, CasckptRing
from benchmarks.peers.tensor_files import GENERIC, OpenZL, Safetensors, ZipNN
from benchmarks.peers.torch_files import TorchSave, TorchSaveZstd, ZstdPatch

Make = Callable[[str, str], Peer]  # of the folder that counts and a scratch folder

PEERS: dict[str, Make] = {
    "casckpt-fast": partial(Casckpt, level="fast"),
    "casckpt-balanced": partial(Casckpt, level="balanced"),
    "casckpt-small": partial(Casckpt, level="small"),
    "casckpt-async": partial(Casckpt, level="balanced async"),
    "casckpt-ring": partial(CasckptRing, level="balanced"),
    "torch": TorchSave,
    "torch-zstd3": partial(TorchSaveZstd, level="3"),
    "torch-zstd9": partial(TorchSaveZstd, level="9"),
    "zstd-patch3": partial(ZstdPatch, level="3"),
    "zstd-patch9": partial(ZstdPatch, level="9"),
    "zstd-patch19": partial(ZstdPatch, level="19"),
    "safetensors": Safetensors,
    "zipnn": ZipNN,
    "openzl": OpenZL,
    "openzl-generic": partial(OpenZL, level=GENERIC),
    "dcp": partial(torch_dcp.TorchDcp, level=torch_dcp.SYNC),
    "dcp-async": partial(torch_dcp.TorchDcp, level=torch_dcp.ASYNC),
    "dcp-async-kept": partial(torch_dcp.TorchDcp, level=torch_dcp.KEPT_BUFFERS),
    "orbax": partial(orbax.Orbax, level=orbax.SYNC),
    "orbax-async": partial(orbax.Orbax, level=orbax.ASYNC),
    "orbax-async-jax": partial(orbax.Orbax, level=orbax.ASYNC_JAX),
    "icechunk": partial(icechunk.Icechunk, level=icechunk.DEFAULT),
    "icechunk-shuffle": partial(icechunk.Icechunk, level=icechunk.SHUFFLED),
    "borg-torch": partial(repositories.Borg, level=repositories.TORCH),
    "borg-safetensors": partial(repositories.Borg, level=repositories.SAFETENSORS),
    "restic-torch": partial(repositories.Restic, level=repositories.TORCH),
    "restic-safetensors": partial(repositories.Restic, level=repositories.SAFETENSORS),
    "casync-torch": partial(repositories.Casync, level=repositories.TORCH),
    "casync-safetensors": partial(repositories.Casync, level=repositories.SAFETENSORS),
    "hf-xet-torch": partial(repositories.HfXet, level=repositories.TORCH),
    "hf-xet-safetensors": partial(repositories.HfXet, level=repositories.SAFETENSORS),
}
EXTRA = (
    "casckpt-ring",  # for series of replay rings
    "zstd-patch9",
    "zstd-patch19",
    "openzl-generic",
    "borg-torch",
    "restic-torch",
    "casync-torch",
    "hf-xet-torch",
)
DEFAULT = tuple(name for name in PEERS if name not in EXTRA)
