"""The operator's policy for publishers: credentials and limits.

Knows neither trio nor connections.
"""

from __future__ import annotations

import codecs
import hashlib
import hmac
import math
import os
from dataclasses import dataclass
from typing import Final

from datastreamer.errors import UsageError
from datastreamer.format import U32_MAX
from datastreamer.protocol.commands import MOST_TOKEN
from datastreamer.transport.secret_files import read_secret

_MOST_TOKEN_FILE: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Publishing:
    """Which publishers a server accepts, and its limits for them. Times are in seconds.

    A publisher presents a token that is a line of `token_file`, which is read at each attempt, or
    a certificate for one of `client_certs`; both, if both are set. Raises `UsageError` if neither
    is set, or a number is out of range.
    """

    token_file: str | os.PathLike[str] | None = None
    client_certs: tuple[str, ...] = ()
    lease: float = 30.0
    """A publisher that sends nothing for this long loses its lease."""
    operation_timeout: float = 60.0
    """Maximum time an operation may be open."""
    max_operation_bytes: int = 1 << 30
    max_underway: int = 4096
    """Maximum number of operations that are not known to be on disk."""
    max_operations_per_second: float | None = None
    """Operations executed per second; a faster publisher waits. None: no limit."""

    def __post_init__(self) -> None:
        if self.token_file is None and not self.client_certs:
            raise UsageError("publishing needs a token file or the names of client certificates")
        for name in ("lease", "operation_timeout", "max_operations_per_second"):
            value = getattr(self, name)
            if value is not None and not (0 < value < U32_MAX / 1000 and math.isfinite(value)):
                raise UsageError(f"{name} is a number above 0, not {value!r}")
        for name in ("max_operation_bytes", "max_underway"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= U32_MAX << 16:
                raise UsageError(f"{name} is a whole number from 1, not {value!r}")
        if self.max_underway > U32_MAX:
            raise UsageError(f"max_underway is at most {U32_MAX}, not {self.max_underway}")

    def tokens(self) -> list[bytes]:
        """The lines of the token file. Raises `UsageError`."""
        if self.token_file is None:
            return []
        return read_tokens(self.token_file)


def check_client_tokens(path: str | None) -> None:
    """Raises `UsageError` if `path` is a file without tokens."""
    if path is not None:
        read_tokens(path)


def is_token(shown: bytes, tokens: list[bytes]) -> bool:
    """Whether `shown` is one of `tokens`. Takes the same time for all tokens of one length."""
    digest, matched = hashlib.sha256(shown).digest(), False
    for token in tokens:
        matched |= hmac.compare_digest(digest, hashlib.sha256(token).digest())
    return matched


def read_tokens(path: str | os.PathLike[str]) -> list[bytes]:
    """The tokens in a file, one per line; at least one. Raises `UsageError`, also if another user
    owns or can read the file."""
    shown = os.fspath(path)
    try:
        content = read_secret(path, _MOST_TOKEN_FILE + 1)
    except OSError as error:
        raise UsageError(f"{shown}: cannot be read: {error.strerror or error}") from None
    # A token that is cut off is not a token.
    if len(content) > _MOST_TOKEN_FILE:
        raise UsageError(f"{shown}: the token file is larger than {_MOST_TOKEN_FILE} bytes")
    lines = [line.strip() for line in content.removeprefix(codecs.BOM_UTF8).splitlines()]
    found = [line for line in lines if line]
    if not found:
        raise UsageError(f"{shown}: the file has no token; write one on each line")
    if max(map(len, found)) > MOST_TOKEN:
        raise UsageError(f"{shown}: a token has more than {MOST_TOKEN} bytes")
    return found
