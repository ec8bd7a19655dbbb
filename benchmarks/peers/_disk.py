"""What is asked of the disk: durable files and folders, sizes, and programs run as a user would run them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO


@contextmanager
def durable_file(path: str) -> Iterator[IO[bytes]]:
    """A new file that appears under its name complete and durable: fsync, rename, fsync of the folder."""
    unfinished = path + ".tmp"
    with open(unfinished, "wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
    publish(unfinished, path)


def publish(unfinished: str, path: str) -> None:
    """Rename a durable file to its name, and make the name durable."""
    os.rename(unfinished, path)
    fsync(os.path.dirname(path))


def fsync(path: str) -> None:
    """fsync one file or folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_below(folder: str) -> None:
    """fsync every file and folder in `folder`, and its name in the folder around it."""
    for path, _, names in os.walk(folder):
        for name in names:
            fsync(os.path.join(path, name))
        fsync(path)
    fsync(os.path.dirname(folder))


def sync_file_system(folder: str) -> None:
    """Write back all of the file system that holds `folder`.

    For many small files this takes a tenth of the time of an fsync each, as long as nobody else writes meanwhile.
    """
    subprocess.run(["sync", "--file-system", folder], check=True)


def size_below(folder: str, *, skipping: tuple[str, ...] = ()) -> int:
    """Apparent bytes of all files below `folder`, without files and folders named in `skipping`."""
    total = 0
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipping]
        total += sum(os.path.getsize(os.path.join(path, name)) for name in names if name not in skipping)
    return total


def run_program(
    command: list[str], *, folder: str | None = None, environment: Mapping[str, str] | None = None
) -> bytes:
    """Run a program to its end and give back what it printed.

    Raises:
        RuntimeError: It failed; the message has the end of what it complained about.
    """
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        complaint = done.stderr.decode(errors="replace")[-500:].strip()
        raise RuntimeError(f"{command[0]} {command[1]} ended with status {done.returncode}: {complaint}")
    return done.stdout
