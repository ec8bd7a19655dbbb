"""Plain attributes of an object as a tree, for objects that have no `state_dict` of their own.

Plain is what a store takes without asking anybody: numbers, text, arrays, tensors, generators, and containers of them.
Attributes that are anything else are named, so that whoever asks can say what was left out.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from casckpt.errors import UnsupportedStateError
from casckpt.state.capture import capture


def copied(value: Any) -> Any:
    """A copy that shares no memory with the original; None stays None."""
    return copy.deepcopy(value)


def take_attributes(owner: Any, skip: Collection[str] = (), left_out: dict[str, str] | None = None) -> dict[str, Any]:
    """The plain attributes of an object, copied; its own `state_dict()` where it has one.

    Args:
        owner: None has no attributes.
        skip: names that are no state.
        left_out: receives name → reason of each attribute that is not plain.
    """
    if owner is None:
        return {}
    if callable(getattr(owner, "state_dict", None)):
        return {"state_dict": copied(owner.state_dict())}
    taken = {}
    for name, value in vars(owner).items():
        if name in skip:
            continue
        try:
            capture(name, value)
        except UnsupportedStateError as error:
            if left_out is not None:
                left_out[name] = error.message
            continue
        taken[name] = copied(value)
    return taken


def put_attributes(owner: Any, attributes: dict[str, Any]) -> None:
    """Set what `take_attributes` took."""
    if "state_dict" in attributes:
        owner.load_state_dict(attributes["state_dict"])
        return
    for name, value in attributes.items():
        setattr(owner, name, copied(value))
