"""Authenticate: a client's first request, which carries its token.

Owns the layout of the request, and how the client reads the answer, a Result. ``docs/SERVING.md``
is the contract.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from datastreamer.errors import UsageError, refusal
from datastreamer.format import COMMAND_AUTHENTICATE, RESULT_INVALID_COMMAND
from datastreamer.protocol.publish.messages import MOST_TOKEN, AnswerParser, Done, Refusal

_HEAD: Final = struct.Struct(">QQI")
_LENGTH: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Authenticate:
    """Authenticate with a token of 1 to 1,024 bytes."""

    token: bytes

    def __repr__(self) -> str:  # the token is secret
        return "<Authenticate>"


def encode_authenticate(stream_type: int, token: bytes) -> bytes:
    """The request. Raises `UsageError` for a token that is empty or too long."""
    check_token(token)
    return _HEAD.pack(COMMAND_AUTHENTICATE, stream_type, len(token)) + token


def token_request(stream_type: int, token: bytes | str | None) -> bytes:
    """The request with `token`; empty without a token. Raises `UsageError`."""
    if token is None:
        return b""
    return encode_authenticate(stream_type, token.encode() if isinstance(token, str) else token)


def check_token(token: bytes) -> None:
    """Raise `UsageError` for a token that cannot be sent."""
    if not 1 <= len(token) <= MOST_TOKEN:
        raise UsageError(f"a token must have 1 to {MOST_TOKEN} bytes, not {len(token)}")


def decode_authenticate(buffer: bytes, at: int) -> tuple[Authenticate, int] | None:
    """The request whose parameters begin at `at`, and where they end; None until complete.

    Raises `ValueError` for an invalid length.
    """
    start = at + _LENGTH.size
    if len(buffer) < start:
        return None
    (length,) = _LENGTH.unpack_from(buffer, at)
    if not 1 <= length <= MOST_TOKEN:
        raise ValueError(f"a token of {length} bytes, not 1 to {MOST_TOKEN}")
    if len(buffer) < start + length:
        return None
    return Authenticate(buffer[start : start + length]), start + length


class Introduction:
    """Authenticates on a new connection: send `request`, and pass what arrives to `receive`."""

    def __init__(self, request: bytes, peer: str) -> None:
        self.request = request
        self._answers = AnswerParser(peer)

    def receive(self, data: bytes) -> bool | None:
        """Whether the server accepted the token; None until the answer is complete. False: the
        server does not know the request, and the connection cannot be used any more.

        Raises `NotAllowed` for a wrong token, and `ProtocolViolation`.
        """
        if not data:
            return False
        self._answers.receive(data)
        answer = self._answers.next_answer(Done)
        if isinstance(answer, Refusal):
            if answer.number == RESULT_INVALID_COMMAND:
                return False
            raise refusal(answer.number, answer.text, "to serve a client with this token")
        return None if answer is None else True
