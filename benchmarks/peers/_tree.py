"""State trees as peers and the runner need them: taken apart, put together, compared, and changed in place.

A *tree* is nested dicts, lists and tuples of torch tensors and Python scalars, as a corpus gives it. Most peers know
only named tensors, so `flatten` splits a tree into a *skeleton* (JSON: containers, keys, scalars, and where which
tensor goes) and the tensors. Empty tensors live in the skeleton alone, because some peers refuse arrays without
elements.

`Live` is the state as a training run holds it: the same tensors all the time, overwritten in place. What a peer keeps
between commits (staging buffers, caches by tensor) works or fails here as it would in training.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch

Tensor = torch.Tensor
Skeleton = Any  # what json.dumps takes

CONTAINERS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "list": list, "tuple": tuple}
SCALARS = (bool, int, float, str, type(None))


def flatten(tree: Any) -> tuple[Skeleton, list[Tensor]]:
    """Split a tree; a tensor that occurs twice is one tensor in the list.

    Raises:
        TypeError: A leaf is neither a tensor nor a scalar that JSON keeps.
    """
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}
    return _take_apart(tree, tensors, numbers), tensors


def unflatten(skeleton: Skeleton, tensors: list[Tensor]) -> Any:
    """The tree that `flatten` split."""
    kind, *rest = skeleton if isinstance(skeleton, list) else ("scalar", skeleton)
    if kind == "scalar":
        return rest[0]
    if kind == "tensor":
        return tensors[rest[0]]
    if kind == "empty":
        return torch.empty(rest[1], dtype=dtype_named(rest[0]))
    parts = [unflatten(part, tensors) for part in rest]
    if kind in ("dict", "ordered"):
        return CONTAINERS[kind](zip(parts[::2], parts[1::2], strict=True))
    return CONTAINERS[kind](parts)


def _take_apart(tree: Any, tensors: list[Tensor], numbers: dict[int, int]) -> Skeleton:
    if isinstance(tree, Tensor):
        if tree.numel() == 0:
            return ["empty", dtype_name(tree.dtype), list(tree.shape)]
        if id(tree) not in numbers:
            numbers[id(tree)] = len(tensors)
            tensors.append(tree)
        return ["tensor", numbers[id(tree)]]
    for kind, container in CONTAINERS.items():
        if type(tree) is container:
            parts = [part for item in tree.items() for part in item] if isinstance(tree, dict) else tree
            return [kind, *(_take_apart(part, tensors, numbers) for part in parts)]
    if type(tree) not in SCALARS:
        raise TypeError(f"{type(tree).__name__} in a state: neither a tensor nor a scalar that JSON keeps")
    return tree


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype that `dtype_name` named."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def as_bytes(tensor: Tensor) -> Any:
    """The elements as a one-dimensional numpy array of uint8; a view of a contiguous tensor, else of a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def raw_size(tree: Any) -> int:
    """Bytes of all tensors of a tree, each counted once."""
    return sum(tensor.nbytes for tensor in flatten(tree)[1])


def blank(tree: Any) -> Any:
    """A tree of the same form with untouched memory in its tensors and nothing in its scalars: what is loaded into."""
    if isinstance(tree, Tensor):
        return torch.empty_like(tree)
    if isinstance(tree, dict):
        return type(tree)((key, blank(value)) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree)(blank(value) for value in tree)
    return type(tree)() if isinstance(tree, bool | int | float | str) else tree


def state_difference(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The first place where two states differ; None where there is none. Components have names and no order."""
    if sorted(expected) != sorted(found):
        return f"state: components {sorted(expected)} became {sorted(found)}"
    return next((told for name in expected if (told := difference(expected[name], found[name], name))), None)


def difference(expected: Any, found: Any, path: str) -> str | None:
    """The first place where two trees are not the same bit for bit, in type, keys and their order, or value."""
    if type(expected) is not type(found):
        return f"{path}: {type(expected).__name__} became {type(found).__name__}"
    if isinstance(expected, Tensor):
        return None if _is_same_tensor(expected, found) else f"{path}: tensor differs"
    if isinstance(expected, dict):
        if list(expected) != list(found):
            return f"{path}: keys differ"
        pairs = [(f"{path}[{key!r}]", value, found[key]) for key, value in expected.items()]
    elif isinstance(expected, list | tuple):
        if len(expected) != len(found):
            return f"{path}: length {len(expected)} became {len(found)}"
        pairs = [(f"{path}[{n}]", value, found[n]) for n, value in enumerate(expected)]
    elif _is_same_scalar(expected, found):
        return None
    else:
        return f"{path}: {expected!r} became {found!r}"
    return next((told for where, a, b in pairs if (told := difference(a, b, where))), None)


def _is_same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.numel() == 0 or bool((as_bytes(a) == as_bytes(b)).all())


def _is_same_scalar(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


class Live:
    """The state of a training run: tensors that stay where they are and change their content."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self.state: Any = None

    def update(self, tree: Any) -> None:
        """Take over the content of `tree`: into the same memory where dtype and shape stayed, else into new memory."""
        skeleton, tensors = flatten(tree)
        self._tensors += [torch.empty(0)] * (len(tensors) - len(self._tensors))
        del self._tensors[len(tensors) :]
        for number, tensor in enumerate(tensors):
            kept = self._tensors[number]
            if kept.dtype == tensor.dtype and kept.shape == tensor.shape:
                kept.copy_(tensor)
            else:
                self._tensors[number] = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.state = unflatten(skeleton, self._tensors)

    def scribble(self) -> None:
        """Change every element, as training does as soon as it may: what was not captured by then is lost."""
        for tensor in self._tensors:
            if tensor.dtype == torch.bool:
                torch.logical_not(tensor, out=tensor)
            else:
                plain = as_bytes(tensor)
                plain ^= 0xFF
