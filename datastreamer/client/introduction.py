"""How a connection is made ready for requests, written once for every driver.

Owns the exchange of token and name, and that a server that does not know one of them is connected
to again without it. Must not know sockets, tasks or clocks.
"""

from __future__ import annotations

import logging
from typing import Final

from datastreamer.client.effects import Channel, Close, Now, Open, Receive, Send, Steps
from datastreamer.errors import refusal
from datastreamer.format import COMMAND_AUTHENTICATE, RESULT_INVALID_COMMAND
from datastreamer.protocol.publish.messages import AnswerParser, Done, Refusal
from datastreamer.transport.connection_errors import answer_timeout

_log = logging.getLogger(__name__)

_RECEIVE_SIZE: Final = 4096
_TOKEN: Final = COMMAND_AUTHENTICATE.to_bytes(8, "big")


def connecting(
    introduction: tuple[bytes, ...], peer: str, seconds: float, server: int = 0
) -> Steps[Channel]:
    """Make a connection to this one of the driver's servers, and send the requests of the
    introduction on it, each step within `seconds`.

    Raises what `Open` raises, and `NotAllowed` if the server does not accept the token.
    """
    requests = list(introduction)
    while True:
        channel = yield Open(seconds, server)
        for request in requests:
            accepted = False
            try:
                accepted = yield from _introduce(channel, request, peer, seconds)
            finally:
                if not accepted:
                    yield Close(channel)
            if not accepted:
                requests.remove(request)
                if request[:8] == _TOKEN:
                    _log.warning("%s asks readers for no token; connected to it without one", peer)
                break
        else:
            return channel


def _introduce(channel: Channel, request: bytes, peer: str, seconds: float) -> Steps[bool]:
    """Send a request of the introduction. False if the server does not know it; then the connection
    cannot be used any more. Raises `NotAllowed` for a wrong token, and `ProtocolViolation`."""
    answers = AnswerParser(peer)
    room = memoryview(bytearray(_RECEIVE_SIZE))
    try:
        yield Send(channel, request, seconds)
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
