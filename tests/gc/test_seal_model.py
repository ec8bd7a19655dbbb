"""Sealing as a small model, every interleaving of its steps: writers, a reader, a restore and two sealers at once.

What the argument in `docs/design/0017-sealing.md` claims is checked without the code. An epoch has two entries. Entry 0
committed "old", which is retired, and carries object x; entry 1, if it is there from the start, "new" with object y.
Writers add entries of their own. One that stops between its look and its link may find its number taken, sealed, and
the file's name free again.

The model is also run with each safeguard left out, one at a time; each omission must be found as a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest

from tests.gc.exploring import Step, losses

PER_EPOCH = 2


class Entry(NamedTuple):
    """A commit of `name`, which needs `needs` and carries `carries`; or a seal of an epoch, with copies."""

    name: str
    needs: str = ""
    carries: str = ""
    epoch: int = -1
    copies: tuple[str, ...] = ()


OLD, NEW = Entry("old", "x", "x"), Entry("new", "y", "y")


@dataclass(frozen=True)
class Model:
    """State of the store: files by number, epochs, who was told that it committed what, who reads."""

    files: tuple[tuple[int, Entry], ...] = ((0, OLD), (1, NEW))
    epochs: tuple[tuple[int, tuple[Entry, ...]], ...] = ()
    acknowledged: frozenset[tuple[int, Entry]] = frozenset()
    leases: frozenset[tuple[str, int]] = frozenset()  # reader, entries it had seen when it began

    def sealed(self, seq: int) -> Entry | None:
        epoch = dict(self.epochs).get(seq // PER_EPOCH)
        return epoch[seq % PER_EPOCH] if epoch else None

    def entry(self, seq: int) -> Entry | None:
        return self.sealed(seq) or dict(self.files).get(seq)

    def log(self) -> list[Entry]:
        found: list[Entry] = []
        while (entry := self.entry(len(found))) is not None:
            found.append(entry)
        return found

    def link(self, seq: int, entry: Entry) -> Model | None:
        """The entry under a name that is free; None when it is not."""
        return None if seq in dict(self.files) else replace(self, files=tuple(sorted((*self.files, (seq, entry)))))


def sealed_below(log: list[Entry]) -> int:
    return PER_EPOCH * sum(each.epoch >= 0 for each in log)


def objects(model: Model) -> set[str]:
    """What the log says is there: carried by entries that are not sealed and not in an epoch, and copies."""
    log = model.log()
    carried = {each.carries for seq, each in enumerate(log) if seq >= sealed_below(log) and not model.sealed(seq)}
    return carried | {name for each in log for name in each.copies}


def needed(log: list[Entry]) -> set[str]:
    return {each.needs for each in log if each.needs and each.name != "old"}


END = 99


@dataclass(frozen=True)
class Safeguards:
    """What can be left out."""

    writer_looks_for_an_epoch_after_linking: bool = True
    writer_knows_its_own_entry_in_an_epoch: bool = True
    commit_looks_for_seals_before_publishing: bool = True
    sealer_marks_again_when_the_number_is_lost: bool = True
    sealer_copies_what_is_needed: bool = True
    epoch_is_made_before_files_go: bool = True
    epoch_is_made_after_the_seal: bool = True
    epoch_wins_over_a_file: bool = True
    reader_looks_for_the_epoch_last: bool = True
    gate: bool = True


def writer(guards: Safeguards, name: str) -> list[Step]:
    """Looks whether x is there, else carries it; publishes a commit that needs it."""

    def look(model: Model, own: dict[str, Any]) -> Any:
        log = model.log()
        carried = "" if "x" in objects(model) else "x"
        return model, {"seals": sealed_below(log), "entry": Entry(name, "x", carried)}, 1

    def see(model: Model, own: dict[str, Any]) -> Any:
        log = model.log()
        if guards.commit_looks_for_seals_before_publishing and sealed_below(log) != own["seals"]:
            return model, own, 0
        return model, {**own, "seq": len(log)}, 2

    def link(model: Model, own: dict[str, Any]) -> Any:
        after = model.link(own["seq"], own["entry"])
        return (model, own, 1) if after is None else (after, own, 3)

    def acknowledge(model: Model, own: dict[str, Any]) -> Any:
        seq, entry = own["seq"], own["entry"]
        sealed = model.sealed(seq) if guards.writer_looks_for_an_epoch_after_linking else None
        is_own = sealed == entry and guards.writer_knows_its_own_entry_in_an_epoch
        if sealed is None or is_own:
            return replace(model, acknowledged=model.acknowledged | {(seq, entry)}), own, END
        left = tuple(each for each in model.files if each != (seq, entry))
        return replace(model, files=left), own, 0

    return [look, see, link, acknowledge]


def sealer(guards: Safeguards, name: str) -> list[Step]:
    """Marks, publishes that epoch 0 is sealed, makes the epoch, waits, unlinks its files."""

    def mark(model: Model, own: dict[str, Any]) -> Any:
        log = model.log()
        if len(log) < PER_EPOCH:
            return None
        if sealed_below(log):
            return model, own, 2
        carried = {each.carries for each in log[:PER_EPOCH]}
        copies = carried & needed(log) if guards.sealer_copies_what_is_needed else set()
        if not guards.epoch_is_made_after_the_seal:
            model = replace(model, epochs=((0, tuple(log[:PER_EPOCH])),))
        return model, {"seq": len(log), "copies": tuple(sorted(copies))}, 1

    def publish(model: Model, own: dict[str, Any]) -> Any:
        after = model.link(own["seq"], Entry("seal", epoch=0, copies=own["copies"]))
        if after is not None:
            return after, own, 2
        if guards.sealer_marks_again_when_the_number_is_lost:
            return model, own, 0
        log = model.log()
        return (model, {**own, "seq": len(log)}, 1) if not sealed_below(log) else (model, own, 2)

    def make(model: Model, own: dict[str, Any]) -> Any:
        if not model.epochs and {0, 1} <= dict(model.files).keys():
            model = replace(model, epochs=((0, tuple(entry for _, entry in model.files[:PER_EPOCH])),))
        return model, {"gate": len(model.log())}, 3

    def gate(model: Model, own: dict[str, Any]) -> Any:
        is_open = not guards.gate or all(seen >= own["gate"] for _, seen in model.leases)
        return (model, own, 4) if is_open else None

    def unlink(model: Model, own: dict[str, Any]) -> Any:
        left = tuple(each for each in model.files if each[0] not in (0, 1))
        return replace(model, files=left), own, 5 if guards.epoch_is_made_before_files_go else 2

    if not guards.epoch_is_made_before_files_go:

        def late(model: Model, own: dict[str, Any]) -> Any:
            return model, {**own, "log": tuple(model.log()[:PER_EPOCH]), "gate": len(model.log())}, 3

        def remember(model: Model, own: dict[str, Any]) -> Any:
            return replace(model, epochs=((0, own["log"]),)), own, END

        def drop(model: Model, own: dict[str, Any]) -> Any:
            return replace(model, files=tuple(each for each in model.files if each[0] not in (0, 1))), own, 5

        return [mark, publish, late, gate, drop, remember]
    return [mark, publish, make, gate, unlink]


def reader(guards: Safeguards) -> list[Step]:
    """Reads every entry in turn: its file, then its epoch; the first number that has neither is free."""

    def begin(model: Model, own: dict[str, Any]) -> Any:
        return model, {"log": (), "owed": len(model.log())}, 1

    def from_file(model: Model, own: dict[str, Any]) -> Any:
        return model, {**own, "file": dict(model.files).get(len(own["log"]))}, 2

    def from_epoch(model: Model, own: dict[str, Any]) -> Any:
        return model, {**own, "sealed": model.sealed(len(own["log"]))}, 3

    def take(model: Model, own: dict[str, Any]) -> Any:
        forms = (own["sealed"], own["file"]) if guards.epoch_wins_over_a_file else (own["file"], own["sealed"])
        found = forms[0] or forms[1]
        if found is None:
            return model, own, END
        return model, {"log": (*own["log"], found), "owed": own["owed"]}, 1

    def swapped(step: Step, following: int) -> Step:
        def act(model: Model, own: dict[str, Any]) -> Any:
            result = step(model, own)
            assert result is not None
            return (*result[:2], following)

        return act

    if guards.reader_looks_for_the_epoch_last:
        return [begin, from_file, from_epoch, take]
    return [begin, swapped(from_epoch, 2), swapped(from_file, 3), take]


def restorer(guards: Safeguards) -> list[Step]:
    """Takes a lease, looks up where y is, reads it there, lets go."""

    def lease(model: Model, own: dict[str, Any]) -> Any:
        return replace(model, leases=model.leases | {("restore", len(model.log()))}), own, 1

    def locate(model: Model, own: dict[str, Any]) -> Any:
        log = model.log()
        return model, {"where": "file" if sealed_below(log) <= 1 else "pack"}, 2

    def read(model: Model, own: dict[str, Any]) -> Any:
        is_there = own["where"] == "pack" or dict(model.files).get(1) == NEW
        return model, {**own, "lost": not is_there}, 3

    def let_go(model: Model, own: dict[str, Any]) -> Any:
        return replace(model, leases=frozenset()), own, END

    return [lease, locate, read, let_go]


Actors = dict[str, list[Step]]


def make_actors(guards: Safeguards, *names: str) -> Actors:
    kinds: dict[str, Callable[[], list[Step]]] = {
        "commit": lambda: writer(guards, "one"),
        "another": lambda: writer(guards, "two"),
        "seal": lambda: sealer(guards, "one"),
        "reseal": lambda: sealer(guards, "two"),
        "read": lambda: reader(guards),
        "restore": lambda: restorer(guards),
    }
    return {name: kinds[name]() for name in names}


def losses_of(model: Model, states: tuple[Any, ...]) -> Iterator[str]:
    log = model.log()
    for seq, entry in model.acknowledged:
        if seq >= len(log) or log[seq] != entry:
            yield f"{entry} was acknowledged as {seq}, the log is {log}"
    names = [each.name for each in log if each.needs]
    if len(set(names)) < len(names):
        yield f"one commit is in the log twice: {log}"
    if needed(log) - objects(model):
        yield f"{needed(log) - objects(model)} is nowhere: {log}"
    for name, step, memory in states:
        own = dict(memory)
        if own.get("lost"):
            yield f"{name} did not find y"
        if name == "read" and step == END and not own["owed"] <= len(own["log"]):
            yield f"the reader saw {own['log']} of {log}"
        if name == "read" and own and list(own["log"]) != log[: len(own["log"])]:
            yield f"the reader saw {own['log']}, the log is {log}"


WHOLE, YOUNG = Model(), Model(files=((0, OLD),))  # of the young one, entry 1 is yet to be written
CASTS = [
    (WHOLE, ("commit", "seal")),
    (WHOLE, ("restore", "seal")),
    (WHOLE, ("read", "seal", "reseal")),
    (WHOLE, ("commit", "seal", "reseal")),
    (YOUNG, ("commit", "another", "seal")),
    (YOUNG, ("commit", "another", "seal", "read")),
]


@pytest.mark.parametrize(("start", "names"), CASTS, ids=lambda value: " ".join(value) if type(value) is tuple else "")
def test_no_interleaving_with_a_sealer_loses_anything(start: Model, names: tuple[str, ...]) -> None:
    assert next(losses(make_actors(Safeguards(), *names), start, losses_of), None) is None


@pytest.mark.full
@pytest.mark.parametrize("name", Safeguards.__dataclass_fields__)
def test_each_safeguard_of_sealing_is_needed(name: str) -> None:
    weaker = replace(Safeguards(), **{name: False})
    assert any(next(losses(make_actors(weaker, *names), start, losses_of), None) is not None for start, names in CASTS)
