"""Every error that casckpt raises on purpose, cut by what a handler does about it.

Each error carries its facts as attributes (``error.path``, ``error.step``, …), survives pickling with them, and has a
message that says what failed, on what, what was expected and found, and the next step. Errors that standard code
would catch anyway also derive from the built-in class (`LookupError`, `ValueError`, `TypeError`, `OSError`).

This file imports nothing of casckpt.
"""

from __future__ import annotations

from typing import Any


def cut(text: str, length_max: int) -> str:
    """Text for people that is too long for its place: its beginning, up to the end of a word, and "…"."""
    if len(text) <= length_max:
        return text
    head = text[: length_max - 1]
    if not text[len(head)].isspace():
        head = head.rpartition(" ")[0] or head  # one word alone is cut anywhere
    return f"{head.rstrip()}…"


def _rebuild(cls: type[CasckptError], message: str, facts: dict[str, Any]) -> CasckptError:
    return cls(message, **facts)


class CasckptError(Exception):
    """Base of all casckpt errors. Facts given as keywords become attributes."""

    kind = "error"

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.message, self.facts)


class NotFoundError(CasckptError, LookupError):
    """A store, run, branch, tag, step, snapshot, component or leaf is not there."""

    kind = "not-found"


class AlreadyExistsError(CasckptError):
    """A name is taken: a tag, a branch, a store, an export folder."""

    kind = "already-exists"


class StepOrderError(CasckptError):
    """A commit's step does not come after its parent's step."""

    kind = "step-order"


class ConflictError(CasckptError):
    """Another writer moved this branch's head; names who (host, pid, step)."""

    kind = "conflict"


class FencedError(CasckptError):
    """A newer generation of this run exists; this writer must stop."""

    kind = "fenced"


class BusyError(CasckptError):
    """A lock was not obtained in time; `holder` says who has it. Nothing was changed."""

    kind = "busy"


class ReadOnlyError(CasckptError):
    """A write was asked of a store opened read-only."""

    kind = "read-only"


class InvalidInputError(CasckptError, ValueError):
    """An argument is wrong; nothing was changed."""

    kind = "invalid-input"


class UnsupportedStateError(InvalidInputError, TypeError):
    """A leaf of the state cannot be represented without pickle; `path` names it."""

    kind = "unsupported-state"


class MismatchError(InvalidInputError):
    """Stored state and live targets differ in names, shapes or dtypes; nothing was touched."""

    kind = "mismatch"


class ConcurrentMutationError(CasckptError):
    """A tensor changed while the commit was reading it; nothing was committed."""

    kind = "concurrent-mutation"


class CorruptionError(CasckptError):
    """Stored bytes are not what their address or checksum says."""

    kind = "corruption"


class IncompleteError(CasckptError):
    """A snapshot's packs are not all here, as in a copy under way, or a restore stopped half way."""

    kind = "incomplete"


class UnsupportedFormatError(CasckptError):
    """The store needs a feature or version that this release does not know; names it."""

    kind = "unsupported-format"


class StorageError(CasckptError, OSError):
    """The file system refused an operation; `errno` and `path` are kept."""

    kind = "storage"


class OutOfSpaceError(StorageError):
    """The disk or quota is full; `needed_bytes` says how much the commit still had to write."""

    kind = "out-of-space"


class SaveFailedError(CasckptError):
    """A background save failed; `__cause__` is the reason. Raised at result(), the next call, and close()."""

    kind = "save-failed"


class ConfigDriftWarning(UserWarning):
    """The config given now differs from the one stored with the parent snapshot."""


class StoreWarning(UserWarning):
    """Something is wrong that did not stop the operation: a stale index, damage found, a lost folder sync."""
