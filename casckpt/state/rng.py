"""Random generators as state: one generator is a leaf of its own kind; `RngState` bundles the global ones.

A generator's state is a plain tree of numbers, bytes and arrays. It comes back as a generator of the same kind in the
same state, or is put into a live one. Not kept: which seed sequence a numpy generator would spawn children from.
"""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

from casckpt.errors import CorruptionError, MismatchError


def kind_of(value: Any) -> str | None:
    """The kind of a generator as structures name it, None for anything else."""
    if type(value) is random.Random:
        return "python"
    if "numpy" in sys.modules:
        from casckpt.state import _numpy

        if type(value) is _numpy.GENERATOR:
            return "numpy.Generator"
        if type(value) is _numpy.RANDOM_STATE:
            return "numpy.RandomState"
        if type(value) in _numpy.BIT_GENERATORS.values():
            return "numpy.BitGenerator"
    if "torch" in sys.modules:
        from casckpt.state import _torch

        if type(value) is _torch.GENERATOR:
            return "torch"
    return None


def tree_of(kind: str, generator: Any) -> dict[str, Any]:
    """A generator's state as a plain tree that nothing else refers to."""
    if kind == "python":
        return _python_tree(generator.getstate())
    if kind == "torch":
        from casckpt.state import _torch

        return _torch.generator_tree(generator)
    from casckpt.state import _numpy

    return _numpy.generator_tree(generator)


def check_fit(kind: str, generator: Any, tree: Any, path: str) -> None:
    """Compare what can be compared before a state is there: the algorithm, the kind of device.

    Raises:
        MismatchError: the live generator runs another algorithm or lives on another kind of device.
    """
    name = {"torch": "device", "python": "version"}.get(kind, "bit_generator")
    expected, found = tree.get(name), tree_of(kind, generator)[name]
    if expected != found:
        raise MismatchError(
            f"{path}: expected a {kind} generator with {name} {expected!r}, found {found!r}",
            path=path,
            differences=[(path, f"{name} {expected!r}", f"{name} {found!r}")],
        )


def make(kind: str, tree: Any) -> Any:
    """A new generator of this kind in this state.

    Raises:
        CorruptionError: the state is none of this kind of generator.
    """
    try:
        if kind == "python":
            made = random.Random()
            made.setstate(_python_state(tree))
            return made
        if kind == "torch":
            from casckpt.state import _torch

            return _torch.make_generator(tree)
        from casckpt.state import _numpy

        return _numpy.make_generator(kind, tree)
    except (ValueError, TypeError, KeyError, struct.error, RuntimeError, AttributeError, OverflowError) as error:
        raise CorruptionError(f"the state of a {kind} generator is not usable: {error}") from error


def put(kind: str, generator: Any, tree: Any) -> None:
    """Put a state into a live generator of this kind.

    Raises:
        MismatchError: the live generator runs another algorithm.
    """
    try:
        if kind == "python":
            generator.setstate(_python_state(tree))
        elif kind == "torch":
            from casckpt.state import _torch

            _torch.set_generator(generator, tree)
        else:
            from casckpt.state import _numpy

            _numpy.set_generator(generator, tree)
    except (ValueError, TypeError, KeyError, struct.error, RuntimeError) as error:
        raise MismatchError(f"the stored state does not fit this {kind} generator: {error}") from error


def _copy_of(generator: Any) -> Any:
    kind = str(kind_of(generator))
    return make(kind, tree_of(kind, generator))


def _python_tree(state: Any) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": struct.pack(f"<{len(words)}I", *words), "gauss": gauss}


def _python_state(tree: dict[str, Any]) -> Any:
    return tree["version"], struct.unpack("<625I", tree["words"]), tree["gauss"]


class RngState:
    """A Checkpointable of every generator that a training draws from without naming it.

    Python's `random`, numpy's legacy global, torch's CPU generator and every CUDA device's, and the `extra` generators
    given by name. Libraries that are not loaded have no part in it. Restored last, since building or loading other
    objects may draw numbers.
    """

    restore_last = True

    def __init__(self, **extra: Any) -> None:
        self.extra = extra
        for name, generator in extra.items():
            if kind_of(generator) is None:
                raise TypeError(f"{name}: {type(generator).__name__} is no random generator that casckpt knows")

    def state_dict(self) -> dict[str, Any]:
        """All states, copied; the extra generators as new ones in the same states."""
        extra = {name: _copy_of(generator) for name, generator in self.extra.items()}
        state: dict[str, Any] = {"python": _python_tree(random.getstate()), "extra": extra}
        if "numpy" in sys.modules:
            from casckpt.state import _numpy

            state["numpy"] = _numpy.global_rng_tree()
        if "torch" in sys.modules:
            from casckpt.state import _torch

            state["torch"] = _torch.global_rng_trees()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put every stored state back. `state["extra"]` holds generators, whose states are copied.

        Raises:
            MismatchError: the extra generators have other names or kinds; nothing was changed.
        """
        extra = state["extra"]
        kinds = {name: kind_of(generator) for name, generator in self.extra.items()}
        stored_kinds = {name: kind_of(generator) for name, generator in extra.items()}
        if kinds != stored_kinds:
            raise MismatchError(f"RngState: stored generators {stored_kinds}, live ones {kinds}")
        random.setstate(_python_state(state["python"]))
        for name, generator in extra.items():
            kind = str(kinds[name])
            put(kind, self.extra[name], tree_of(kind, generator))
        if "numpy" in state:
            from casckpt.state import _numpy

            _numpy.set_global_rng(state["numpy"])
        if "torch" in state:
            from casckpt.state import _torch

            _torch.set_global_rngs(state["torch"])
