"""State: live Python, numpy and torch objects on one side, structure, scalars and blocks of memory on the other.

* `capture(component, value)` describes what a commit stores, without copying memory;
* `Assembly` turns filled blocks into values, `Target` puts them into live objects;
* `Staging` keeps copies for commits in the background;
* `RngState` bundles the global random generators; `StoredEnum` is how an enum member comes back;
* `diff_leaf` compares two versions of a leaf.

torch and numpy are imported by `_torch` and `_numpy` alone, and only for a state that holds something of theirs. This
layer reads and writes no file.
"""

from casckpt.format.structure import leaf_places, opaque_paths
from casckpt.state.build import Assembly
from casckpt.state.capture import Captured, capture
from casckpt.state.diff import diff_leaf
from casckpt.state.differences import mismatch
from casckpt.state.rng import RngState
from casckpt.state.staging import Staging
from casckpt.state.target import Cast, Target
from casckpt.state.values import StoredEnum

__all__ = [
    "Assembly",
    "Captured",
    "Cast",
    "RngState",
    "Staging",
    "StoredEnum",
    "Target",
    "capture",
    "diff_leaf",
    "leaf_places",
    "mismatch",
    "opaque_paths",
]
