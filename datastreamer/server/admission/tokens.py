"""Checks of the tokens that clients present: throttled, counted and logged.

Owns the client tokens of a server and how long the answer to a wrong one takes. `gate.py` decides
what a proof is good for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

import trio

from datastreamer.errors import UsageError
from datastreamer.server.admission.token_throttle import TokenThrottle
from datastreamer.server.publish.policy import is_token, read_tokens
from datastreamer.transport.refusal_log import RefusalLog

_log = logging.getLogger(__name__)

_NOT_ALLOWED_SECONDS: Final = 0.5
"""The answer to a wrong token takes at least this long."""


class TokenExaminer:
    """Checks what clients present. If `token_file` cannot be read, no token is accepted."""

    def __init__(
        self, token_file: str | None, not_allowed: Counter[str], refusals: RefusalLog
    ) -> None:
        """`not_allowed` counts what was rejected, by command."""
        self._token_file = token_file
        self._not_allowed = not_allowed
        self._refusals = refusals
        self._guesses = TokenThrottle()

    @property
    def takes_tokens(self) -> bool:
        """Whether clients may present a token."""
        return self._token_file is not None

    def knows(self, token: bytes) -> bool:
        """Whether `token` is a client token. The file is read each time, so that it may change."""
        assert self._token_file is not None
        try:
            return is_token(token, read_tokens(self._token_file))
        except UsageError as error:
            _log.error("client tokens cannot be checked, none is accepted: %s", error)
            return False

    async def examine(
        self, command: str, host: str | None, peer: str, check: Callable[[], bool]
    ) -> bool | None:
        """The result of `check()`, called when the throttle of `host` allows it; None: too many
        clients of `host` wait already. `host` None: a connection without an address, which is
        not throttled."""
        now = trio.current_time()
        if host is not None:
            wait = self._guesses.wait(host, now)
            if wait is None:
                self._note(command, peer, "closed: too many wrong tokens from its address", now)
                return None
            if wait:
                await trio.sleep(wait)
                now = trio.current_time()
        if check():
            if host is not None:
                self._guesses.succeeded(host, now)
            return True
        self._note(command, peer, "not allowed: its token or certificate is not accepted", now)
        await trio.sleep(_NOT_ALLOWED_SECONDS)
        return False

    def _note(self, command: str, peer: str, words: str, now: float) -> None:
        self._not_allowed[command] += 1
        self._refusals.note(f"{command} not allowed", peer, words, now, logging.WARNING)
