"""A relay for synchronous code: it runs in its own thread."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import trio

from datastreamer.errors import DatastreamerError, ServerFailed
from datastreamer.http.ports import Listening
from datastreamer.relay.relay import Relay
from datastreamer.transport.listeners import address_of
from datastreamer.transport.trio_thread import TrioThread

P = ParamSpec("P")


def _accepts(
    relay: Callable[Concatenate[Relay, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[BlockingRelay, P], None]]:
    """The decorated function has the parameters of `relay`."""

    def decorate(function: Any) -> Any:
        function.__signature__ = inspect.signature(relay)
        return function

    return decorate


class BlockingRelay(Listening):
    """Downloads a stream, stores it in the file at `path`, and serves it, from a thread:
    ``with BlockingRelay([("sequencer", 6900)], path) as relay: ...``

    Accepts what `Relay` accepts, and returns when clients are served: without a file, when an
    upstream has answered. Raises `ListenFailed` and what `DataStream.open` raises. A program that
    keeps its interpreter busy slows the relay down; `datastreamer relay` runs in its own process.
    """

    @_accepts(Relay.__init__)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._closed = False
        self._relay = Relay(*arguments, **options)

        async def main(started: Callable[[], None]) -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._relay.run)
                started()

        self._thread = TrioThread(f"relay of {self._relay.path}", main)
        if self._thread.failure is not None:
            raise self._thread.failure
        self._addresses = self._relay.addresses
        self._metrics_port, self._http_port = self._relay.metrics_port, self._relay.http_port

    def __repr__(self) -> str:
        served = ", ".join(map(address_of, self.addresses))
        state = "closed" if self._closed else f"on {served}"
        return f"<{type(self).__name__} in {os.fspath(self._relay.path)!r}: {state}>"

    @property
    def total_entries(self) -> int:
        """The number of entries in the file, which are served."""
        return self._relay.total_entries

    @property
    def lag(self) -> int | None:
        """The number of entries that the current upstream holds and the relay lacks; None without a
        current upstream."""
        return self._relay.lag

    @property
    def caught_up(self) -> bool:
        """Whether it has a current upstream and had all of its entries."""
        return self._relay.caught_up

    @property
    def failure(self) -> DatastreamerError | None:
        """Why the download has stopped; None while it continues. Or why the relay has ended
        unexpectedly."""
        failure = self._thread.failure
        if failure is None or isinstance(failure, DatastreamerError):
            return failure or self._relay.failure
        return ServerFailed(f"the relay has failed: {failure}")

    def close(self, grace: float | None = None) -> bool:
        """Stop the download, then shut down: clients have `grace` seconds (None: the limits') to
        receive the entries in the file. True if every client received everything. A second call
        does nothing."""
        if self._closed:
            return True
        self._closed = True
        try:
            return self._thread.failure is None and self._thread.call(
                lambda: self._relay.finish(grace)
            )
        except (trio.RunFinishedError, trio.Cancelled):
            return False
        finally:
            self._thread.close()

    def __enter__(self) -> BlockingRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
