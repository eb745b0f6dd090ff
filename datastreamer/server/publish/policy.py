"""The operator's terms for a source elsewhere: who may be one, and within which limits.

Knows neither trio nor connections.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
from dataclasses import dataclass
from typing import Final

from datastreamer.errors import UsageError
from datastreamer.format import U32_MAX
from datastreamer.protocol.publishing import MOST_TOKEN
from datastreamer.transport.secret_files import read_secret

_MOST_TOKEN_FILE: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Publishing:
    """On which terms a server takes operations from a source elsewhere. Times are in seconds.

    A source shows a token that is a line of `token_file`, which is read at each try, or a
    certificate for one of `client_certs`; both, where both are given. Raises `UsageError` where
    neither is, or a number makes no sense.
    """

    token_file: str | os.PathLike[str] | None = None
    client_certs: tuple[str, ...] = ()
    lease: float = 30.0
    """A source that says nothing for so long has lost its lease."""
    operation_timeout: float = 60.0
    """So long an operation may be open."""
    max_operation_bytes: int = 1 << 30
    max_underway: int = 4096
    """Operations of which it is not known yet whether they are on disk."""
    max_operations_per_second: float | None = None
    """A source that is faster waits. None: no limit."""

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
    """Raises `UsageError` where there is to be a file of client tokens and it has none."""
    if path is not None:
        read_tokens(path)


def is_token(shown: bytes, tokens: list[bytes]) -> bool:
    """Whether `shown` is one of `tokens`. Takes as long for any token of a length."""
    digest, matched = hashlib.sha256(shown).digest(), False
    for token in tokens:
        matched |= hmac.compare_digest(digest, hashlib.sha256(token).digest())
    return matched


def read_tokens(path: str | os.PathLike[str]) -> list[bytes]:
    """The tokens in a file, one a line; at least one. Raises `UsageError`, also if other users
    own or can read the file."""
    shown = os.fspath(path)
    try:
        content = read_secret(path, _MOST_TOKEN_FILE + 1)
    except OSError as error:
        raise UsageError(f"{shown}: cannot be read: {error.strerror or error}") from None
    # The beginning of a token is none.
    if len(content) > _MOST_TOKEN_FILE:
        raise UsageError(f"{shown}: a file of tokens has at most {_MOST_TOKEN_FILE} bytes")
    lines = [line.strip() for line in content.splitlines()]
    found = [line for line in lines if line]
    if not found:
        raise UsageError(f"{shown}: no token is in this file; one stands on each line")
    if max(map(len, found)) > MOST_TOKEN:
        raise UsageError(f"{shown}: a token of more than {MOST_TOKEN} bytes")
    return found
