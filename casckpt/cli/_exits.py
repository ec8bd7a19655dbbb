"""Exit codes: what a script may rely on. One code per thing that a caller does about it."""

from __future__ import annotations

from casckpt.errors import (
    AlreadyExistsError,
    BusyError,
    CasckptError,
    ConflictError,
    CorruptionError,
    FencedError,
    IncompleteError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StorageError,
    UnsupportedFormatError,
)

FINE = 0
NO = 1  # the answer is no: they differ, damage was found, there are pickles, something is wrong
USAGE = 2  # click's own code, and arguments that a store refuses
NOT_FOUND = 3
CORRUPTION = 4
BUSY = 5
STORAGE = 6
INCOMPLETE = 7
UNSUPPORTED = 8
EXISTS = 9
DEFECT = 70  # EX_SOFTWARE of sysexits.h: an error that nobody foresaw
INTERRUPTED = 130  # 128 + SIGINT
PIPE_CLOSED = 141  # 128 + SIGPIPE, as for programs that the signal ends

_BY_ERROR: tuple[tuple[type[CasckptError], int], ...] = (  # the first that fits
    (NotFoundError, NOT_FOUND),
    (CorruptionError, CORRUPTION),
    (BusyError, BUSY),
    (ConflictError, BUSY),
    (FencedError, BUSY),
    (StorageError, STORAGE),
    (IncompleteError, INCOMPLETE),
    (UnsupportedFormatError, UNSUPPORTED),
    (AlreadyExistsError, EXISTS),
    (InvalidInputError, USAGE),
    (ReadOnlyError, USAGE),
)


def code_of(error: CasckptError) -> int:
    """The exit code for an error of the library. A stored object that is nowhere is damage, not a wrong name."""
    if isinstance(error, NotFoundError) and "object_id" in error.facts:
        return CORRUPTION
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), DEFECT)
