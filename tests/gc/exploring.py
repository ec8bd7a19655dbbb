"""A search over every order in which actors can run: small models of a protocol are checked with it.

An actor is a list of atomic steps. A step takes the model of the store and the actor's own memory, and gives both back
with the number of the step that comes next; None where it cannot run now. Models and memories can be hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Step = Callable[[Any, dict[str, Any]], "tuple[Any, dict[str, Any], int] | None"]
States = tuple[tuple[str, int, tuple[tuple[str, Any], ...]], ...]  # of each actor: name, next step, memory


def losses(
    actors: Mapping[str, Sequence[Step]], start: Any, losses_of: Callable[[Any, States], Iterator[str]]
) -> Iterator[str]:
    """Every interleaving from `start`, each state once: what `losses_of` finds in it, and where nobody gets on."""
    first: tuple[Any, States] = (start, tuple((name, 0, ()) for name in actors))
    waiting, met = [first], {first}
    while waiting:
        model, states = waiting.pop()
        yield from losses_of(model, states)
        is_stuck = True
        for at, (name, step, own) in enumerate(states):
            if step >= len(actors[name]):
                continue
            result = actors[name][step](model, dict(own))
            if result is None:
                continue
            is_stuck = False
            after, memory, following = result
            moved = (name, following, tuple(sorted(memory.items(), key=lambda item: item[0])))
            state = after, (*states[:at], moved, *states[at + 1 :])
            if state not in met:
                met.add(state)
                waiting.append(state)
        if is_stuck and any(step < len(actors[name]) for name, step, _ in states):
            yield f"stuck: {states}"
