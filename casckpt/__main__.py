"""`python -m casckpt`: the `casckpt` command where its script is not on the path."""

from __future__ import annotations

from casckpt.cli import main

if __name__ == "__main__":
    main()
