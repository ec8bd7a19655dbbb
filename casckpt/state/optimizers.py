"""Whether the parameter groups of a torch optimizer are those that a snapshot was made of.

torch's `load_state_dict` replaces the hyper-parameters of every group without comparing their names: the state of
another class loads, and the next `step()` fails, or runs on moments of another meaning. So the names are compared
before anything is touched. What cannot be told apart is a pair of classes whose hyper-parameters have the same names,
as Adam and AdamW, whose moments mean the same, or RAdam and Adamax, whose do not.

torch is not imported here; the names come from the optimizer itself.
"""

from __future__ import annotations

import sys
from typing import Any

from casckpt.format.structure import Mapping, Node, Sequence, join_path, keys_of
from casckpt.state.differences import Difference

_PARAMETERS = {"params", "param_names"}
_FROM_SCHEDULERS = {  # put into groups by torch.optim.lr_scheduler and swa_utils, at their construction
    *("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"),
}
_FROM_NEWER_RELEASES = {  # each came to existing classes in a release of torch (1.11 to 2.7), with a default on loading
    *("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"),
}
_IGNORED = _PARAMETERS | _FROM_SCHEDULERS | _FROM_NEWER_RELEASES


def is_optimizer(live: Any) -> bool:
    """Whether a live object is a torch optimizer."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(live, torch.optim.Optimizer)


def group_differences(optimizer: Any, groups: Node, path: str) -> list[Difference]:
    """Differences in the number of groups and in the names of their hyper-parameters; no option accepts them.

    Args:
        optimizer: a torch optimizer.
        groups: the stored `param_groups`.
        path: of the optimizer.
    """
    at = join_path(path, "param_groups")
    nodes = [node for node in groups.children if isinstance(node, Mapping)] if isinstance(groups, Sequence) else []
    if len(nodes) != len(optimizer.param_groups):
        return [Difference(at, f"{len(nodes)} groups", f"{len(optimizer.param_groups)} groups")]
    found: list[Difference] = []
    for number, (node, live) in enumerate(zip(nodes, optimizer.param_groups, strict=True)):
        found += _compare_names(set(keys_of(node)), set(live), set(optimizer.defaults), join_path(at, number))
    return found


def _compare_names(stored: set[str], live: set[str], defaults: set[str], path: str) -> list[Difference]:
    """A live group may have names beyond its class's defaults; a stored one may not have any that are unknown here."""
    missing = [
        Difference(join_path(path, name), "nothing of this name", "a hyper-parameter of the live optimizer")
        for name in sorted(defaults - stored - _IGNORED)
    ]
    unknown = [
        Difference(join_path(path, name), "a hyper-parameter of this name", "none in the live optimizer")
        for name in sorted(stored - live - defaults - _IGNORED, key=str)
    ]
    return missing + unknown
