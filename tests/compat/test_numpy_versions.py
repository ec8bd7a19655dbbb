"""(S29) What one NumPy writes another reads: 1.26 and the installed 2.x, in both directions, bit for bit.

NumPy 1.26 is installed into a folder of its own by pip; where there is no wheel of it, or no package index, the test
is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.full
OLD = "1.26.4"

STATE = """
import hashlib, json, sys
import numpy as np, casckpt

def state():
    rng = np.random.default_rng(7)
    rng.random(3)
    return {
        "arrays": {
            "floats": np.linspace(-1, 1, 5000), "half": np.arange(9, dtype=np.float16), "complex": np.array([1j, -0.0]),
            "text": np.array(["a", "long enough"]), "time": np.array(["2026-01-01", "NaT"], "M8[ns]"),
            "delta": np.array([5], "m8[s]"), "big": np.arange(4, dtype=">i4"), "bool": np.zeros(3, bool),
            "record": np.array([(1, (2.5, b"x"))], dtype=[("a", "<u2"), ("b", [("c", "<f8"), ("d", "S3")])]),
            "aligned": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)), "back": np.arange(6)[::-2],
        },
        "scalars": {
            "f": np.float32(0.1), "i": np.int64(-3), "b": np.bool_(True), "s": np.str_("q"), "t": np.datetime64(3, "s"),
            "longlong": np.longlong(4), "dtype": np.dtype("<f4"), "plain": [1, 2.5, None],
        },
        "random": {"generator": rng, "legacy": np.random.RandomState(3), "bits": np.random.PCG64(5)},
    }

def describe(value):
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [value.dtype.str, str(value.dtype.names), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, np.generic):
        return ["scalar", value.dtype.str, value.tobytes().hex()]
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return [type(value).__name__, value.standard_normal(4).tobytes().hex()]
    if isinstance(value, np.random.BitGenerator):
        return [type(value).__name__, str(value.random_raw(3).tolist())]
    return repr(value)
"""
WRITE = (
    STATE
    + """
assert np.__version__.startswith(sys.argv[2]), np.__version__
with casckpt.open(sys.argv[1], create=True) as store:
    store.commit(1, state())
print(json.dumps(describe(state())))
"""
)
READ = (
    STATE
    + """
assert np.__version__.startswith(sys.argv[2]), np.__version__
with casckpt.open(sys.argv[1]) as store:
    found = describe(store.restore(1))
    again = store.commit(2, state())
    assert store.verify(read_data=True).ok
    print(json.dumps([found, again.new_bytes]))
"""
)


@pytest.fixture(scope="module")
def old_numpy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("numpy")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--target", str(folder), f"numpy=={OLD}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"numpy {OLD} cannot be installed here: {done.stderr.strip()[-200:]}")
    return str(folder)


def run(code: str, store: Path, version: str, first_on_path: str) -> Any:
    path = os.pathsep.join([first_on_path, *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(store), version],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("is_old_first", [True, False], ids=["1.26 writes", "1.26 reads"])
def test_one_numpy_reads_what_another_wrote(store_path: Path, old_numpy: str, is_old_first: bool) -> None:
    environments = [(OLD, old_numpy), (np.__version__, "")]
    (writer, writer_path), (reader, reader_path) = environments if is_old_first else environments[::-1]
    assert writer != reader
    written = run(WRITE, store_path, writer, writer_path)
    found, new_bytes = run(READ, store_path, reader, reader_path)
    assert found == written
    assert new_bytes == 0  # the same state has the same bytes under both
