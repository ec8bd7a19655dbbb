"""Trees of values into live objects, without a store between: what was restored, changed, and now is to be loaded.

The tree is captured as a commit would capture it, and the live object filled as a restore would fill it. So names,
shapes and dtypes are compared alike, everything is checked before anything is touched, and generators come last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from casckpt.state.build import Assembly
from casckpt.state.capture import Captured, capture
from casckpt.state.differences import mismatch
from casckpt.state.target import Target


def copy_tree(component: str, live: Any) -> Any:
    """What a commit of `live` followed by a restore would give: its values as a tree that shares no memory with it.

    Raises:
        UnsupportedStateError: a leaf that cannot be stored; `path` names it.
    """
    captured = capture(component, live)
    assembly = Assembly(captured.structure, component)
    _copy(captured, assembly.blocks)
    return assembly.tree(captured.scalars)


class Transfer:
    """Trees on their way into live objects. Making one compares everything and touches nothing.

    Args:
        trees: component name → a tree of values, as `Store.restore` gives it.
        targets: the live object for each of these names.
        strict, cast: as for `Store.restore_into`.

    Cost: one copy of what cannot be filled in place; the trees stay alive until `fill` is done.

    Raises:
        MismatchError: trees and live objects differ; all differences are listed.
        UnsupportedStateError: a tree holds what cannot be stored.
    """

    def __init__(
        self, trees: Mapping[str, Any], targets: Mapping[str, Any], *, strict: bool = True, cast: bool = False
    ) -> None:
        self._trees = trees  # their memory is read by `fill`
        self._captured = {name: capture(name, tree) for name, tree in trees.items()}
        self._targets = {
            name: Target(name, targets[name], captured.structure, strict=strict, cast=cast)
            for name, captured in self._captured.items()
        }
        differences = [difference for target in self._targets.values() for difference in target.differences]
        if differences:
            raise mismatch(differences)
        for name, target in self._targets.items():
            target.check(self._captured[name].scalars)

    def fill(self) -> None:
        """Put everything into the live objects; those with generators last."""
        for name, target in self._targets.items():
            _copy(self._captured[name], target.blocks)
        for name in sorted(self._targets, key=lambda name: self._targets[name].restore_last):
            self._targets[name].finish(self._captured[name].scalars)


def _copy(captured: Captured, blocks: Mapping[int, memoryview]) -> None:
    for block, memory in blocks.items():
        memory[:] = captured.blocks.view(block, 0, captured.blocks.size(block))
