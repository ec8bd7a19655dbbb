"""A process that has imported what its children run, and forks one for each request; `killing` starts and asks it.

python -m casckpt.testing.forker MODULE:FUNCTION

A request is a line of JSON on stdin, its answer a number on stdout. A list of strings forks a child that will call the
function with them, and is answered by the child's process id once the child stands still (SIGSTOP): whoever traces it
attaches then and lets it go on (SIGCONT). A process id waits for that child to end, and is answered by its exit code,
negative for a signal. What a child prints goes to stderr.

Imports are most of what a short process does, above all under strace. A child that comes to its end tells which modules
it had then, and those after it find them imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys

_PR_SET_PTRACER = 0x59616D61  # prctl(2)
_ANYBODY = ctypes.c_ulong(-1)


def main(target: str) -> None:
    """Answer requests until there are no more; returns in children too, which end as any interpreter does."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    told: dict[int, socket.socket] = {}  # by process id
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            with told.pop(request) as channel, channel.makefile("rb") as modules:
                _import(modules.read())
            answer = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
        else:
            ours, theirs = socket.socketpair()  # not a pipe: a write would be one of the calls that are counted
            answer = os.fork()
            if answer == 0:
                for each in (ours, *told.values()):
                    each.close()
                _stand_still()
                function(*request)
                theirs.sendall(json.dumps(sorted(sys.modules)).encode())
                return
            theirs.close()
            told[answer] = ours
            os.waitpid(answer, os.WUNTRACED)
        print(answer, flush=True)


def _import(names: bytes) -> None:
    """What a child had imported; one that was killed says nothing."""
    for name in json.loads(names or b"[]"):
        with contextlib.suppress(ImportError):  # not all that is there has a file
            importlib.import_module(name)


def _stand_still() -> None:
    """Let go of the forker's pipes, and stop until somebody has attached."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    # Where Yama lets only ancestors trace (the default of several distributions); elsewhere there is no such option.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main(sys.argv[1])
