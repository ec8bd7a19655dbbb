"""Facts about the machine that a figure needs beside it to mean anything: cores, memory, file system, releases."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

PACKAGES = ("casckpt", "torch", "numpy", "blake3", "lmdb", "zstandard", "msgspec")


def facts(folder: str) -> dict[str, str]:
    """What to print above the table; `folder` is where the benchmarks write."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    found = {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "file system": f"{file_system(folder)} at {folder}",
        "load before": load,
        "python": platform.python_version(),
    }
    return found | {name: version(name) for name in PACKAGES}


def file_system(folder: str) -> str:
    """Type of the file system that holds `folder`: ext4, xfs, tmpfs, …"""
    path = os.path.realpath(folder)
    best, kind = "", "unknown"
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            point, found = line.split()[1:3]
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, found
    return kind


def _field(path: str, name: str) -> str:
    with open(path) as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
