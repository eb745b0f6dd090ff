"""A Trio client's link to its server, under the public face of `client`.

Owns the turns of tasks, and when a connection is given up and another made. What is
said on a connection stands in `datastreamer.protocol.flows`, what a lost one means
in `datastreamer.protocol.resume`, how bytes travel in `channel`; nothing of these is
repeated here.
"""

from __future__ import annotations

import enum
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
)

import trio

from datastreamer.client.bulk_receive import Settle, Take, pour
from datastreamer.client.connection import Attachment
from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    PeerError,
    StreamClosed,
    UsageError,
)
from datastreamer.protocol import flows as exchanges
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.flows import Flow, Work
from datastreamer.protocol.resume import Resumable
from datastreamer.protocol.retry import Endurance
from datastreamer.transport.client_stream import Channel, SocketChannel, channel_over
from datastreamer.transport.connection_errors import (
    answer_timeout,
    say_back,
    say_lost,
    silent_server,
)
from datastreamer.transport.listeners import leads_to

if TYPE_CHECKING:
    from datastreamer._codec import EntryBatch
    from datastreamer.client.trio_iteration import Iteration

P = ParamSpec("P")
T = TypeVar("T")


class _Lost(enum.Enum):
    LOST = enum.auto()


LOST: Final = _Lost.LOST
"""In place of an item: the connection is gone, and the iteration may join again."""
Lost: TypeAlias = Literal[_Lost.LOST]

_log = logging.getLogger(__name__)


class Link(Attachment):
    """One connection at a time, and one exchange at a time on it."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        stream_type: int,
        timeout: float,
        redial: Callable[[], Awaitable[trio.abc.Stream]] | None,
        peer: str,
        endurance: Endurance,
        batch_reads: bool = True,
    ) -> None:
        super().__init__(stream_type, peer, timeout, endurance, batch_reads)
        self._redial = redial
        self._channel: Channel | None = channel_over(stream, peer)
        # The iteration that is open, on which the server may send at any time.
        self._active: Iteration[Any] | None = None
        self._busy = False
        self._sending = False
        self._released: trio.Event | None = None
        self._rejoining: trio.CancelScope | None = None
        self._patience: trio.CancelScope | None = None

    @property
    def _redials(self) -> bool:
        return self._redial is not None

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
            again = self.resumes
            while True:
                before = self._connection.received_bytes
                try:
                    return await self._drive(exchange(self._connection, *what, **named))
                except ConnectionLost:
                    if not self._is_asked_again(before, again):
                        raise
                    again = False
                await self._drop()
                await self._prepare()
        except BaseException as error:
            await self._judge(error, in_step=not self._connection.outstanding)
            raise
        finally:
            self._release()

    async def begin(self, iteration: Iteration[Any]) -> None:
        """The first part of an exchange of many parts."""
        try:
            with self._bounded():
                await self.call(iteration.work.begin)
        except (ConnectFailed, ConnectionLost) as error:
            if not self._survives(iteration, error):
                raise
        self._active = iteration

    async def join(self, iteration: Iteration[Any]) -> bool:
        """Join the stream again where its connection was lost; False where it was stopped.

        Cancelled, it can be asked for again.
        """
        if self._channel is not None or not isinstance(iteration.work, Resumable):
            return True
        self._claim()
        try:
            while True:
                try:
                    return await self._rejoin(iteration, iteration.work)
                except PeerError as error:
                    if not self._survives(iteration, error):
                        raise
        except PeerError:
            await self._drop()
            raise
        finally:
            self._release()

    async def advance(self, iteration: Iteration[T]) -> T | Lost | None:
        """The next part. Cancelled, it can be asked for again."""
        self._claim()
        work = iteration.work
        try:
            item: T | None = None
            if isinstance(work, Resumable):
                item = cast("T | None", await self._arrived(work))
            if item is None:
                item = await self._drive(work.advance(), work)
        except BaseException as error:
            if isinstance(error, PeerError) and isinstance(work, Resumable) and self.resumes:
                if work.stopping:
                    await self._drop()
                    return None
                try:
                    lost = self._survives(iteration, error)
                except PeerError:
                    await self._drop()
                    raise
                if lost:
                    await self._hang_up()
                    return LOST
            await self._judge(error, in_step=isinstance(error, Exception | trio.Cancelled))
            raise
        else:
            iteration.recovery = None
            return item
        finally:
            self._release()

    async def pour(
        self, iteration: Iteration[Any], take: Take, settle: Settle, seconds: float
    ) -> None:
        """What comes next, in a thread; nothing where the connection is no mere socket.

        For clients that do not resume. Cancelled, it returns at the end of its turn.
        """
        self._claim()
        channel, work = self._channel, iteration.work
        try:
            if isinstance(channel, SocketChannel) and isinstance(work, Resumable):
                turn = partial(pour, channel, self._connection, work, take, settle, seconds)
                await trio.to_thread.run_sync(turn)
        except BaseException as error:
            await self._judge(error, in_step=isinstance(error, Exception | trio.Cancelled))
            raise
        finally:
            self._release()

    async def settle(self, iteration: Iteration[Any]) -> None:
        """The end of it, at the cost of the connection if it must be."""
        if self._active is iteration and self._ours:
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
            if self._rejoining is not None:
                active.work.request_stop()
                self._rejoining.cancel()
                return
            try:
                await self._send(active.work.request_stop())
            except BaseException:
                await self._drop()
                raise
            if self._released is None:
                self._released = trio.Event()
            await self._released.wait()

    async def aclose(self) -> None:
        self._closed = True
        if self._rejoining is not None:
            self._rejoining.cancel()
        await self._drop()

    # Losses

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._channel is not None

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Bound the time in which nothing comes. Raises `NoAnswer`."""
        with trio.move_on_after(self._timeout) as patience:
            self._patience = patience
            try:
                yield
            finally:
                self._patience = None
        if patience.cancelled_caught:
            raise answer_timeout(self.peer, self._timeout)

    def _survives(self, iteration: Iteration[Any], error: PeerError) -> bool:
        """Whether to join again after `error`; when, says the iteration's recovery.

        Raises what is no loss of a connection, or one time too many.
        """
        again, news = self._outlives(iteration, error, trio.current_time())
        if news and iteration.on_outage is None:
            say_lost(_log, self.peer, error)
        return again

    async def _rejoin(self, iteration: Iteration[Any], work: Resumable) -> bool:
        assert self._redial is not None
        joined = False
        try:
            with trio.CancelScope() as self._rejoining:
                if iteration.recovery is not None:
                    await trio.sleep_until(iteration.recovery.due)
                with self._bounded():
                    self._connection = self._new_connection()
                    self._channel = channel_over(await self._redial(), self.peer)
                    await self._drive(work.begin(self._connection))
                    joined = True
        finally:
            self._rejoining = None
            if not joined:
                await self._hang_up()
        self._ensure_open()
        if joined:
            if iteration.recovery is not None:
                iteration.recovery.down = False
            if iteration.on_outage is None:
                say_back(_log, self.peer, work.next_number)
        return joined

    async def _look_after(self, work: Resumable, seconds: float) -> None:
        """Nothing came for so long: ask on another connection whether the server is there."""
        assert self._redial is not None
        connection = ClientConnection(self.stream_type, peer=self.peer)
        header = None
        try:
            with trio.move_on_after(self._timeout):
                channel = channel_over(await self._redial(), self.peer)
                try:
                    header = await _drive(exchanges.header(connection), channel, connection)
                finally:
                    with trio.CancelScope(shield=True):
                        await channel.aclose()
        except PeerError as error:
            raise silent_server(self.peer, seconds, error) from error
        if header is None:
            raise silent_server(self.peer, seconds, answer_timeout(self.peer, self._timeout))
        work.silent(header, self.peer, seconds)

    # Turns

    def _claim(self) -> None:
        self._ensure_ours()
        if self._busy:
            raise UsageError("another task is using this client; give each task its own")
        self._busy = True

    def _release(self) -> None:
        self._busy = False
        if self._released is not None:
            self._released.set()
            self._released = None

    async def _arrived(self, work: Resumable) -> EntryBatch | None:
        """The next run, where it comes as most do: one wait at most, and none of the steps of an
        exchange. None: it is to be driven."""
        run = work.arrived()
        if run is None and work.hungry and self._channel is not None:
            try:
                await self._receive(self._channel, work)
            except (trio.ClosedResourceError, ConnectionLost):
                self._ensure_open()
                raise
            run = work.arrived()
        return run

    async def _drive(self, flow: Flow[T], work: Work[Any] | None = None) -> T:
        channel = self._channel
        if channel is None:
            self._ensure_open()
            raise ConnectionLost(f"the connection to {self.peer} is lost")
        watched = work if isinstance(work, Resumable) else None
        try:
            while True:
                data = next(flow)
                if data:
                    self._sending = True
                    await channel.send(data)
                    self._sending = False
                elif data is None:
                    await self._receive(channel, watched)
        except StopIteration as done:
            outcome: T = done.value
            return outcome
        except (trio.ClosedResourceError, ConnectionLost):
            self._ensure_open()
            raise

    async def _receive(self, channel: Channel, watched: Resumable | None) -> None:
        seconds = self._endurance.heartbeat
        if watched is None or seconds is None or self._redial is None:
            await self._receive_from(channel)
            if self._patience is not None:
                self._patience.deadline = trio.current_time() + self._timeout
            return
        while True:
            with trio.move_on_after(seconds):
                await self._receive_from(channel)
                return
            await self._look_after(watched, seconds)

    async def _receive_from(self, channel: Channel) -> None:
        connection = self._connection
        try:
            connection.received(await channel.receive_into(connection.receive_buffer()))
        except ConnectionLost as error:
            raise self._explained(error) from None

    def _ensure_open(self) -> None:
        if self._closed:
            raise StreamClosed("this client was closed while it was in use") from None

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
            self._connection = self._new_connection()

    def leads_to(self, listeners: Iterable[socket.socket]) -> bool:
        """Whether one of `listeners`, which are this process's, is at the other end."""
        connection = self._channel.connection() if self._channel is not None else None
        return connection is not None and leads_to(connection, listeners)

    async def _restore(self) -> None:
        """End what is underway and try a suspect connection; give it up if that fails."""
        if self._channel is None:
            self._active = None
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
        if self._is_spent(error, in_step=in_step) or self._sending:
            await self._drop()

    async def _drop(self) -> None:
        """Give up the connection, and the iteration on it."""
        if self._active is not None:
            self._active.finish()
            self._active = None
        await self._hang_up()

    async def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        self._note_end()
        self._sending = False
        if channel is not None:
            with trio.CancelScope(shield=True):
                await channel.aclose()


async def _drive(flow: Flow[T], channel: Channel, connection: ClientConnection) -> T:
    """One exchange on a connection that is nobody's."""
    try:
        while True:
            data = next(flow)
            if data:
                await channel.send(data)
            elif data is None:
                connection.received(await channel.receive_into(connection.receive_buffer()))
    except StopIteration as done:
        outcome: T = done.value
        return outcome
