"""States that hold every kind of leaf and scalar, together with what a reader has to find in them.

The expected values are written down path by path beside the state, not derived from it by any code of casckpt.
"""

from __future__ import annotations

import collections
import enum
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch


class Phase(enum.Enum):
    EXPLORE = 1
    EXPLOIT = "late"


class Clip(NamedTuple):
    low: float
    high: Any


class Unknown:
    """Nothing that casckpt knows: stored as a pickle only."""

    def __init__(self, value: int) -> None:
        self.value = value


@dataclass
class Sample:
    """A state by component, and what is in it by path."""

    state: dict[str, Any] = field(default_factory=dict)
    leaves: dict[str, Any] = field(default_factory=dict)  # arrays, tensors, bytes
    scalars: dict[str, Any] = field(default_factory=dict)  # in the independent reader's form
    containers: dict[str, str] = field(default_factory=dict)
    shared: list[list[str]] = field(default_factory=list)  # paths whose leaves share memory

    def add(self, component: str, values: Mapping[str, Any]) -> None:
        """One component that is a flat dict, whose values are found as they are."""
        self.state[component] = dict(values)
        self.containers[component] = "dict"
        for key, value in values.items():
            path = f"{component}/{key}"
            if isinstance(value, np.ndarray | torch.Tensor) or (isinstance(value, bytes) and len(value) >= 4096):
                self.leaves[path] = value
            else:
                self.scalars[path] = value


SIGNED_TORCH = (
    *("float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("int8", "int16", "int32", "int64", "complex64", "complex128"),
)
SIGNED_NUMPY = ("<f2", "<f4", ">f4", "<f8", ">f8", "i1", "<i2", ">i4", "<i8", "<c8", "<c16")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """One tensor of every dtype, layout and oddity."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(6, 5, generator=generator)
    found = {f"dtype {name}": noise.to(getattr(torch, name)) for name in SIGNED_TORCH}
    found |= {f"dtype {name}": noise.abs().to(getattr(torch, name)) for name in ("uint8", "uint16", "uint32", "uint64")}
    found["dtype bool"] = noise > 0
    found["0-d"] = torch.tensor(-0.0)
    found["empty"] = torch.zeros(3, 0, 2)
    found["nan payloads"] = torch.tensor([0x7FC00001, -0x3FFFFF, 1, -(2**31)], dtype=torch.int32).view(torch.float32)
    found["transposed"] = torch.randn(4, 7, generator=generator).t()
    found["channels last"] = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    found["expanded"] = torch.randn(3, 1, generator=generator).expand(3, 4)
    found["strided"] = torch.randn(40, generator=generator)[3::7]
    return found


def arrays(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """One array of every dtype, layout and oddity."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(scale=50, size=(5, 4))
    found = {f"dtype {name}": noise.astype(name) for name in SIGNED_NUMPY}
    found |= {f"dtype {name}": np.abs(noise).astype(name) for name in ("u1", "<u2", "<u4", ">u8", "?")}
    found["text"] = np.array(["a", "bé", "longer"])
    found["bytes"] = np.array([b"x", b"yz"])
    found["dates"] = np.array(["2024-01-01", "NaT"], "M8[ns]")
    found["spans"] = np.array([1, -5], "m8[3h]")
    record = np.dtype({"names": ["x", "y"], "formats": [">i2", ("<f4", (2,))], "offsets": [0, 4], "itemsize": 16})
    found["records"] = np.zeros(3, record)
    found["records"]["x"] = [1, -2, 3]
    found["records"]["y"] = noise[:3, :2]
    found["0-d"] = np.array(np.nan)
    found["empty"] = np.zeros((0, 3))
    found["fortran"] = np.asfortranarray(noise)
    found["backwards"] = np.arange(11, dtype=np.int16)[::-2]
    found["column"] = noise[:, 1]
    found["broadcast"] = np.broadcast_to(np.arange(3.0), (2, 3))
    return found


SCALARS: dict[str, Any] = {
    "none": None,
    "true": True,
    "small": -7,
    "64 bits": 2**64 - 1,
    "big": -(2**200),
    "float": 0.1,
    "minus zero": -0.0,
    "infinity": float("inf"),
    "text": "été ☃ \U0001f600",
    "surrogate": "bad \udc80",
    "bytes": b"\x00\xff",
    "complex": 1.5 - 2j,
    "list": [1, 2.5, None, "x"],
    "tuple": (1, True),
    "set": {3, 1, 2},
    "frozenset": frozenset({"b", "a"}),
    "deque": collections.deque([1.0, 2.0], maxlen=5),
    "empty list": [],
}


def sample(seed: int) -> Sample:
    """Every kind of leaf, scalar, container and generator; equal for equal seeds."""
    made = Sample()
    made.add("tensors", tensors(seed))
    made.add("arrays", arrays(seed))
    made.add("scalars", SCALARS)
    made.add("chunks", chunk_data(seed))
    _add_foreign(made)
    _add_containers(made, seed)
    _add_shared(made, seed)
    _add_generators(made, seed)
    return made


def chunk_data(seed: int) -> dict[str, Any]:
    """What makes the encoder use each of its codecs."""
    rng = np.random.default_rng(seed)
    return {
        "weights": rng.normal(size=2_000).astype(np.float32),
        "zeros": np.zeros(70_000, np.int16),
        "text": b"the quick brown fox jumps over the lazy dog. " * 200,
        "noise": rng.integers(0, 256, 9_000, dtype=np.uint8),
    }


def _add_foreign(made: Sample) -> None:
    made.state["foreign"] = {
        "float32": np.float32(0.1),
        "dtype": np.dtype(">f8"),
        "size": torch.Size([2, 3]),
        "torch dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "enum": Phase.EXPLOIT,
    }
    made.containers["foreign"] = "dict"
    made.scalars |= {
        "foreign/float32": ("foreign", "numpy", ["<f4", bytes.fromhex("cdcccc3d")]),
        "foreign/dtype": ("foreign", "numpy.dtype", ">f8"),
        "foreign/size": ("foreign", "torch.Size", [2, 3]),
        "foreign/torch dtype": ("foreign", "torch.dtype", "bfloat16"),
        "foreign/device": ("foreign", "torch.device", "cpu"),
        "foreign/enum": ("foreign", "enum", ["Phase", "EXPLOIT", "late"]),
    }


def _add_containers(made: Sample, seed: int) -> None:
    one, two, three = (np.full(2, seed + i) for i in range(3))
    made.state["containers"] = {
        "ordered": collections.OrderedDict(b=one, a=1),
        "counter": collections.Counter({"x": 3}),
        "default": collections.defaultdict(list, {5: two}),
        "named": Clip(0.5, three),
        "sequence": [one, "x", (two,)],
        "deque": collections.deque([three], maxlen=3),
        ("tuple", 1): 1,
        "a/b~c": 2,
        -3: 3,
        "empty": {},
    }
    made.containers |= {
        "containers": "dict",
        "containers/ordered": "OrderedDict",
        "containers/counter": "Counter",
        "containers/default": "defaultdict:list",
        "containers/named": "namedtuple:Clip",
        "containers/sequence": "list",
        "containers/sequence/2": "tuple",
        "containers/deque": "deque:3",
        "containers/empty": "dict",
    }
    made.leaves |= {
        "containers/ordered/b": one,
        "containers/default/5": two,
        "containers/named/high": three,
        "containers/sequence/0": one,
        "containers/sequence/2/0": two,
        "containers/deque/0": three,
    }
    made.scalars |= {
        "containers/ordered/a": 1,
        "containers/counter/x": 3,
        "containers/named/low": 0.5,
        "containers/sequence/1": "x",
        "containers/('tuple', 1)": 1,
        "containers/a~1b~0c": 2,
        "containers/-3": 3,
    }
    made.shared += [
        ["containers/ordered/b", "containers/sequence/0"],
        ["containers/default/5", "containers/sequence/2/0"],
    ]


def _add_shared(made: Sample, seed: int) -> None:
    base = torch.randn(20, generator=torch.Generator().manual_seed(seed))
    copied = base.clone()
    weight = torch.nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed + 1)))
    made.add(
        "shared",
        {"base": base, "part": base[2:5], "even": base[::2], "as numpy": base.numpy()[4:9], "copy": copied}
        | {"tied": weight, "again": weight, "frozen": torch.nn.Parameter(copied[:4].clone(), requires_grad=False)},
    )
    made.shared += [
        ["shared/base", "shared/part", "shared/even", "shared/as numpy"],
        ["shared/tied", "shared/again"],
    ]


def _add_generators(made: Sample, seed: int) -> None:
    """Generators, and the states that their own libraries say they have."""
    python, legacy, bits = random.Random(seed), np.random.RandomState(seed), np.random.Philox(seed)
    numpy, torch_generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    made.state["generators"] = {
        "python": python,
        "numpy": numpy,
        "legacy": legacy,
        "bits": bits,
        "torch": torch_generator,
    }
    made.containers["generators"] = "dict"
    version, words, gauss = python.getstate()
    python_state = {"version": version, "words": struct.pack("<625I", *words), "gauss": gauss}
    _add_generator(made, "python", "python", python_state)
    _add_generator(made, "numpy", "numpy.Generator", numpy.bit_generator.state)
    _add_generator(made, "legacy", "numpy.RandomState", legacy.get_state(legacy=False))
    _add_generator(made, "bits", "numpy.BitGenerator", bits.state)
    _add_generator(made, "torch", "torch", {"device": "cpu", "state": torch_generator.get_state()})


def _add_generator(made: Sample, name: str, kind: str, state: Any) -> None:
    made.containers[f"generators/{name}"] = f"rng:{kind}"
    pending = [(f"generators/{name}", state)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            made.containers.setdefault(path, "dict")
            pending += [(f"{path}/{key}", child) for key, child in value.items()]
        elif isinstance(value, np.ndarray | torch.Tensor):
            made.leaves[path] = value
        else:
            made.scalars[path] = value
