"""What one client has proven about itself, and so whether it keeps its slot.

Owns the steps from a provisional slot to a full one. The slots belong to `gate.py`, the check of
tokens to `tokens.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from datastreamer.protocol.commands import Authenticate, CapabilitiesQuery
from datastreamer.protocol.publish.messages import PublishQuery
from datastreamer.protocol.server import Drop, Event
from datastreamer.server.admission.gate import ConnectionSlot, Gate, TrustLevel
from datastreamer.server.admission.tokens import TokenExaminer
from datastreamer.transport.server_stream import Transport

# Commands that a client with a provisional slot may send.
_TO_PROVE_ITSELF = (PublishQuery, Authenticate, CapabilitiesQuery)


class ClientProof:
    """The proof of one client. `place` is its slot at `gate`; None: it needs none."""

    def __init__(
        self,
        transport: Transport,
        gate: Gate,
        place: ConnectionSlot | None,
        token_examiner: TokenExaminer,
    ) -> None:
        self.undecided = place is not None and not place.held
        """Whether the client's slot is provisional."""
        self._transport = transport
        self._gate = gate
        self._place = place
        self._token_examiner = token_examiner
        self._examining: trio.CancelScope | None = None
        self._finishing = False

    @property
    def trust(self) -> TrustLevel:
        proven = TrustLevel.UNPROVEN if self._place is None else self._place.trust
        return max(proven, TrustLevel.KNOWN) if self._transport.certified else proven

    def allows(self, event: Event) -> bool:
        """Whether a client that is `undecided` may go on with `event`: it has a slot now, or is
        about to prove its identity."""
        if isinstance(event, _TO_PROVE_ITSELF):
            return True
        if self._transport.certified:
            return self.accept(TrustLevel.KNOWN)
        assert self._place is not None
        self.undecided = False
        return self._gate.confirm(self._place, trio.current_time())

    def accept(self, trust: TrustLevel) -> bool:
        """The client has proven `trust`; returns whether it has a slot now."""
        if self._place is None:
            return True
        self.undecided = False
        return self._gate.prove(self._place, trust, trio.current_time())

    async def examine(self, command: str, check: Callable[[], bool]) -> bool | None:
        """The result of `check`, which compares the credentials in `command`; None: it was not
        called, close the connection."""
        host = None if self._place is None else self._place.host
        with trio.CancelScope() as self._examining:
            if self._finishing:
                self._examining.cancel()
            return await self._token_examiner.examine(command, host, self._transport.peer, check)
        return None

    def finish(self) -> None:
        """The server shuts down: a client that waits for its check gets no answer."""
        self._finishing = True
        if self._examining is not None:
            self._examining.cancel()

    def note_drop(self, event: Drop) -> None:
        """Log that the connection is closed because of what the client sent."""
        peer, words = self._transport.peer, f"closed: {event.reason}"
        refusals, now = self._gate.refusals, trio.current_time()
        refusals.note(event.kind, peer, words, now, logging.DEBUG)
