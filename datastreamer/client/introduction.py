"""How a connection is made ready for requests, written once for every driver.

Owns the token exchange, and that a server without tokens is connected to again without one. Must
not know sockets, tasks or clocks.
"""

from __future__ import annotations

import logging
from typing import Final

from datastreamer.client.effects import Channel, Close, Now, Open, Receive, Send, Steps
from datastreamer.errors import refusal
from datastreamer.format import RESULT_INVALID_COMMAND
from datastreamer.protocol.publish.messages import AnswerParser, Done, Refusal
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
    """Send the token. False if the server does not know the request; then the connection cannot be
    used any more. Raises `NotAllowed` for a wrong token, and `ProtocolViolation`."""
    answers = AnswerParser(peer)
    room = memoryview(bytearray(_RECEIVE_SIZE))
    try:
        yield Send(channel, token_request, seconds)
        until = (yield Now()) + seconds
        while (left := until - (yield Now())) > 0:
            count = yield Receive(channel, room, left)
            if not count:
                return False
            answers.receive(room[:count])
            answer = answers.next_answer(Done)
            if isinstance(answer, Refusal):
                if answer.number == RESULT_INVALID_COMMAND:
                    return False
                raise refusal(answer.number, answer.text, "to serve a client with this token")
            if answer is not None:
                return True
    except TimeoutError:
        pass
    raise answer_timeout(peer, seconds)
