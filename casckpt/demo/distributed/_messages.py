"""Messages between learner and actors: MessagePack frames over `multiprocessing.connection`, authenticated by a key.

An actor asks and gives; the learner answers each message with one of its own. Arrays travel as bytes; sizes are
checked before anything is made of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from casckpt.errors import InvalidInputError
from casckpt.recovery import Version

FRAME_SIZE_MAX = 1 << 20  # bytes; an item is some 10 KiB
OBSERVATION_SIZE, HIDDEN_SIZE, ACTION_COUNT = 4, 64, 2
LAYERS = ((HIDDEN_SIZE, OBSERVATION_SIZE), (HIDDEN_SIZE, HIDDEN_SIZE), (ACTION_COUNT, HIDDEN_SIZE))
WEIGHT_COUNT = sum(rows * columns + rows for rows, columns in LAYERS)
KEY = "CASCKPT_DEMO_KEY"  # in the environment: what all processes of one training know
ADDRESSES = "learner.json"  # in the work folder: where the learner of today listens

FloatArray = npt.NDArray[np.float32]


class Ask(msgspec.Struct, tag=True, frozen=True):
    """An actor wants an item."""

    name: str


class Give(msgspec.Struct, tag=True, frozen=True):
    """What an actor played: rows of float32 observations (4 each) and log-probabilities, one byte per action and end.

    `returns` are those of its episodes, all of them complete; a reward is 1 per step.
    """

    version: Version
    item: int
    observation: bytes
    action: bytes
    log_probability: bytes
    ended: bytes
    returns: list[float]


class Task(msgspec.Struct, tag=True, frozen=True):
    """An item to play with a policy: its version, and all its weights as one float32 vector."""

    version: Version
    item: int
    weights: bytes


class Wait(msgspec.Struct, tag=True, frozen=True):
    """Nothing to do now; ask again."""


class Verdict(msgspec.Struct, tag=True, frozen=True):
    """Why a sample was refused; empty when it was taken."""

    reason: str


class Addresses(msgspec.Struct, frozen=True):
    """Where a learner takes beats (HTTP) and samples."""

    beats: tuple[str, int]
    samples: tuple[str, int]


@dataclass(frozen=True)
class Rows:
    """A played item as arrays of n rows."""

    observation: FloatArray
    action: npt.NDArray[np.int64]
    log_probability: FloatArray
    ended: npt.NDArray[np.bool_]
    returns: list[float]


class Layer(NamedTuple):
    """A linear layer, weight of shape (outputs, inputs)."""

    weight: FloatArray
    bias: FloatArray


encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(Ask | Give)
_answer = msgspec.msgpack.Decoder(Task | Wait | Verdict)


def decode_request(frame: bytes) -> Ask | Give:
    """Raises msgspec.DecodeError for anything else."""
    found: Ask | Give = _request.decode(frame)
    return found


def decode_answer(frame: bytes) -> Task | Wait | Verdict:
    """Raises msgspec.DecodeError for anything else."""
    found: Task | Wait | Verdict = _answer.decode(frame)
    return found


def rows_of(given: Give) -> Rows:
    """A sample as arrays.

    Raises:
        InvalidInputError: its parts do not belong together, or a number is not finite.
    """
    count = len(given.action)
    sizes = (len(given.observation), len(given.log_probability), len(given.ended))
    expected = (count * OBSERVATION_SIZE * 4, count * 4, count)
    if count == 0 or sizes != expected:
        raise InvalidInputError(f"a sample of {count} rows has parts of {sizes} bytes, expected {expected}")
    observation = np.frombuffer(given.observation, np.float32).reshape(count, OBSERVATION_SIZE)
    log_probability = np.frombuffer(given.log_probability, np.float32)
    action = np.frombuffer(given.action, np.uint8).astype(np.int64)
    if not (np.isfinite(observation).all() and np.isfinite(log_probability).all()) or action.max() >= ACTION_COUNT:
        raise InvalidInputError("a sample holds numbers that are not finite, or unknown actions")
    ended = np.frombuffer(given.ended, np.uint8).astype(np.bool_)
    return Rows(observation, action, log_probability, ended, given.returns)


def layers_of(weights: bytes) -> list[Layer]:
    """The layers of a policy, from its vector of weights.

    Raises:
        InvalidInputError: another number of weights.
    """
    vector = np.frombuffer(weights, np.float32).copy()
    if len(vector) != WEIGHT_COUNT:
        raise InvalidInputError(f"a policy of {len(vector)} weights, expected {WEIGHT_COUNT}")
    layers, start = [], 0
    for rows, columns in LAYERS:
        middle = start + rows * columns
        layers.append(Layer(vector[start:middle].reshape(rows, columns), vector[middle : middle + rows]))
        start = middle + rows
    return layers


def write_addresses(folder: str, addresses: Addresses) -> None:
    """Say where this learner listens; in one piece, instead of the one before."""
    temporary = f"{folder}/{ADDRESSES}.{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(msgspec.json.encode(addresses))
    os.replace(temporary, f"{folder}/{ADDRESSES}")


def read_addresses(folder: str) -> Addresses:
    """Where the learner listens. Raises FileNotFoundError before the first one did."""
    with open(f"{folder}/{ADDRESSES}", "rb") as file:
        return msgspec.json.decode(file.read(), type=Addresses)
