"""Where the index of a store lies: beside it, or in the local cache folder when the store is on a network file system.

LMDB maps its file and relies on the coherence and the locks of one machine's kernel; on NFS, SMB or FUSE it loses data
in silence. Only Linux tells the kind of a mount cheaply; elsewhere a store counts as local.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping

from casckpt.ids import StoreId

INDEX_NAME = "index"
_NETWORK_KINDS = frozenset(
    {"nfs", "nfs3", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "pvfs2"}
    | {"orangefs", "panfs", "9p", "virtiofs", "ocfs2", "gfs2"}
)
_MOUNTS = "/proc/self/mountinfo"


def index_root(
    store_path: str,
    store_id: StoreId,
    *,
    is_network: Callable[[str], bool],
    environ: Mapping[str, str],
) -> str | None:
    """The folder that holds the index's generations, or None when no local file system is known."""
    if not is_network(store_path):
        return os.path.join(os.path.abspath(store_path), INDEX_NAME)  # whatever the working directory becomes
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if is_network(cache):
        return None
    path_hash = hashlib.sha256(os.fsencode(os.path.realpath(store_path))).hexdigest()[:16]
    return os.path.join(cache, "casckpt", f"{store_id.hex()}-{path_hash}")


def is_network_path(path: str) -> bool:
    """Whether `path` (or its nearest existing parent) lies on a network or FUSE file system; about 0.1 ms."""
    kind = _mount_kind(os.path.realpath(path))
    return kind in _NETWORK_KINDS or (kind.startswith("fuse") and kind != "fuseblk")


def _mount_kind(real_path: str) -> str:
    """File system type of the longest mount point that holds `real_path`; of equals, the last one mounted."""
    try:
        with open(_MOUNTS, "rb") as mounts:
            lines = mounts.read().decode(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    longest, kind = "", ""
    for line in lines:
        fields, _, after = line.partition(" - ")
        mount_point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4])
        is_inside = mount_point == "/" or real_path == mount_point or real_path.startswith(mount_point + "/")
        if is_inside and len(mount_point) >= len(longest):
            longest, kind = mount_point, after.partition(" ")[0]
    return kind
