"""What can be asked of the numbers in a live state without knowing its library: are they finite, how far apart."""

from __future__ import annotations

from typing import Any

from casckpt.errors import MismatchError
from casckpt.format.structure import leaf_places
from casckpt.state.capture import Captured, capture
from casckpt.state.diff import diff_leaf
from casckpt.state.gather import gather


def nonfinite_paths(component: str, live: Any) -> list[str]:
    """Paths of the floating torch tensors that hold a NaN or an infinity.

    Arrays and scalars are not looked at: a best return of minus infinity and a NaN in a buffer are at home there. Nor
    is a mask, all zeros and infinities, as attention adds it to its scores.

    Cost: one pass over the tensors.
    """
    captured = capture(component, live)
    leaves = captured.structure.leaves
    found = {}
    for place in leaf_places(captured.structure, component):
        if place.leaf is None or leaves[place.leaf].kind != "torch" or place.path in found:
            continue
        dtype, tensor = leaves[place.leaf].dtype, captured.kept.objects[place.leaf]
        if not dtype.startswith(("float", "bfloat", "complex")):
            continue
        wide = tensor.float() if dtype.startswith("float8") else tensor
        finite = wide.isfinite()
        if not bool(finite.all()) and not _is_mask(wide, finite):
            found[place.path] = True
    return list(found)


def _is_mask(tensor: Any, finite: Any) -> bool:
    return bool(finite.any()) and not bool(tensor.isnan().any()) and not bool(tensor[finite].any())


def largest_difference(component: str, a: Any, b: Any) -> float:
    """The largest absolute difference between the numbers of two trees: infinity where one side alone is not finite.

    Raises:
        MismatchError: the trees do not have the same names, shapes and dtypes, or differ in what is no number.
    """
    one, other = capture(component, a), capture(component, b)
    if one.structure_bytes != other.structure_bytes or (not one.structure.blocks and one.scalars != other.scalars):
        raise MismatchError(f"{component}: the two do not have the same names, shapes, dtypes and scalars")
    largest = 0.0
    for index, leaf in enumerate(one.structure.leaves):
        if leaf.block < 0:
            continue
        elements = (gather(leaf, _block(captured, leaf.block)) for captured in (one, other))
        changed, change = diff_leaf(leaf.kind, leaf.dtype, *elements)
        if changed and change is None:
            raise MismatchError(f"{component}: leaf {index} differs, and is no number")
        largest = max(largest, change or 0.0)
    return largest


def _block(captured: Captured, block: int) -> memoryview:
    return captured.blocks.view(block, 0, captured.blocks.size(block))
