"""Random generators as state: one generator is a leaf of its own kind; `RngState` bundles the global ones.

A generator's state is a plain tree of numbers, bytes and arrays. It comes back as a generator of the same kind in the
same state, or is put into a live one. Not kept: which seed sequence a numpy generator would spawn children from.
"""

from __future__ import annotations

import operator
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any

from casckpt.errors import CorruptionError, MismatchError, UnsupportedStateError


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


def generators_of(name: str, source: Any) -> Iterator[tuple[str, Any]]:
    """The generators behind something that draws: name and generator of each.

    A generator is itself; an object with a `bit_generator`, or with an `np_random` as Gymnasium's environments and
    spaces have it, stands for that; a space of spaces, a list, a tuple or a dict for everything in it (`name/key`).

    Raises:
        UnsupportedStateError: nothing in it draws, or what does is in another process.
    """
    own = getattr(source, "bit_generator", None)
    inside = source if isinstance(source, (list, tuple, dict)) else getattr(source, "spaces", None)
    if kind_of(source) is not None:
        yield name, source
    elif kind_of(own) is not None:
        yield name, own
    elif isinstance(inside, (list, tuple, dict)):
        drawn = getattr(source, "_np_random", None)  # np_random itself would seed what has no seed yet, all inside too
        if drawn is not None:
            yield name, drawn
        for key, item in inside.items() if isinstance(inside, dict) else enumerate(inside):
            yield from generators_of(f"{name}/{key}", item)
    elif hasattr(source, "np_random"):
        drawn = source.np_random
        if isinstance(drawn, tuple) and any(map(operator.is_not, drawn, source.np_random)):
            raise UnsupportedStateError(
                f"{name}: {type(source).__name__} hands out copies of generators that live in other processes. Capture "
                "the environments themselves: casckpt.integrations.gymnasium.EnvState",
                path=name,
            )
        yield from generators_of(name, drawn)
    else:
        found = type(source).__name__
        raise UnsupportedStateError(
            f"{name}: {found} is no random generator that casckpt knows. Give a generator of random, numpy or torch, "
            "an object with a bit_generator, or a Gymnasium environment or space",
            path=name,
        )


class RngState:
    """A Checkpointable of every generator that a training draws from without naming it.

    Python's `random`, numpy's legacy global, torch's CPU generator and every CUDA device's, and what is given by name:
    generators, Gymnasium environments and spaces, anything with a `bit_generator` (see `generators_of`). Libraries that
    are not loaded have no part in it. Restored last, since building or loading other objects may draw numbers.
    """

    restore_last = True

    def __init__(self, **extra: Any) -> None:
        self._sources = extra
        _ = self.extra  # refuses what does not draw

    @property
    def extra(self) -> dict[str, Any]:
        """The named generators as they are now: an environment or a space replaces its own when it is seeded."""
        return {name: made for key, source in self._sources.items() for name, made in generators_of(key, source)}

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
        extra, live = state["extra"], self.extra
        kinds = {name: kind_of(generator) for name, generator in live.items()}
        stored_kinds = {name: kind_of(generator) for name, generator in extra.items()}
        if kinds != stored_kinds:
            raise MismatchError(f"RngState: stored generators {stored_kinds}, live ones {kinds}")
        random.setstate(_python_state(state["python"]))
        for name, generator in extra.items():
            kind = str(kinds[name])
            put(kind, live[name], tree_of(kind, generator))
        if "numpy" in state:
            from casckpt.state import _numpy

            _numpy.set_global_rng(state["numpy"])
        if "torch" in state:
            from casckpt.state import _torch

            _torch.set_global_rngs(state["torch"])

    def reseed(self, seed: int) -> dict[str, str]:
        """Give every generator a new stream of its own, derived from `seed`: exploration anew, on purpose.

        The same seed gives the same streams in every process. Commit the returned labels with the next snapshot, so
        that the record says why draws differ from the line that was left: `commit(step, state, labels=labels)`.

        Raises:
            InvalidInputError: `seed` is no integer from 0 to 2**63 - 1.
        """
        from casckpt.state.seeding import seed_generator, seed_globals, stream_seed

        names = seed_globals(stream_seed(seed, "reseed"))
        for name, generator in self.extra.items():
            seed_generator(generator, stream_seed(seed, "reseed", name))
            names.append(name)
        return {"rng.reseed": str(seed), "rng.reseed.generators": ", ".join(names)}
