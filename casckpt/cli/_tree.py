"""A component's tree as JSON: scalars in it, tensors by their name in the file beside it.

A node is one of these, and never a bare list or an object of another form, so that reading needs no guessing:

* null, true, a string, a finite number that JSON keeps exactly: the scalar itself;
* `{"scalar": type, …}`: any other scalar (see `scalar_node`);
* `{"tensor": name}`: a tensor, array or long bytes object; facts about it are in the document's `tensors`;
* `{"dict": [[key, node], …]}`, with "class" where it is no plain dict; keys are nodes;
* `{"list" | "tuple" | "deque" | "set" | "frozenset": [node, …]}`, a bounded deque with "maxlen";
* `{"namedtuple": name, "fields": {…}}`;
* `{"rng": kind, "state": node}`; `{"pickle": type name, "tensor": name}`: bytes that only pickle reads.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from casckpt.format.scalars import Foreign
from casckpt.format.structure import Mapping, Node, Opaque, Record, Rng, Structure, keys_of

_EXACT_INT = 1 << 53  # larger integers lose digits in readers that keep numbers as doubles


def tree_node(structure: Structure, scalars: list[Any], name_of: Callable[[int], str | None]) -> Any:
    """The tree of a component.

    Args:
        structure: decoded.
        scalars: its scalars in tree order.
        name_of: the tensor name of a leaf; None for one that was left out, which becomes `{"left_out": true}`.
    """
    return _Writer(iter(scalars), name_of).node(structure.tree)


class _Writer:
    """Walks a tree in its own order, taking one scalar after the other."""

    def __init__(self, scalars: Iterator[Any], name_of: Callable[[int], str | None]) -> None:
        self._scalars = scalars
        self._name_of = name_of

    def node(self, node: Node) -> Any:
        if node is None:
            return scalar_node(next(self._scalars))
        if isinstance(node, int):
            return self._leaf({}, node)
        if isinstance(node, Opaque):
            return self._leaf({"pickle": node.type_name}, node.leaf)
        if isinstance(node, Rng):
            return {"rng": node.kind, "state": self.node(node.state)}
        children = [self.node(child) for child in node.children]
        if isinstance(node, Mapping):
            items = [[scalar_node(key), child] for key, child in zip(keys_of(node), children, strict=True)]
            return {"dict": items} if node.kind == "dict" else {"dict": items, "class": node.kind}
        if isinstance(node, Record):
            return {"namedtuple": node.name, "fields": dict(zip(node.fields, children, strict=True))}
        return {node.kind: children} if node.maxlen is None else {node.kind: children, "maxlen": node.maxlen}

    def _leaf(self, facts: dict[str, Any], leaf: int) -> dict[str, Any]:
        name = self._name_of(leaf)
        return {**facts, "left_out": True} if name is None else {**facts, "tensor": name}


def scalar_node(value: Any) -> Any:
    """A scalar: itself where JSON keeps it exactly, else an object that says its type and every bit of it."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        is_text = not any(0xD800 <= ord(c) <= 0xDFFF for c in value)
        return value if is_text else {"scalar": "str", "utf8": value.encode("utf-8", "surrogatepass").hex()}
    if kind is int:
        return value if abs(value) <= _EXACT_INT else {"scalar": "int", "value": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"scalar": "float", "bits": struct.pack(">d", value).hex()}
    if kind is complex:
        return {"scalar": "complex", "bits": struct.pack(">dd", value.real, value.imag).hex(), "text": repr(value)}
    if kind is bytes:
        return {"scalar": "bytes", "base64": base64.b64encode(value).decode()}
    if kind is Foreign:
        return {"scalar": value.kind, "payload": scalar_node(value.payload)}
    items = [scalar_node(item) for item in (sorted(value, key=repr) if kind in (set, frozenset) else value)]
    bound = {"maxlen": value.maxlen} if kind is deque and value.maxlen is not None else {}
    return {kind.__name__: items, **bound}
