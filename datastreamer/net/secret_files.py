"""Files with secrets - tokens, private keys - and the check that other users cannot read them.

The rule is PostgreSQL's: a file of root may be readable by its group, any other file by its owner
alone. Where a mount decides the permissions (Docker's and Kubernetes' secrets are often readable
by everybody), the operator allows it with an environment variable, which the processes that are
started from here inherit.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from datastreamer.errors import UsageError

ALLOW: Final = "DATASTREAMER_ALLOW_READABLE_SECRETS"
"""The environment variable that, set to 1, allows secrets that other users can read."""


def read_secret(path: str | os.PathLike[str], size: int = -1) -> bytes:
    """The content of the file, `size` bytes of it at most.

    Raises `OSError`, and `UsageError` if other users can read or write the file. What is not a
    regular file - a pipe - is read as it is.
    """
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        exposed = stat.S_IMODE(found.st_mode) & 0o077
        if found.st_uid == 0:
            exposed &= ~0o040
        if exposed and stat.S_ISREG(found.st_mode) and os.environ.get(ALLOW) != "1":
            name = os.fspath(path)
            raise UsageError(
                f"{name}: holds a secret, and its mode {stat.S_IMODE(found.st_mode):04o} lets "
                f"other users read or change it: run `chmod 600 {name}`, or allow it with "
                f"--allow-readable-secrets or {ALLOW}=1"
            )
        return file.read(size)
