"""Optimizers in a captured tree, recognised by the form of a torch optimizer's state dict, wherever it stands.

    {"state": {id: {"step": …, "exp_avg": leaf, …}, …}, "param_groups": [{"lr": …, "params": [id, …], …}, …]}

A live optimizer is captured in the same form. Nothing of torch or of the optimizer's class is needed, and no tensor is
read. Numbers stay where they are: a `Scalar` is a position in the scalar block, an integer a leaf without dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

from casckpt.format.structure import Mapping, Node, Opaque, Rng, Structure, keys_of


class Scalar(NamedTuple):
    """A value of the scalar block."""

    position: int


Number = Scalar | int


class Slot(NamedTuple):
    """What an optimizer keeps for one parameter: its group, and by name its tensors (leaves) and its numbers."""

    group: int
    entries: dict[str, Number]


class OptimizerTree(NamedTuple):
    """One optimizer: per group its hyper-parameters, and the parameters that have state, in the groups' order."""

    component: str
    groups: list[dict[str, Number]]
    slots: list[Slot]
    params: list[Any]  # per group the ids in it: what `slots` was made from


def find_optimizers(component: str, structure: Structure, scalars: list[Any]) -> list[OptimizerTree]:
    """Every optimizer of a component, in tree order. Costs about 1 µs per node.

    Args:
        component: its name.
        structure: of the component.
        scalars: its decoded scalar block, for the ids in the groups.
    """
    found = _optimizers_in(_shadow(structure.tree, count()))
    return [_optimizer(component, tree, scalars) for tree in found]


def params_of(optimizer: OptimizerTree, scalars: list[Any]) -> list[Any]:
    """The ids in each group as they are now; other ids than `optimizer.params` make it outdated."""
    places = (group.get("params") for group in optimizer.groups)
    return [scalars[place.position] if isinstance(place, Scalar) else None for place in places]


def _shadow(node: Node, positions: Iterator[int]) -> Any:
    """The tree in plain dicts and lists, with a `Scalar` for each scalar and None for what has no use here."""
    if node is None:
        return Scalar(next(positions))
    if isinstance(node, int):
        return node
    if isinstance(node, Opaque):
        return None
    if isinstance(node, Rng):
        _shadow(node.state, positions)  # its scalars count
        return None
    children = [_shadow(child, positions) for child in node.children]
    return dict(zip(keys_of(node), children, strict=True)) if isinstance(node, Mapping) else children


def _optimizers_in(tree: Any) -> Iterator[dict[Any, Any]]:
    if isinstance(tree, dict):
        state, groups = tree.get("state"), tree.get("param_groups")
        if isinstance(state, dict) and isinstance(groups, list) and groups and all(map(_is_group, groups)):
            yield tree
            return
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    for child in children:
        yield from _optimizers_in(child)


def _is_group(tree: Any) -> bool:
    return isinstance(tree, dict) and isinstance(tree.get("params"), Scalar) and "lr" in tree


def _optimizer(component: str, tree: dict[Any, Any], scalars: list[Any]) -> OptimizerTree:
    groups = [_numbers(group) for group in tree["param_groups"]]
    optimizer = OptimizerTree(component, groups, [], [])
    optimizer.params.extend(params_of(optimizer, scalars))
    for number, ids in enumerate(optimizer.params):
        for parameter in ids if isinstance(ids, (list, tuple)) else ():
            entries = tree["state"].get(parameter) if isinstance(parameter, (int, str)) else None
            if isinstance(entries, dict):
                optimizer.slots.append(Slot(number, _numbers(entries)))
    return optimizer


def _numbers(tree: dict[Any, Any]) -> dict[str, Number]:
    return {name: place for name, place in tree.items() if isinstance(name, str) and isinstance(place, (Scalar, int))}
