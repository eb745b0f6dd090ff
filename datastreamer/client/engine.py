"""A client's connections to its servers, written once for every driver.

Owns whose turn it is, when a connection is given up and another made, when a lost one is retried,
and when another server is asked. `link` has a single connection, `datastreamer.protocol.exchanges`
the bytes, and `datastreamer.protocol.resume` what a lost connection means for a streaming. Must not
know sockets, tasks or clocks: `effects` has the steps that its driver performs.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from datastreamer._codec import EntryBatch
from datastreamer.client import bulk_receive
from datastreamer.client.bulk_receive import Settle, Take
from datastreamer.client.effects import (
    Interrupt,
    Interrupted,
    InThread,
    Now,
    Send,
    Signal,
    Sleep,
    Steps,
    Wait,
)
from datastreamer.client.link import ServerLink
from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    NoAnswer,
    NotFound,
    PeerError,
    StreamClosed,
    UsageError,
)
from datastreamer.protocol import exchanges
from datastreamer.protocol.batches import Read
from datastreamer.protocol.exchanges import Exchange, Lookup, Work
from datastreamer.protocol.history import LastRead
from datastreamer.protocol.resume import Resumable
from datastreamer.protocol.retry import BatchCall, Recovery
from datastreamer.transport.connection_errors import say_back, say_lost

T = TypeVar("T")

_log = logging.getLogger(__name__)


LOST: Final = object()
"""Returned instead of an item: the connection is lost, and the iteration may join again."""


class OpenIteration(Protocol):
    """The part of an iteration that the engine uses."""

    work: Work[Any]
    recovery: Recovery | None
    over: bool
    settled: bool

    @property
    def reports_outages(self) -> bool:
        """Whether it reports itself that the server is lost, and that it is back."""

    def finish(self) -> None:
        """No more items."""

    def take_over(self) -> None:
        """No more items, because of another call."""


class ClientEngine(ServerLink):
    """One exchange at a time on a `ServerLink`, whose options these are."""

    # The iteration that is open, on which the server may send at any time.
    _active: OpenIteration | None = None
    _rejoining = False
    # The `read` that is in progress.
    _batch: BatchCall | None = None
    # Set at the end of the call that is in progress.
    _released: Signal | None = None

    def open(self) -> Steps[None]:
        """Make the first connection."""
        if not self.moves:
            yield from self._connect()
            return
        self._read = LastRead()
        while self.channel is None:
            try:
                yield from self._enter()
            except PeerError as error:
                yield from self._move(error)

    def close(self) -> Steps[None]:
        """Close the connection. A second call does nothing.

        A call that is in progress raises `StreamClosed`.
        """
        self._closed = True
        if (yield from self._close_down()):
            return
        if self.ours:
            yield Interrupt(self.channel)
        if not self._driver.threaded:
            yield from self._drop()

    # Exchanges

    def ask(self, exchange: Callable[..., Exchange[T]], *arguments: Any) -> Steps[T]:
        """One exchange from its request to its answer."""
        return self._call(exchange, arguments, self.answer_timeout)

    def read(self, wanted: Read, wait: float) -> Steps[EntryBatch]:
        """One batch. At the end of the stream, the next entry is waited for, for `wait` seconds."""
        call = BatchCall(wanted, wait, self._driver.now)
        return self._call(call.read, (), self.answer_timeout, call)

    def _call(
        self,
        exchange: Callable[..., Exchange[Any]],
        arguments: tuple[Any, ...],
        seconds: float | None,
        batch: BatchCall | None = None,
    ) -> Steps[Any]:
        self._claim()
        self._batch = batch
        if self._read is not None:
            self._servers.begin()
        asked_again = False
        try:
            while True:
                before = 0
                try:
                    if self.channel is None or self._suspect or self._active is not None:
                        yield from self._prepare()
                        # With several servers, the connection has just answered: it is not stale.
                        asked_again = asked_again or self._read is not None
                    before = self._connection.received_bytes
                    flow = exchange(self._connection, *arguments)
                    wait = batch.left if batch is not None and self._may_wait else 0.0
                    limit = None if seconds is None else seconds + wait
                    answer = yield from self._drive(flow, limit)
                    if self.moves and (yield from self._is_elsewhere(answer)):
                        continue
                    if batch is not None and (yield from self._repeats(batch, answer)):
                        asked_again = False
                        self._servers.begin()
                        continue
                    if self._read is not None:
                        self._read.note(answer)
                    return answer
                except (PeerError, NotFound, Interrupted) as error:
                    if batch is not None and batch.stopped and not isinstance(error, NotFound):
                        return batch.nothing()
                    lost = isinstance(error, ConnectionLost)
                    lost = lost and not (self.moves and isinstance(error, NoAnswer))
                    if lost and self._is_asked_again(before, self.resumes and not asked_again):
                        asked_again = True
                        yield from self._drop()
                    else:
                        yield from self._move(error)
        except BaseException as error:
            self._ensure_not_closed(error)
            yield from self._judge(error, in_step=not self._connection.outstanding)
            raise
        finally:
            self._batch = None
            if batch is not None and batch.stopped:
                yield from self._drop()
            self._release()
            if self._closed:
                yield from self._close_down()

    def begin(self, iteration: OpenIteration) -> Steps[None]:
        """The first part of an exchange of many parts."""
        work = iteration.work
        if isinstance(work, Resumable):
            work.may_lag = self.moves
        try:
            yield from self._call(work.begin, (), self._timeout)
        except (ConnectFailed, ConnectionLost) as error:
            if not (yield from self._survives(iteration, error, noted=True)):
                raise
        self._active = iteration

    def join(self, iteration: OpenIteration) -> Steps[bool]:
        """Join the stream again if its connection was lost; False if it was stopped.

        After a cancellation it can be called again.
        """
        work = iteration.work
        if self.channel is not None or not isinstance(work, Resumable):
            return True
        self._claim()
        try:
            while not iteration.over:
                try:
                    if (yield from self._rejoin(iteration, work)):
                        return True
                except PeerError as error:
                    if iteration.over:
                        break
                    if not (yield from self._survives(iteration, error)):
                        raise
            return False
        except PeerError:
            yield from self._drop()
            raise
        finally:
            self._release()
            if self._closed:
                yield from self._close_down()

    def advance(self, iteration: OpenIteration, seconds: float | None) -> Steps[Any]:
        """The next part, `LOST`, or None at the end; can be called again after a cancellation."""
        self._claim()
        work = iteration.work
        try:
            if iteration.over:
                return None
            item = None
            if isinstance(work, Resumable):
                # The usual case needs at most one wait, and not the steps of an exchange.
                item = work.arrived()
                if item is None and self.channel is not None and work.hungry:
                    yield from self._receive(self.channel, work, seconds)
                    item = work.arrived()
            if item is None:
                item = yield from self._drive(work.advance(), seconds, work)
        except BaseException as error:
            self._ensure_not_closed(error)
            if isinstance(error, PeerError):
                stopping = isinstance(work, Resumable) and work.stopping
                if iteration.over or (stopping and self.resumes):
                    yield from self._drop()
                    return None
                try:
                    lost = self.resumes and (yield from self._survives(iteration, error))
                except PeerError:
                    yield from self._drop()
                    raise
                if lost:
                    yield from self._hang_up()
                    return LOST
            answered = isinstance(error, PeerError | NotFound)
            if answered and self.moves and isinstance(work, Lookup):
                yield from self._look_up_elsewhere(work, error)
                return LOST
            in_step = isinstance(error, (Exception, *self._driver.cancelled))
            yield from self._judge(error, in_step=in_step)
            raise
        else:
            iteration.recovery = None
            if self._read is not None and isinstance(work, Lookup):
                self._servers.begin()
                self._read.note(item)
            return item
        finally:
            self._release()
            if self._closed:
                yield from self._close_down()

    def pour(
        self, iteration: OpenIteration, take: Take, settle: Settle, seconds: float
    ) -> Steps[None]:
        """Have `take` called, in a thread, with the batches that arrive next, for `seconds` or
        until none arrives for a moment: without a turn of the event loop between batches. `settle`
        is called when everything that has arrived was passed to `take`. Does nothing unless the
        connection is a plain socket under Trio. Raises what these do; for clients that do not
        resume."""
        self._claim()
        channel, work = self.channel, iteration.work
        receiving = getattr(channel, "for_thread", None)
        try:
            if receiving is not None and isinstance(work, Resumable):
                turn = partial(bulk_receive.pour, receiving, self._connection, work)
                yield InThread(turn, (take, settle, seconds))
        except BaseException as error:
            in_step = isinstance(error, (Exception, *self._driver.cancelled))
            yield from self._judge(error, in_step=in_step)
            raise
        finally:
            self._release()
            if self._closed:
                yield from self._close_down()

    def settle(self, iteration: OpenIteration) -> Steps[None]:
        """End it; close the connection if that is necessary."""
        if self._active is iteration and self.ours:
            self._claim()
            try:
                yield from self._restore()
            finally:
                self._release()

    def stop(self) -> Steps[None]:
        """End the open iteration, also while another task or thread waits for its next item; or
        the wait of a `read`."""
        if (batch := self._batch) is not None and batch.left and self.ours:
            batch.stopped = True
            yield Interrupt(self.channel)
            if self._batch is batch and not self._driver.threaded:
                yield from self._until_released()
            return
        while (active := self._active) is not None and self.ours:
            if self._turn.acquire(False):
                active.finish()
                active.settled = True
                try:
                    yield from self._restore()
                finally:
                    self._release()
                return
            if self._driver.threaded or self._rejoining:
                active.finish()
                yield Interrupt(self.channel)
                return
            try:
                request = active.work.request_stop()
                if request and self.channel is not None:
                    self._sending = True
                    yield Send(self.channel, request)
                    self._sending = False
            except BaseException:
                yield from self._drop()
                raise
            yield from self._until_released()

    def _until_released(self) -> Steps[None]:
        if self._released is None:
            self._released = self._driver.signal()
        yield Wait(self._released)

    # Turns

    def _claim(self) -> None:
        self._ensure_ours()
        if not self._turn.acquire(False):
            raise UsageError("this client is in use; give each task and each thread its own")

    def _release(self) -> None:
        self._turn.release()
        if self._released is not None:
            self._released.set()
            self._released = None

    def _close_down(self) -> Steps[bool]:
        """Close the connection, unless a call uses it, which does so at its end: whether it is
        closed."""
        if not self._turn.acquire(False):
            return False
        try:
            yield from self._drop()
        finally:
            self._turn.release()
        return True

    # Losses

    def _look_up_elsewhere(self, work: Lookup, error: BaseException) -> Steps[None]:
        """Have another server continue after `error`. Raises what `_move` does."""
        try:
            while True:
                yield from self._move(error)
                try:
                    yield from self._enter()
                    yield from self._drive(work.begin(self._connection), self._timeout)
                    return
                except PeerError as another:
                    error = another
        except BaseException as final:
            yield from self._judge(final, in_step=not self._connection.outstanding)
            raise

    def _survives(
        self, iteration: OpenIteration, error: PeerError, *, noted: bool = False
    ) -> Steps[bool]:
        """Whether to join again after `error`; the iteration's recovery has the time.

        `noted`: all servers have been asked. Raises `error` if it is not the loss of a connection,
        or if the retries have ended.
        """
        answered = self._connection.received_bytes > 0
        self._answered = self._answered or answered
        if isinstance(error, ConnectionLost):
            self._lost_by_asking()
        if not (self._answered and self.resumes and isinstance(iteration.work, Resumable)):
            return False
        now = yield Now()
        servers = self._servers if self.moves else None
        if iteration.recovery is None:
            iteration.recovery = Recovery(self._retry_policy, now)
            if not noted:
                self._servers.begin()
        if not noted:
            self._servers.failed(error)
        luck = random.random()  # noqa: S311
        news = iteration.recovery.lost(
            error, answered=answered, now=now, luck=luck, servers=servers
        )
        if news and not iteration.reports_outages:
            say_lost(_log, self.peer, error)
        self._servers.go_on()
        return True

    def _rejoin(self, iteration: OpenIteration, work: Resumable) -> Steps[bool]:
        """One attempt to join again; False where it was interrupted."""
        joined = False
        self._rejoining = True
        try:
            if iteration.recovery is not None:
                yield Sleep(iteration.recovery.due)
            yield from self._connect()
            work.may_lag = self.moves and self._servers.may_lag
            yield from self._drive(work.begin(self._connection), self._timeout)
            joined = True
        except (Interrupted, PeerError) as error:
            self._ensure_not_closed(error)
            if isinstance(error, Interrupted):
                return False
            raise
        finally:
            self._rejoining = False
            if not joined:
                yield from self._hang_up()
        if iteration.recovery is not None:
            iteration.recovery.down = False
        if not iteration.reports_outages:
            say_back(_log, self.peer, work.next_number, again=not self.moves)
        return True

    # The state of the connection

    def _prepare(self) -> Steps[None]:
        """Make the connection ready for a request, or make another."""
        if self._closed:
            raise StreamClosed("this client is closed")
        if self._active is not None:
            self._active.take_over()
        yield from self._restore()
        if self.channel is None:
            if not self._driver.reconnects:
                raise ConnectionLost(f"the connection to {self.peer} is lost; make a new client")
            yield from self._enter()

    def _enter(self) -> Steps[None]:
        """Make a connection, to a server that holds what was read from others."""
        yield from self._connect()
        if self._read is not None:
            entered = False
            try:
                yield from self._drive(self._read.compare(self._connection), self._timeout)
                entered = True
            finally:
                if not entered:
                    yield from self._hang_up()

    def _restore(self) -> Steps[None]:
        """End what is in progress and test a suspect connection; close it if that fails."""
        work = None if self._active is None else self._active.work
        if self._read is not None and isinstance(work, Resumable):
            self._read.note(work.last_read)
        if self.channel is None:
            self._active = None
            return
        limit = exchanges.DRAIN_LIMIT if self._driver.reconnects else None
        flow = exchanges.restore(self._connection, work, self._suspect, limit)
        fit = False
        try:
            fit = yield from self._drive(flow, self._timeout)
        except PeerError:
            pass
        finally:
            if fit:
                self._active = None
                self._suspect = False
            else:
                yield from self._drop()

    def _judge(self, error: BaseException, *, in_step: bool) -> Steps[None]:
        """Close a connection that is out of step, or may be, after `error`."""
        if self._is_spent(error, in_step=in_step) or self._sending:
            # A cancelled wait ends no streaming: it joins again.
            streams = self._active is not None and isinstance(self._active.work, Resumable)
            again = streams and self.resumes and in_step and not isinstance(error, PeerError)
            yield from (self._hang_up() if again else self._drop())

    def _drop(self) -> Steps[None]:
        """Close the connection, and end the iteration on it."""
        if self._active is not None:
            self._active.finish()
            self._active = None
        yield from self._hang_up()
