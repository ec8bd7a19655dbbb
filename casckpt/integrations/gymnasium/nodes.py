"""What the state of an environment is made of: plain values, and six kinds of nodes between them.

A captured environment is a tree of plain values (numbers, text, arrays, tensors, generators, containers of them) in
which objects stand as *nodes*. Nodes are namedtuples of plain values, so the tree needs no pickle and is stored like
any other state. They say what was there, never how to make it: a restore looks for the same objects in a live
environment that its own constructor made, and puts the values into them.

| node | stands for |
|---|---|
| `Stack` | an environment: its wrappers from the outside in, and the environment itself, each a `Layer` |
| `Layer` | one of them: class, constructor's arguments, attributes |
| `Held` | another object of a Python class: class, attributes |
| `Adapted` | an object that an adapter or a method of its own captured |
| `Same` | an object that was met before, at this path |
| `Left` | something that is not captured; a restore leaves what is there |

Paths are expressions from the environment on: `env.env._elapsed_steps`, `env.envs[2].state`.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Stack(NamedTuple):
    """An environment; keys are `0.TimeLimit`, `1.OrderEnforcing`, …, the environment itself last."""

    layers: dict[str, Any]


class Layer(NamedTuple):
    """A wrapper or an environment.

    `arguments`: of its constructor, as far as they are plain; compared at a restore. `streams`: the generators of it
    and its spaces where `state` is `Adapted`, since methods of users and simulators forget them; else None.
    """

    kind: str
    arguments: Any
    state: Any  # a Held or an Adapted
    streams: Any


class Held(NamedTuple):
    """An object of a Python class; `left`: names of attributes that are not captured."""

    kind: str
    attributes: dict[str, Any]
    left: list[str]


class Adapted(NamedTuple):
    """What an adapter, or the object's own `get_state` or `state_dict`, returned."""

    kind: str
    state: Any


class Same(NamedTuple):
    """The object at `path` again."""

    path: str


class Left(NamedTuple):
    """An item of a container that is not captured; `kind` is its class."""

    kind: str


NODES = {node.__name__: node._fields for node in (Stack, Layer, Held, Adapted, Same, Left)}


def node_name(value: Any) -> str | None:
    """The name of a node's class; nodes come back from a store as namedtuples of this name and these fields."""
    if not isinstance(value, tuple):
        return None
    fields, name = getattr(value, "_fields", None), type(value).__name__
    return name if fields is not None and NODES.get(name) == fields else None


class Finding(NamedTuple):
    """Something at `path` that is not an ordinary value, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"
