"""The first step at which a check fails, found by trying few of them.

The check is the user's: a command that looks at one snapshot and ends with 0 (passes), 125 (this one cannot be judged)
or another code below 128 (fails); what ends by a signal, in a shell too, answered nothing. It is taken to fail at
every step after the first failure; what is found is a step that fails whose predecessor passes, and that much is true
whatever the steps in between would have said.

Snapshots that are mixed, thinned or not whole are never given to a check: it could not tell their fault from its own.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from casckpt.arguments import FUNCTION, TEXT, checked
from casckpt.errors import InvalidInputError, NotFoundError
from casckpt.ids import SnapshotId
from casckpt.store.lines import line_of
from casckpt.store.store import Store
from casckpt.store.values import Snapshot, Value
from casckpt.store.wholeness import WholenessCheck

PASSES, FAILS, UNKNOWN = "passes", "fails", "unknown"
_STANDARD_ERROR = 2  # standard output belongs to whoever asked for the answer
EXIT_UNKNOWN, _NO_ANSWER = 125, 128  # as for `git bisect run`, so that scripts written for that one work


@dataclass(frozen=True)
class Bisection(Value):
    """Where a check begins to fail.

    Attributes:
        last_good: the newest snapshot known to pass before `first_bad`; None when none does.
        first_bad: the oldest snapshot known to fail; None when none does.
        between: steps between the two that could not be judged: one of them may be the first.
        tried: (step, "passes", "fails" or "unknown") in the order of the trials.
    """

    last_good: Snapshot | None
    first_bad: Snapshot | None
    between: tuple[int, ...]
    tried: tuple[tuple[int, str], ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "last_good": self.last_good and self.last_good.to_dict(),
            "first_bad": self.first_bad and self.first_bad.to_dict(),
            "between": list(self.between),
            "tried": [list(each) for each in self.tried],
        }

    def __str__(self) -> str:
        if self.first_bad is None:
            return f"the check fails nowhere ({len(self.tried)} steps tried)"
        before = (
            "it is the first step: does the check itself run?"
            if self.last_good is None
            else f"step {self.last_good.step} passes"
        )
        doubt = f"; not judged in between: {', '.join(map(str, self.between))}" if self.between else ""
        return f"first failure {self.first_bad.step} ({before}; {len(self.tried)} steps tried){doubt}"


def search(count: int, judge: Callable[[int], str]) -> tuple[int | None, int | None]:
    """The last index that passes and the first that fails, of `count` in order; each None when there is none.

    Args:
        count: how many there are.
        judge: PASSES, FAILS or UNKNOWN for an index; asked about each once at most.

    Cost: about log2(count) calls, and one more for each UNKNOWN.
    """
    good, verdict = _first_known(range(count), judge)
    if verdict != PASSES:
        return None, good
    bad, verdict = _first_known(range(count - 1, -1, -1), judge)
    if verdict != FAILS:
        return bad, None
    assert good is not None
    assert bad is not None
    while bad - good > 1:
        middle = (good + bad) // 2
        nearest = sorted(range(good + 1, bad), key=lambda index: abs(index - middle))
        found, verdict = _first_known(nearest, judge)
        if found is None:
            break
        good, bad = (found, bad) if verdict == PASSES else (good, found)
    return good, bad


def _first_known(indices: Sequence[int], judge: Callable[[int], str]) -> tuple[int | None, str]:
    for index in indices:
        verdict = judge(index)
        if verdict != UNKNOWN:
            return index, verdict
    return None, UNKNOWN


@checked(store=Store, check=FUNCTION)
def bisect_check(store: Store, check: Callable[[Snapshot], str], *, good: Any = None, bad: Any = "latest") -> Bisection:
    """Find the first step of a line at which a check fails.

    Args:
        store: an open store.
        check: PASSES, FAILS or UNKNOWN for a snapshot; see `command_check`.
        good: where to begin; None for the first step of the line.
        bad: the snapshot at which the line ends. Both are references or snapshots of any run.

    Cost: one index row per step of the line; a look at the files of the steps that are tried, and the check itself.

    Raises:
        NotFoundError: nothing on the line can be checked, or a reference means nothing.
        InvalidInputError: `good` is no step of the line before `bad`.
    """
    end = store.snapshot(bad)
    line = [each for each in line_of(store, end).values() if not _is_partial(store, each)]
    if good is not None:
        start = SnapshotId(bytes.fromhex(store.snapshot(good).id))
        if start not in line:
            raise InvalidInputError(
                f"{good!s:.100} is no consistent step of the line that ends in {end}.", ref=str(good)
            )
        line = line[line.index(start) :]
    if not line:
        raise NotFoundError(f"the line of {end} has no consistent snapshot to check. Run `casckpt log`.")
    catalog = store._catalog
    whole = WholenessCheck(store._timeline, store._keeper, catalog)
    verdicts: dict[int, str] = {}

    def judge(index: int) -> str:
        if index not in verdicts:
            is_whole = whole.snapshot_flaw(line[index]) is None
            verdicts[index] = check(catalog.info(line[index])) if is_whole else UNKNOWN
        return verdicts[index]

    last_good, first_bad = search(len(line), judge)
    between = range(0 if last_good is None else last_good + 1, first_bad or 0)
    return Bisection(
        None if last_good is None else catalog.info(line[last_good]),
        None if first_bad is None else catalog.info(line[first_bad]),
        tuple(catalog.row(line[index]).step for index in between),
        tuple((catalog.row(line[index]).step, verdict) for index, verdict in verdicts.items()),
    )


def _is_partial(store: Store, snapshot_id: SnapshotId) -> bool:
    row = store._catalog.row(snapshot_id)
    return row.is_mixed or row.is_thinned


@checked(command=TEXT, store_path=TEXT)
def command_check(command: str, store_path: str) -> Callable[[Snapshot], str]:
    """A check that runs a command once per snapshot, without a shell; all it prints goes to standard error.

    It finds CASCKPT_STORE, CASCKPT_RUN, CASCKPT_STEP and CASCKPT_REF (the snapshot's id) in its environment.

    Raises:
        InvalidInputError: the command cannot be split into words, or not be started.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidInputError(f"--check {command!r}: {error}", command=command) from error
    if not words:
        raise InvalidInputError("--check: there is no command. Give one such as 'python check.py'.")

    def check(snapshot: Snapshot) -> str:
        facts = {"STORE": store_path, "RUN": snapshot.run, "STEP": str(snapshot.step), "REF": snapshot.id}
        environment = {**os.environ, **{f"CASCKPT_{name}": value for name, value in facts.items()}}
        try:
            code = subprocess.run(words, env=environment, stdout=_STANDARD_ERROR, check=False).returncode
        except OSError as error:
            message = f"--check {command!r}: cannot be started: {error.strerror}. Check its first word."
            raise InvalidInputError(message, command=command) from error
        if not 0 <= code < _NO_ANSWER:
            how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
            raise InvalidInputError(
                f"--check {command!r}: {how} at step {snapshot.step}, which is no answer. Run it by hand with "
                f"CASCKPT_REF={snapshot.id[:12]}.",
                command=command,
                step=snapshot.step,
            )
        return PASSES if code == 0 else UNKNOWN if code == EXIT_UNKNOWN else FAILS

    return check
