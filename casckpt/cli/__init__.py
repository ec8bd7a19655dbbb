"""The command line: `casckpt COMMAND STORE …`, one file per command or small family of commands.

Commands only read options, ask the store and print; nothing is computed here that a program could not get from the
library. Each is imported when it is called, so that `casckpt --help` starts fast; click and rich are imported in this
folder (and by the demo) and nowhere else. `docs/cli.md` is the reference, checked against the code by the tests.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the `casckpt` command."""
    try:
        from casckpt.cli._group import casckpt

        casckpt.main(prog_name="casckpt")
    except KeyboardInterrupt:  # before a command could take care of it
        sys.exit(130)
