"""A Trio client's link to its server, under the public face of `client`.

Owns the turns of tasks, and when a connection is given up and another made. What is
said on a connection stands in `datastreamer.protocol.exchanges`, how its bytes travel
in `channel`; nothing of either is repeated here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import trio

from datastreamer.errors import ConnectionLost, PeerError, ServerRefused, StreamClosed, UsageError
from datastreamer.net.channel import Channel, channel_over
from datastreamer.protocol import exchanges
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.exchanges import Flow, Work

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


class Link:
    """One connection at a time, and one exchange at a time on it."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        stream_type: int,
        timeout: float,
        redial: Callable[[], Awaitable[trio.abc.Stream]] | None,
        peer: str,
    ) -> None:
        self.stream_type = stream_type
        self.peer = peer
        self._timeout = timeout
        self._redial = redial
        self._connection = ClientConnection(stream_type, peer=peer)
        self._channel: Channel | None = channel_over(stream, peer)
        # The iteration that is open, on which the server may send at any time.
        self._active: Iteration[Any] | None = None
        # After a refusal: does the connection still work?
        self._suspect = False
        self._closed = False
        self._busy = False
        self._sending = False
        self._released: trio.Event | None = None

    # Exchanges

    async def call(
        self,
        exchange: Callable[Concatenate[ClientConnection, P], Flow[T]],
        *what: P.args,
        **named: P.kwargs,
    ) -> T:
        """One exchange from its request to its answer."""
        self._claim()
        try:
            if self._channel is None or self._suspect or self._active is not None:
                await self._prepare()
            return await self._drive(exchange(self._connection, *what, **named))
        except BaseException as error:
            await self._judge(error, in_step=not self._connection.outstanding)
            raise
        finally:
            self._release()

    async def begin(self, iteration: Iteration[Any]) -> None:
        """The first part of an exchange of many parts."""
        await self.call(iteration.work.begin)
        self._active = iteration

    async def advance(self, work: Work[T]) -> T | None:
        """The next part. Cancelled, it can be asked for again."""
        self._claim()
        try:
            return await self._drive(work.advance())
        except BaseException as error:
            await self._judge(error, in_step=isinstance(error, Exception | trio.Cancelled))
            raise
        finally:
            self._release()

    async def settle(self, iteration: Iteration[Any]) -> None:
        """The end of it, at the cost of the connection if it must be."""
        if self._active is iteration:
            self._claim()
            try:
                await self._restore()
            finally:
                self._release()

    async def stop(self) -> None:
        """End the open iteration, also under a task that waits for its next item."""
        while (active := self._active) is not None:
            if not self._busy:
                await active.aclose()
                return
            try:
                await self._send(active.work.request_stop())
            except BaseException:
                await self._drop()
                raise
            self._released = self._released or trio.Event()
            await self._released.wait()

    async def aclose(self) -> None:
        self._closed = True
        await self._drop()

    # Turns

    def _claim(self) -> None:
        if self._busy:
            raise UsageError("another task is using this client; give each task its own")
        self._busy = True

    def _release(self) -> None:
        self._busy = False
        if self._released is not None:
            self._released.set()
            self._released = None

    async def _drive(self, flow: Flow[T]) -> T:
        channel, connection = self._channel, self._connection
        if channel is None:
            raise ConnectionLost(f"the connection to {self.peer} is lost")
        try:
            while True:
                data = next(flow)
                if data is None:
                    connection.received(await channel.receive_into(connection.receive_buffer()))
                elif data:
                    self._sending = True
                    await channel.send(data)
                    self._sending = False
        except StopIteration as done:
            outcome: T = done.value
            return outcome
        except (trio.ClosedResourceError, ConnectionLost):
            if self._closed:
                raise StreamClosed("this client was closed while it was in use") from None
            raise

    async def _send(self, data: bytes) -> None:
        if data and self._channel is not None:
            self._sending = True
            await self._channel.send(data)
            self._sending = False

    # The state of the connection

    async def _prepare(self) -> None:
        """Make the connection fit for a request, or make another."""
        if self._closed:
            raise StreamClosed("this client is closed")
        if self._active is not None:
            self._active.take_over()
        await self._restore()
        if self._channel is None:
            if self._redial is None:
                raise ConnectionLost(f"the connection to {self.peer} is lost; make a new client")
            self._channel = channel_over(await self._redial(), self.peer)
            self._connection = ClientConnection(self.stream_type, peer=self.peer)

    async def _restore(self) -> None:
        """End what is underway and try a suspect connection; give it up if that fails."""
        if self._channel is None:
            return
        work = None if self._active is None else self._active.work
        limit = None if self._redial is None else exchanges.DRAIN_LIMIT
        flow = exchanges.restore(self._connection, work, self._suspect, limit)
        fit = False
        try:
            with trio.move_on_after(self._timeout):
                fit = await self._drive(flow)
        except PeerError:
            pass
        except BaseException:
            await self._drop()
            raise
        if fit:
            self._active = None
            self._suspect = False
        else:
            await self._drop()

    async def _judge(self, error: BaseException, *, in_step: bool) -> None:
        """What `error` means for the connection; one that is out of step is given up."""
        if self._sending:
            await self._drop()
        elif isinstance(error, ServerRefused) and not self._connection.outstanding:
            self._suspect = True
        elif isinstance(error, PeerError) or not in_step:
            await self._drop()

    async def _drop(self) -> None:
        channel, self._channel = self._channel, None
        if self._active is not None:
            self._active.finish()
            self._active = None
        self._suspect = False
        self._sending = False
        if channel is not None:
            with trio.CancelScope(shield=True):
                await channel.aclose()


class Iteration(Generic[Item]):
    """What the iterators of a client have in common: the life of one `Work`."""

    def __init__(self, link: Link, work: Work[Item]) -> None:
        self.work = work
        self._link = link
        self._begun = False
        self._over = False
        self._taken_over = False
        self._closing = False

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End it; the client is usable then. What has arrived and was not taken is dropped."""
        self.finish()
        if not self._closing:
            self._closing = True
            await self._link.settle(self)

    def finish(self) -> None:
        """No more items."""
        self._over = True

    def take_over(self) -> None:
        """No more items, and whoever asks for one is told why."""
        self._taken_over = not self._over
        self.finish()

    async def _begin(self) -> None:
        if not self._begun and not self._over:
            await self._link.begin(self)
            self._begun = True

    async def _next(self) -> Item:
        if self._taken_over:
            raise UsageError("this iteration was ended by a later call on its client")
        if not self._begun:
            await self._begin()
        item = None if self._over else await self._link.advance(self.work)
        if item is None:
            self.finish()
            raise StopAsyncIteration
        return item
