"""Files with secrets - tokens, private keys - and the check that other users cannot read them.

The rule is PostgreSQL's: the file belongs to this process's user or to root; a file of root may be
readable by its group, any other file by its owner alone. If a mount determines owner and mode
(Docker's and Kubernetes' secrets are often readable by all users), the operator allows it with an
environment variable, which child processes inherit.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from datastreamer.errors import UsageError

ALLOW: Final = "DATASTREAMER_ALLOW_READABLE_SECRETS"
"""The environment variable that, set to 1, allows secrets that other users own or can read."""


def read_secret(path: str | os.PathLike[str], size: int = -1) -> bytes:
    """The content of the file, at most `size` bytes.

    Raises `OSError`, and `UsageError` if another user owns, can read or can write the file. A pipe
    or device is read without a check.
    """
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and os.environ.get(ALLOW) != "1":
            _check(os.fspath(path), found)
        return file.read(size)


def readable_again(path: str) -> str:
    """A path of the same content that can be read several times: of a pipe, as `<(...)` of a shell
    is one, that of a copy in memory, which this process keeps. Raises `UsageError` where the system
    has none."""
    try:
        piped = stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return path
    if not piped:
        return path
    if not hasattr(os, "memfd_create"):
        raise UsageError(f"{path}: is a pipe, which can be read once only; give a file")
    copy = os.memfd_create("datastreamer")
    os.fchmod(copy, 0o600)
    with open(path, "rb") as source, open(copy, "wb", closefd=False) as target:
        target.write(source.read())
    return f"/proc/{os.getpid()}/fd/{copy}"


def _check(name: str, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    exposed = mode & 0o077
    if found.st_uid == 0:
        exposed &= ~0o040
    if found.st_uid not in (os.geteuid(), 0):
        why = f"belongs to user {found.st_uid}, who is not the user of this process or root"
        way_out = f"run `chown {os.geteuid()} {name}`"
    elif exposed:
        why = f"its mode {mode:04o} lets other users read or change it"
        way_out = f"run `chmod 600 {name}`"
    else:
        return
    raise UsageError(
        f"{name}: holds a secret, and {why}: {way_out}, or allow it with "
        f"--allow-readable-secrets or {ALLOW}=1"
    )
