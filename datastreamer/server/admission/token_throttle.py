"""Throttle of wrong tokens, by address: how long a client waits until its token is checked.

Owns the table of addresses and its bounds. Knows neither tokens nor connections.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_FREE: Final = 3
"""Wrong tokens of an address without a delay, for an operator's mistakes."""

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0
# A client that would have to wait longer is closed: its address has too many waiting.
LONGEST_WAIT: Final = 60.0

_FORGET_SECONDS: Final = 600.0
_TRUST_SECONDS: Final = 3600.0
_MOST_ADDRESSES: Final = 4096


class _Address:
    __slots__ = ("free_at", "tokens")

    def __init__(self, now: float) -> None:
        self.tokens = 0
        self.free_at = now


class TokenThrottle:
    """How fast the tokens of each address are checked.

    After three wrong tokens the next checks for an address are 0.5 s apart, then 1 s, 2 s,
    up to 30 s, on however many connections. An address is forgotten ten minutes after its last
    token. An address with a right token is not throttled for an hour, so that a neighbour's
    guesses do not lock a publisher out. At most 4,096 addresses are kept, the most
    recent ones.
    """

    def __init__(self) -> None:
        # Addresses with wrong tokens, or tokens that are not checked yet.
        self._suspects: OrderedDict[str, _Address] = OrderedDict()
        # Addresses with a right token, and until when they are trusted.
        self._trusted: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._suspects) + len(self._trusted)

    def wait(self, address: str, now: float) -> float | None:
        """Seconds until the token from `address` is checked; None: close the connection without a
        check. The token counts as wrong until `succeeded`."""
        if self._trusts(address, now):
            return 0.0
        known = self._suspects.pop(address, None)
        if known is None or now >= known.free_at + _FORGET_SECONDS:
            known = _Address(now)
        self._suspects[address] = known
        if len(self._suspects) > _MOST_ADDRESSES:
            self._suspects.popitem(last=False)
        begin = max(now, known.free_at)
        if begin - now > LONGEST_WAIT:
            return None
        known.tokens += 1
        doublings = known.tokens - _FREE
        if doublings > 0:
            pause = _FIRST_PAUSE * 2 ** min(doublings - 1, 16)
            known.free_at = begin + min(_LONGEST_PAUSE, pause)
        return begin - now

    def succeeded(self, address: str, now: float) -> None:
        """A token of `address` was checked and is right."""
        self._suspects.pop(address, None)
        self._trusted[address] = now + _TRUST_SECONDS
        self._trusted.move_to_end(address)
        if len(self._trusted) > _MOST_ADDRESSES:
            self._trusted.popitem(last=False)

    def _trusts(self, address: str, now: float) -> bool:
        until = self._trusted.get(address)
        if until is not None and now >= until:
            del self._trusted[address]
            return False
        return until is not None
