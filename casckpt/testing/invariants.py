"""The invariants of a store as executable checks against an oracle.

`check_store` opens a store the way a user would and compares everything it says with what the test knows: trees per
key, compared without the store's code (`trees`), and the files read without the index (`anatomy`). It covers I1 and I2
(acknowledged snapshots are there bit-exactly, others whole or absent), I3 (a rebuilt index equals the old), I4
(what is restored is what was committed) and I8; I5 to I7 need a fault or a budget and are checked by the tests that
bring one.

Every violation is an `InvariantError`, an AssertionError that starts with the invariant's number.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from typing import Any

import casckpt
from casckpt.errors import NotFoundError
from casckpt.index.tables import decode_object, last_condemned
from casckpt.testing.anatomy import dissect
from casckpt.testing.trees import difference
from casckpt.testing.workload import RUNS, Key, Rehearsal, tree


class InvariantError(AssertionError):
    """A store broke a promise."""


def check_store(path: str, oracle: Rehearsal) -> None:
    """Check an undamaged store after a crash, read-only first, then for writing, then without its index.

    Args:
        path: the store's folder; it need not exist when nothing was acknowledged.
        oracle: what the store owes.

    Raises:
        InvariantError: naming the invariant.
    """
    acknowledged, possible = oracle.acknowledged, oracle.possible
    _make_if_nothing_is_owed(path, oracle)
    _check_read_only(path, acknowledged, possible)
    with casckpt.open(path) as store:
        check_snapshots(store, acknowledged, possible)
        report = store.verify(read_data=True)
        _demand(report.ok, "I2", f"verify of an undamaged store: {report}")
        before = index_counts(store)
    shutil.rmtree(os.path.join(path, "index"), ignore_errors=True)
    with casckpt.open(path, run=_first_run(oracle)) as store:
        check_snapshots(store, acknowledged, possible)
        check_depths(store)
        _check_index(path, before, index_counts(store))
        _check_acts(path, oracle, store)


def check_promises(path: str, oracle: Rehearsal) -> None:
    """The cheap part of `check_store`: what was acknowledged is there and exact, by the index as it is.

    Raises:
        InvariantError: I1 or I2.
    """
    _make_if_nothing_is_owed(path, oracle)
    with casckpt.open(path, run=_first_run(oracle)) as store:
        check_snapshots(store, oracle.acknowledged, oracle.possible)
        _check_acts(path, oracle, store)


def _first_run(oracle: Rehearsal) -> str:
    return oracle.done[0].run if oracle.done else RUNS[0]


def _check_acts(path: str, oracle: Rehearsal, store: Any) -> None:
    """By the store that is open already, and for other runs than its own by another."""
    with contextlib.ExitStack() as stack:
        stores = {store.run: store}
        for act in oracle.done:
            if act.run not in stores:
                stores[act.run] = stack.enter_context(casckpt.open(path, run=act.run))
            _demand(act.holds(stores[act.run]), "I1", f"{act.name} was acknowledged and cannot be seen")


def check_usable(path: str, run: str = "main") -> None:
    """New commits on top of whatever is there work and restore. Changes the store.

    Raises:
        InvariantError: I2 or I8.
    """
    with casckpt.open(path, run=run) as store:
        last = 0
        if store.steps():
            store.resume("latest")
            last = store.snapshot("latest").step
        for step in (last + 1, last + 2):
            snapshot = store.commit(step, tree(run, step))
            problem = difference(tree(run, step), store.restore(snapshot.id))
            _demand(problem is None, "I2", f"a commit after the fault is wrong: {problem}")
        check_depths(store)


def check_depths(store: Any) -> None:
    """Depth falls from every record that a restore prefers to each of its bases, and none of these is only inline.

    Raises:
        InvariantError: I8.
    """
    with store._keeper.kv.read() as txn:
        rows = {key: decode_object(row) for key, row in txn.scan("objects")}
        is_collected = last_condemned(txn) >= 0
    places = {key: found for key, (_, found) in rows.items()}
    for object_id, (count, found) in rows.items():
        if is_collected and not count:
            continue  # nobody needs it, so its bases may be gone
        for base in found[0].bases if found else ():
            below = places.get(base)
            what = f"object {object_id.hex()[:12]} of depth {found[0].depth} is decoded from {base.hex()[:12]}"
            if not below:
                raise InvariantError(f"I8: {what}, which is nowhere")
            _demand(below[0].depth < found[0].depth, "I8", f"{what} of depth {below[0].depth}")
            _demand(any(not place.is_inline for place in below), "I8", f"{what}, which is in no pack")


def check_snapshots(store: Any, acknowledged: Mapping[Key, Any], possible: Mapping[Key, Any]) -> None:
    """Every snapshot that an open store lists is a possible one and restores exactly; no acknowledged one is missing.

    Raises:
        InvariantError: I1 or I2.
    """
    found = set()
    for snapshot in store.timeline(all_runs=True):
        key = (snapshot.run, snapshot.step)
        found.add(key)
        _demand(key in possible, "I2", f"snapshot {key} was never begun")
        try:
            tree = store.restore(snapshot.id)
        except casckpt.CasckptError as error:
            raise InvariantError(f"I2: snapshot {key} is neither whole nor absent: {error!r}") from error
        problem = difference(possible[key], tree)
        _demand(problem is None, "I1", f"snapshot {key} is not what was committed: {problem}")
    missing = set(acknowledged) - found
    _demand(not missing, "I1", f"acknowledged snapshots are gone: {sorted(missing)}")


def index_counts(store: Any) -> dict[bytes, int]:
    """Objects with a positive count in a store's index."""
    with store._keeper.kv.read() as txn:
        counts = {key: decode_object(row)[0] for key, row in txn.scan("objects")}
    return {object_id: count for object_id, count in counts.items() if count}


def _check_index(path: str, before: dict[bytes, int], rebuilt: dict[bytes, int]) -> None:
    _demand(before == rebuilt, "I3", f"{_first_difference(before, rebuilt)} (before and after a rebuild)")
    anatomy = dissect(path)
    expected = {bytes(object_id): count for object_id, count in anatomy.counts().items()}
    _demand(expected == rebuilt, "I3", f"{_first_difference(expected, rebuilt)} (by the files, by the index)")
    dangling = anatomy.undecodable() & (anatomy.counts().keys() if anatomy.is_collected else anatomy.bases.keys())
    _demand(not dangling, "I8", f"{len(dangling)} objects have no decodable record")


def _first_difference(left: dict[bytes, int], right: dict[bytes, int]) -> str:
    differing = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
    if not differing:
        return "no difference"
    key = differing[0]
    return f"{len(differing)} counts differ; {key.hex()[:12]}: {left.get(key)} and {right.get(key)}"


def _check_read_only(path: str, acknowledged: Mapping[Key, Any], possible: Mapping[Key, Any]) -> None:
    before = listing(path)
    with casckpt.open(path, read_only=True) as store:
        check_snapshots(store, acknowledged, possible)
    _demand(listing(path) == before, "I2", "a read-only open changed files")


def listing(path: str) -> dict[str, tuple[int, int]]:
    """Size and modification time of every file of a store but those of its index."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            full = os.path.join(folder, name)
            relative = os.path.relpath(full, path)
            if not relative.startswith("index"):
                status = os.stat(full)
                found[relative] = (status.st_size, status.st_mtime_ns)
    return found


def _make_if_nothing_is_owed(path: str, oracle: Rehearsal) -> None:
    """A crash before the first acknowledgement may leave no store: then it must be possible to make one there."""
    if oracle.acknowledged:
        return
    try:
        casckpt.open(path, read_only=True).close()
    except NotFoundError:
        casckpt.open(path, create=True).close()


def _demand(is_kept: bool, invariant: str, text: str) -> None:
    if not is_kept:
        raise InvariantError(f"{invariant}: {text}")
