"""Recognises network file systems, on which memory maps and locks are not safe.

Reads the mount table of Linux; on other systems every path counts as local.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from datastreamer.errors import StreamFileError

# File systems on which mapped pages and locks are not consistent between machines. Any FUSE file
# system may be one too.
_NETWORK = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs"),
    *("lustre", "ncp", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb2", "smb3"),
    *("smbfs", "virtiofs"),
}
# FUSE types (such as `fuse.sshfs`) that are always on a disk of this machine.
_LOCAL_FUSE = {"fuseblk", "fuse.ntfs-3g", "fuse.ext2", "fuse.exfat", "fuse.lxcfs"}
_MOUNTS = "/proc/self/mountinfo"

ALLOW: Final = "DATASTREAMER_ALLOW_NETWORK"
"""The environment variable that, set to 1, disables `ensure_local`."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A line of the mount table."""

    device: tuple[int, int]
    point: str
    type: str


def mounts_of(text: str) -> list[Mount]:
    """The lines of a `mountinfo`, in order; malformed ones are skipped."""
    found = []
    for line in text.splitlines():
        # "36 35 98:0 /root /point options [optional ...] - type source options"
        fields, _, rest = line.partition(" - ")
        before, after = fields.split(), rest.split()
        if len(before) < 6 or not after:
            continue
        major, _, minor = before[2].partition(":")
        if not (major.isdigit() and minor.isdigit()):
            continue
        point = _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), before[4])
        found.append(Mount((int(major), int(minor)), point, after[0]))
    return found


def type_of(path: str, mounts: list[Mount], device: tuple[int, int] | None = None) -> str | None:
    """The type of the file system that holds the absolute `path`; None if no mount does.

    `device` is the path's device: a mount of that device is preferred to one whose mount point is
    above the path, and a later mount to an earlier one.
    """
    best: tuple[bool, int] | None = None
    found = None
    for mount in mounts:
        point = mount.point.rstrip("/")
        if path != point and not path.startswith(point + "/"):
            continue
        rank = (mount.device == device, len(point))
        if best is None or rank >= best:
            best, found = rank, mount.type
    return found


def is_network(kind: str) -> bool:
    """Whether a file system of this type is, or may be, another machine's."""
    return kind in _NETWORK or (kind.startswith("fuse") and kind not in _LOCAL_FUSE)


def on_network(path: str | os.PathLike[str]) -> str | None:
    """The type of the network file system that `path` is on ("nfs4"); None if it is local or the
    type is unknown. For a path that does not exist yet, that of its folder."""
    place = os.path.realpath(path)
    device = None
    while True:
        try:
            number = os.stat(place).st_dev
        except OSError:
            above = os.path.dirname(place)
            if above == place:
                break
            place = above
        else:
            device = os.major(number), os.minor(number)
            break
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as source:
            mounts = mounts_of(source.read())
    except OSError:
        return None
    kind = type_of(place, mounts, device)
    return kind if kind is not None and is_network(kind) else None


def ensure_local(path: str | os.PathLike[str], doing: str) -> None:
    """Raise `StreamFileError` if `path` is on a network file system, not safe for `doing`."""
    if os.environ.get(ALLOW) == "1":
        return
    kind = on_network(path)
    if kind is not None:
        raise StreamFileError(
            path,
            f"is on a network file system ({kind}), where {doing} is not safe: what another "
            f"machine writes becomes visible late and in parts; work on the machine that has "
            f"the disk, or set {ALLOW}=1",
        )
