"""How a connection is made ready for requests, written once for every driver.

Owns the token exchange, and that a server without tokens is connected to again without one. Must
not know sockets, tasks or clocks.
"""

from __future__ import annotations

import logging
from typing import Final

from datastreamer.client.effects import Channel, Close, Now, Open, Receive, Send, Steps
from datastreamer.protocol.authentication import Introduction
from datastreamer.transport.connection_errors import answer_timeout

_log = logging.getLogger(__name__)

_RECEIVE_SIZE: Final = 4096


def connecting(token_request: bytes, peer: str, seconds: float, server: int = 0) -> Steps[Channel]:
    """Make a connection to this one of the driver's servers, and send the request with the token on
    it (empty: no token), each step within `seconds`.

    Raises what `Open` raises, and `NotAllowed` if the server does not accept the token.
    """
    channel = yield Open(seconds, server)
    if token_request:
        accepted = False
        try:
            accepted = yield from _introduce(channel, token_request, peer, seconds)
        finally:
            if not accepted:
                yield Close(channel)
        if not accepted:
            _log.warning("%s accepts no tokens; connected to it without one", peer)
            channel = yield Open(seconds, server)
    return channel


def _introduce(channel: Channel, token_request: bytes, peer: str, seconds: float) -> Steps[bool]:
    """Send the token; whether the server supports tokens."""
    introduction = Introduction(token_request, peer)
    room = memoryview(bytearray(_RECEIVE_SIZE))
    try:
        yield Send(channel, introduction.request, seconds)
        until = (yield Now()) + seconds
        while (left := until - (yield Now())) > 0:
            count = yield Receive(channel, room, left)
            accepted = introduction.receive(bytes(room[:count]))
            if accepted is not None:
                return accepted
    except TimeoutError:
        pass
    raise answer_timeout(peer, seconds)
