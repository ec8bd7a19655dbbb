"""`EnvState`: an environment as a component of a snapshot.

    env = gymnasium.make("HalfCheetah-v5")
    store.commit(step, {"policy": policy, "env": EnvState(env)})

A restored environment goes on as the captured one did: equal actions give equal observations, rewards and ends, in the
middle of an episode and across resets. It must be made the same way (same wrappers, same arguments) before the restore;
a reset is not needed, except for classes that build their world in `reset`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from casckpt.errors import CorruptionError, InvalidInputError, MismatchError, UnsupportedStateError
from casckpt.integrations.gymnasium._async import Capturable
from casckpt.integrations.gymnasium.nodes import Finding
from casckpt.integrations.gymnasium.parts import parts_of, tree_of
from casckpt.integrations.gymnasium.put import Put, first_difference
from casckpt.integrations.gymnasium.walk import EnvWalk, overlapping
from casckpt.state.differences import mismatch

VERSION = 1
_SHOWN_MAX = 8  # of findings in a message; the error has all of them as attributes


@dataclass(frozen=True)
class EnvReport:
    """What a capture of an environment holds, and what it does not.

    Attributes:
        captured: paths of values, arrays, generators and adapted objects.
        constructed: code, definitions and drawing, which the constructor makes again.
        missing: state that cannot be captured, with the reason.
        unseeded: generators that will seed themselves from the system's entropy at their first draw.
    """

    captured: list[str]
    constructed: list[Finding]
    missing: list[Finding]
    unseeded: list[str]

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        pairs = {name: [list(each) for each in getattr(self, name)] for name in ("constructed", "missing")}
        return {"captured": self.captured, **pairs, "unseeded": self.unseeded, "is_complete": self.is_complete}

    def __str__(self) -> str:
        lines = [f"{len(self.captured)} values captured, {len(self.constructed)} constructed again"]
        lines += [f"not captured  {finding}" for finding in self.missing]
        lines += [f"not seeded    {path}" for path in self.unseeded]
        return "\n".join(lines)


class EnvState:
    """A Checkpointable of an environment: Gymnasium's own or a subclass, wrapped, vectorised, or any tree of them.

    Captured are the random generators of environments and spaces, every attribute of every wrapper and environment
    (time limit, frame stack, normaliser, episode statistics, …), the emulator or simulator behind it, and the objects
    that they hold.

    Args:
        env: the live environment. For AsyncVectorEnv see `capturable`.
        strict: refuse a capture that would lack something, and a restore of one that does.

    Cost: about 10 µs an attribute, a copy of the arrays, and the simulator's own serialization; a
    restore about five times that.
    """

    def __init__(self, env: Any, *, strict: bool = True) -> None:
        self.env = env
        self.strict = strict

    def report(self) -> EnvReport:
        """What would be captured now."""
        walk = EnvWalk()
        walk.node(self.env, "env")
        return EnvReport(walk.captured, walk.constructed, walk.missing, walk.unseeded)

    def state_dict(self) -> dict[str, Any]:
        """The state now, in memory of its own.

        Raises:
            UnsupportedStateError: something cannot be captured (`paths` names all of it), and `strict` is true.
        """
        walk = EnvWalk(copies=True)
        tree = walk.node(self.env, "env")
        if walk.missing and self.strict:
            shown = "; ".join(map(str, walk.missing[:_SHOWN_MAX]))
            raise UnsupportedStateError(
                f"{len(walk.missing)} parts of the environment cannot be captured: {shown}. Give the class get_state() "
                "and set_state(), or an adapter (register_env_adapter); or say that a restore may go without: "
                "EnvState(env, strict=False)",
                path=walk.missing[0].path,
                paths=[finding.path for finding in walk.missing],
            )
        if overlapping(walk.arrays):  # a store keeps what they share
            tree = tree_of(parts_of(EnvWalk().node(self.env, "env")))
        return {"version": VERSION, "env": tree, "not_captured": [str(finding) for finding in walk.missing]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a state into the live environment, and read it back.

        Raises:
            MismatchError: the environment is made otherwise (nothing was touched), or did not take what it was given.
            InvalidInputError: the capture lacked something, and `strict` is true; or it is of another version.
            CorruptionError: no capture makes such a tree; nothing was touched.
        """
        if state.get("version") != VERSION:
            found = state.get("version")
            raise InvalidInputError(f"state of an environment: expected version {VERSION}, found {found!r}")
        if state["not_captured"] and self.strict:
            shown = "; ".join(state["not_captured"][:_SHOWN_MAX])
            raise InvalidInputError(
                f"the environment was captured without {shown}. To go on without: EnvState(env, strict=False)",
                paths=list(state["not_captured"]),
            )
        stored = tree_of(parts_of(state["env"]))
        putting = Put()
        try:
            putting.compare(stored, self.env, "env")
        except (AttributeError, IndexError, KeyError, TypeError) as error:  # a tree that no capture makes
            raise CorruptionError(f"state of an environment: not what a capture gives ({error!r})") from error
        if putting.differences:
            raise mismatch(putting.differences)
        putting.put(stored, self.env, "env")
        path = first_difference(state["env"], EnvWalk().node(self.env, "env"), "env")
        if path:
            raise MismatchError(
                f"{path}: read back after the restore, it is not what was stored. Its class changes what it is given; "
                "write get_state() and set_state() for it, or an adapter (register_env_adapter).",
                path=path,
            )


@dataclass(frozen=True)
class _Making:
    """A callable that makes a capturable environment; picklable if `make` is."""

    make: Callable[[], Any]

    def __call__(self) -> Capturable:
        return Capturable(self.make())


def capturable(make: Callable[[], Any]) -> Callable[[], Capturable]:
    """An environment maker for AsyncVectorEnv whose environments can be captured in their workers.

    Args:
        make: a callable without arguments that makes one environment.
    """
    return _Making(make)
