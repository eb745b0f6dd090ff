"""Receives from a client: its next query at once, and bytes while its session does something else.

Owns the one task that may receive beside the session's own, and which client is polled for. Knows
no protocol.

Waking a task that sleeps until bytes arrive takes the system and the event loop some 30 us, which
is half of the time that a client on the same machine waits for an answer. So the server polls for
the next query of a client that sent its last ones promptly.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from datastreamer.transport.server_stream import Transport

# Turns of the event loop in which a client is polled for: some 50 us if nothing else runs. A client
# on the same machine takes some 20 us from an answer to its next query.
_POLLS = 6
# A client that was waited for longer than this is not polled for the next time. Includes the time
# that it takes to wake up.
_PROMPT_SECONDS = 0.000_15
# A client that received this often in a row asks alone.
_ALONE = 16


class BusyPoll:
    """Which client of a server is polled for: one that is alone in asking. With several, the loop
    has work to do while each of them has not asked yet."""

    __slots__ = ("last", "row")

    def __init__(self) -> None:
        self.last: object = None
        """Who received last."""
        self.row = 0
        """How often in a row."""


class ReadAhead:
    """Receives from one transport, for one task."""

    def __init__(self, transport: Transport, busy_poll: BusyPoll) -> None:
        self._transport = transport
        self._busy_poll = busy_poll
        # Whether the last bytes came soon after they were waited for.
        self._prompt = False
        self._listening = False
        self._heard: bytes | None = None
        self._failure: Exception | None = None
        self._done = trio.Event()

    @property
    def heard(self) -> bool:
        """Whether `receive` returns at once."""
        return self._listening and self._done.is_set()

    @property
    def alone(self) -> bool:
        """Whether no other client has asked since this one asked before."""
        return self._busy_poll.last is self and self._busy_poll.row > 1

    async def receive_query(self, *, paused: bool = False) -> bytes:
        """As `receive`, sooner for a client that sends a query as soon as it has the answer to the
        one before. `paused`: other tasks have run since the client was answered."""
        busy_poll = self._busy_poll
        if busy_poll.last is not self:
            busy_poll.last, busy_poll.row = self, 0
        busy_poll.row += 1
        if not paused:
            await trio.lowlevel.checkpoint()
        if self._listening:
            return await self.receive()
        if paused:
            data = self._transport.receive_now()
            if data is not None:
                return data
            # The next query may come while others are answered: a turn is less than a wait.
            await trio.lowlevel.checkpoint()
        if busy_poll.row < _ALONE:
            return await self._transport.receive()
        begin = time.perf_counter()
        if self._prompt:
            for _ in range(_POLLS):
                data = self._transport.receive_now()
                if data is not None:
                    return data
                await trio.lowlevel.checkpoint()
        data = await self._transport.receive()
        self._prompt = time.perf_counter() - begin < _PROMPT_SECONDS
        return data

    async def receive(self) -> bytes:
        """As `Transport.receive`. Raises what that raises."""
        if not self._listening:
            return await self._transport.receive()
        await self._done.wait()
        if self._failure is not None:
            raise self._failure
        self._listening = False
        assert self._heard is not None
        return self._heard

    def listen(self, nursery: trio.Nursery, notify: Callable[[], None]) -> None:
        """Receive in a separate task; `notify` is called when `heard` is true."""
        if not self._listening:
            self._listening = True
            self._done = trio.Event()
            nursery.start_soon(self._listen)
        self._notify = notify

    async def _listen(self) -> None:
        try:
            self._heard = await self._transport.receive()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._failure = error
        self._done.set()
        self._notify()
