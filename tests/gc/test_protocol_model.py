"""The protocol as a small model, every interleaving of its steps: commit, restore and two collectors at once.

What the argument in `docs/design/0015-collection.md` claims is checked here without the code: a model of the store
(log, files, leases), actors as programs of atomic steps, and a search over every order in which they can run. Few packs
stand for everything: P0 is needed by the snapshot that stays, P1 by the one that retention lets go, and a commit
may bring one of its own.

The model is also run with each safeguard left out, one at a time. Each omission must be found as a loss, so that the
search is known to be able to find one, and each safeguard to be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.gc.exploring import Step, losses

Pack = str


@dataclass(frozen=True)
class Model:
    """State of the store. `log` holds ("commit", name, pack), ("retire", name) and ("condemn", packs, copies)."""

    log: tuple[tuple[Any, ...], ...] = (("commit", "old", "P1"), ("commit", "new", "P0"))
    packs: frozenset[Pack] = frozenset({"P0", "P1"})
    trash: frozenset[Pack] = frozenset()
    leases: frozenset[tuple[str, int]] = frozenset()  # reader, entries it had seen when it began

    def live(self) -> dict[str, Pack]:
        """Snapshots that are not retired, with the pack that each needs: a copy takes the place of what it copies."""
        retired = {entry[1] for entry in self.log if entry[0] == "retire"}
        found = {entry[1]: entry[2] for entry in self.log if entry[0] == "commit" and entry[1] not in retired}
        for copies in (dict(entry[2]) for entry in self.log if entry[0] == "condemn"):
            found = {name: copies.get(pack, pack) for name, pack in found.items()}
        return found

    def condemned(self) -> set[Pack]:
        return {pack for entry in self.log if entry[0] == "condemn" for pack in entry[1]}

    def append(self, seen: int, entry: tuple[Any, ...]) -> Model | None:
        """The entry under number `seen`; None when that is taken."""
        return replace(self, log=(*self.log, entry)) if seen == len(self.log) else None


@dataclass(frozen=True)
class Safeguards:
    """What can be left out."""

    commit_checks_condemned: bool = True
    condemn_marks_again_when_the_number_is_lost: bool = True
    first_gate: bool = True
    second_gate: bool = True
    unnamed_packs_are_condemned_first: bool = True


def committer(guards: Safeguards) -> list[Step]:
    """Looks up P1's content; reuses it if it is there, else stores it as a pack of its own, P2; publishes."""

    def look(model: Model, own: dict[str, Any]) -> Any:
        count = len(model.condemned())
        found = "P1" in model.packs and "P1" not in model.condemned()
        return (
            model,
            {"condemned": count, "uses": "P1" if found else f"P{2 + count}"},
            1,
        )  # every new pack has a new name

    def write(model: Model, own: dict[str, Any]) -> Any:
        return replace(model, packs=model.packs | ({own["uses"]} - {"P1"})), own, 2

    def see(model: Model, own: dict[str, Any]) -> Any:
        if guards.commit_checks_condemned and len(model.condemned()) != own["condemned"]:
            return model, own, 0
        return model, {**own, "seen": len(model.log)}, 3

    def publish(model: Model, own: dict[str, Any]) -> Any:
        after = model.append(own["seen"], ("commit", "mine", own["uses"]))
        return (model, own, 2) if after is None else (after, own, 9)

    return [look, write, see, publish]


def reader(guards: Safeguards) -> list[Step]:
    """Takes a lease, chooses the oldest snapshot that is not retired, looks up its pack, reads it."""

    def lease(model: Model, own: dict[str, Any]) -> Any:
        return replace(model, leases=model.leases | {("reader", len(model.log))}), own, 1

    def choose(model: Model, own: dict[str, Any]) -> Any:
        return model, {"name": next(iter(model.live()))}, 2

    def locate(model: Model, own: dict[str, Any]) -> Any:
        pack = model.live().get(own["name"], "P1")  # who has a snapshot's id finds it though it is retired
        return model, {**own, "pack": pack, "lost": pack in model.condemned()}, 3

    def read(model: Model, own: dict[str, Any]) -> Any:
        is_there = own["pack"] in model.packs or own["pack"] in model.trash
        return model, {**own, "lost": own["lost"] or not is_there}, 4

    def let_go(model: Model, own: dict[str, Any]) -> Any:
        return replace(model, leases=frozenset(each for each in model.leases if each[0] != "reader")), own, 9

    return [lease, choose, locate, read, let_go]


def collector(guards: Safeguards, name: str) -> list[Step]:
    """Retires "old", waits, marks, copies P0, condemns what nothing needs, moves it to trash, waits, unlinks."""

    def retire(model: Model, own: dict[str, Any]) -> Any:
        if "old" not in model.live():
            return model, {**own, "gate": len(model.log)}, 1
        return replace(model, log=(*model.log, ("retire", "old"))), {**own, "gate": len(model.log) + 1}, 1

    def first_gate(model: Model, own: dict[str, Any]) -> Any:
        is_open = not guards.first_gate or all(seen >= own["gate"] for _, seen in model.leases)
        return (model, own, 2) if is_open else None

    def mark(model: Model, own: dict[str, Any]) -> Any:
        needed = set(model.live().values())
        doomed = model.packs - needed - model.condemned()
        if not guards.unnamed_packs_are_condemned_first:
            unnamed = doomed - {entry[2] for entry in model.log if entry[0] == "commit"}
            model, doomed = replace(model, packs=model.packs - unnamed), doomed - unnamed
        copies = ()
        if "P0" in needed:  # rewritten, too
            copies = (("P0", f"copy {len(model.log)} of {name}"),)
            model, doomed = replace(model, packs=model.packs | {copies[0][1]}), doomed | {"P0"}
        return model, {**own, "seen": len(model.log), "doomed": tuple(sorted(doomed)), "copies": copies}, 3

    def condemn(model: Model, own: dict[str, Any]) -> Any:
        if not own["doomed"]:
            return model, own, 4
        after = model.append(own["seen"], ("condemn", own["doomed"], own["copies"]))
        if after is not None:
            return after, own, 4
        if guards.condemn_marks_again_when_the_number_is_lost:
            return model, own, 2
        return model, {**own, "seen": len(model.log)}, 3

    def move(model: Model, own: dict[str, Any]) -> Any:
        gone = model.packs & model.condemned()
        own = {**own, "gate": len(model.log), "trash": tuple(sorted(model.trash | gone))}
        return replace(model, packs=model.packs - gone, trash=model.trash | gone), own, 5

    def second_gate(model: Model, own: dict[str, Any]) -> Any:
        is_open = not guards.second_gate or all(seen >= own["gate"] for _, seen in model.leases)
        return (model, own, 6) if is_open else None

    def unlink(model: Model, own: dict[str, Any]) -> Any:
        return replace(model, trash=model.trash - set(own["trash"])), own, 9

    return [retire, first_gate, mark, condemn, move, second_gate, unlink]


Actors = dict[str, list[Step]]


def losses_of(model: Model, states: tuple[Any, ...]) -> Iterator[str]:
    for name, pack in model.live().items():
        if pack not in model.packs:
            yield f"snapshot {name} needs {pack}, packs are {sorted(model.packs)}: {model.log}"
    for name, _, own in states:
        if dict(own).get("lost"):
            yield f"{name} did not find {dict(own)['pack']}"


def make(guards: Safeguards, *names: str) -> Actors:
    kinds: dict[str, Callable[[], list[Step]]] = {
        "commit": lambda: committer(guards),
        "restore": lambda: reader(guards),
        "collect": lambda: collector(guards, "one"),
        "another": lambda: collector(guards, "two"),
    }
    return {name: kinds[name]() for name in names}


ALL = ("commit", "restore", "collect", "another")


@pytest.mark.parametrize(
    "names", [("commit", "collect"), ("restore", "collect"), ("collect", "another"), ("commit", "restore", "collect")]
)
def test_no_interleaving_loses_anything(names: tuple[str, ...]) -> None:
    assert next(losses(make(Safeguards(), *names), Model(), losses_of), None) is None


@pytest.mark.full
def test_no_interleaving_of_all_four_loses_anything() -> None:
    assert next(losses(make(Safeguards(), *ALL), Model(), losses_of), None) is None


@pytest.mark.parametrize("name", Safeguards.__dataclass_fields__)
def test_each_safeguard_is_needed(name: str) -> None:
    weaker = replace(Safeguards(), **{name: False})
    actors = ALL if name.startswith("unnamed") else ("commit", "restore", "collect")
    assert next(losses(make(weaker, *actors), Model(), losses_of), None) is not None
