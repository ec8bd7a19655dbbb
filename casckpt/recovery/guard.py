"""A command does not outlive its supervisor for long: a process beside the two ends it when the supervisor is gone.

Who is killed by SIGKILL ends nobody. So a supervisor keeps a small process of the standard library alone, in a session
of its own, and tells it over a pipe which child runs. The pipe ends with the supervisor, however that ends; then the
child gets SIGTERM, its deadline to save, and its whole process group SIGKILL.

Run as a file, so it must not import anything of casckpt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

_POLL_S = 0.1


class Guard:
    """The supervisor's side; a context manager.

    Args:
        deadline_s: what a child gets between SIGTERM and SIGKILL.
    """

    def __init__(self, deadline_s: float) -> None:
        words = [sys.executable, "-I", "-S", __file__, str(deadline_s)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True
        )

    def watch(self, pid: int) -> None:
        """This child runs now; 0 when none does. A guard that somebody killed is not missed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"%d\n" % pid)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *error: object) -> None:
        self.watch(0)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Wait until the supervisor is gone, then end what it left."""
    pid = 0
    for line in sys.stdin.buffer:
        if line.endswith(b"\n"):
            pid = int(line)
    if pid:
        _end(pid, float(sys.argv[1]))


def _end(pid: int, deadline_s: float) -> None:
    with contextlib.suppress(OSError):  # nobody may be listening any more
        print(
            f"casckpt: the supervisor of process {pid} is gone: it gets SIGTERM. Start the same command again: it goes "
            "on from the newest snapshot",
            file=sys.stderr,
            flush=True,
        )
    end_s = time.monotonic() + deadline_s
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended by itself, too
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < end_s:
            os.kill(pid, 0)
            time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
