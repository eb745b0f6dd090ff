"""Receives from a client, also while its session does something else.

Owns the one task that may receive beside the session's own. Knows no protocol.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from datastreamer.transport.server_stream import Transport


class ReadAhead:
    """Receives from one transport, for one task."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._listening = False
        self._heard: bytes | None = None
        self._failure: Exception | None = None
        self._done = trio.Event()

    @property
    def heard(self) -> bool:
        """Whether `receive` returns at once."""
        return self._listening and self._done.is_set()

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
