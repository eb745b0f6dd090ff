"""Runs a client's engine in the caller's thread, on a blocking socket.

Must not import trio.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, Final, TypeVar

from datastreamer.client.effects import (
    Call,
    CancellationPoint,
    Close,
    Connect,
    Driver,
    Effect,
    Interrupt,
    Interrupted,
    InThread,
    Now,
    Open,
    Receive,
    Send,
    Signal,
    Sleep,
    Steps,
)
from datastreamer.client.introduction import connecting
from datastreamer.transport.connection_errors import connection_lost
from datastreamer.transport.endpoint import Endpoint, close_blocking, connect_blocking
from datastreamer.transport.tcp_info import CLIENT_KEEPALIVE, keep_alive

T = TypeVar("T")

# How often a sleeping thread looks whether it was interrupted. (A signal's handler may interrupt
# it in the same thread, where waiting for an event could lock up.)
_LOOK_SECONDS: Final = 0.1


class ThreadDriver(Driver):
    """Its servers are `Endpoint`s, its channels sockets."""

    threaded = True

    def __init__(self, *endpoints: Endpoint) -> None:
        super().__init__(*endpoints)
        self.turn = threading.Lock()
        # The servers of its channels, as messages name them.
        self._peers: dict[socket.socket, str] = {}
        self._interrupted = False

    def now(self) -> float:
        return time.monotonic()

    def signal(self) -> Signal:
        raise NotImplementedError("threads interrupt each other instead")

    def run(self, steps: Steps[T]) -> T:
        """Perform the effects of `steps`, and return its outcome."""
        result: Any = None
        failure: BaseException | None = None
        while True:
            try:
                while True:
                    effect = steps.send(result) if failure is None else steps.throw(failure)
                    failure = None
                    if type(effect) is Receive:
                        result = self._receive(effect.channel, effect.buffer, effect.seconds)
                    elif type(effect) is Send:
                        result = None
                        self._send(effect.channel, effect.data, effect.seconds)
                    else:
                        result = self._perform(effect)
            except StopIteration as done:
                outcome: T = done.value
                return outcome
            except BaseException as error:
                if getgeneratorstate(steps) == GEN_CLOSED:
                    raise
                failure = error

    def _perform(self, effect: Effect) -> Any:
        match effect:
            case Connect(seconds, server):
                endpoint: Endpoint = self.servers[server]
                return self.run(connecting(endpoint.introduction, endpoint.peer, seconds, server))
            case Open(seconds, server):
                endpoint = self.servers[server]
                made = connect_blocking(endpoint, seconds)
                self._peers[made] = endpoint.peer
                keep_alive(made.setsockopt, CLIENT_KEEPALIVE)
                return made
            case Close(channel, farewell):
                self._peers.pop(channel, None)
                if farewell:
                    close_blocking(channel)
                else:
                    socket.socket.close(channel)
            case Now():
                return self.now()
            case Sleep(until):
                self._sleep(until)
            case Interrupt(channel):
                self._interrupt(channel)
            case Call(function, arguments) | InThread(function, arguments):
                return function(*arguments)
            case CancellationPoint():
                pass
            case _:
                raise NotImplementedError(effect)
        return None

    def _receive(self, channel: socket.socket, buffer: memoryview, seconds: float | None) -> int:
        if channel.gettimeout() != seconds:
            channel.settimeout(seconds)
        try:
            return channel.recv_into(buffer)
        except TimeoutError:
            raise
        except OSError as error:
            raise connection_lost(self._peers.get(channel, ""), error) from None

    def _send(self, channel: socket.socket, data: bytes, seconds: float | None) -> None:
        # Setting it calls the system, also where nothing changes.
        if channel.gettimeout() != seconds:
            channel.settimeout(seconds)
        try:
            channel.sendall(data)
        except TimeoutError:
            raise
        except OSError as error:
            raise connection_lost(self._peers.get(channel, ""), error) from None

    def _sleep(self, until: float) -> None:
        left = _LOOK_SECONDS
        while left >= _LOOK_SECONDS and not self._interrupted:
            left = max(0.0, until - time.monotonic())
            time.sleep(min(left, _LOOK_SECONDS))
        if self._interrupted:
            self._interrupted = False
            raise Interrupted

    def _interrupt(self, channel: socket.socket | None) -> None:
        self._interrupted = True
        if channel is not None:
            with contextlib.suppress(OSError):
                # Not TLS's own, which changes its state while another thread uses it.
                socket.socket.shutdown(channel, socket.SHUT_RDWR)
