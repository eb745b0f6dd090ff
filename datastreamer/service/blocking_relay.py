"""A relay for synchronous code: it runs in its own thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from datastreamer.errors import DatastreamerError, ServerFailed

if TYPE_CHECKING:
    from datastreamer.transport.trio_thread import TrioThread


class BlockingRelay:
    """A relay in a thread: ``with BlockingRelay([("sequencer", 6900)], path) as relay: ...``

    Accepts what `Relay` accepts, and returns when clients are served: without a file, when an
    upstream has answered. Raises `ListenFailed` and what `DataStream.open` raises. A program that
    keeps its interpreter busy slows the relay down; `datastreamer relay` runs in its own process.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        import trio

        from datastreamer.relay.relay import Relay
        from datastreamer.transport.trio_thread import TrioThread

        self._addresses: list[tuple[str, int]] = []
        self._closed = False
        self._relay = Relay(*arguments, **options)

        async def main(started: Callable[[], None]) -> None:
            async with trio.open_nursery() as nursery:
                self._addresses = await nursery.start(self._relay.run)
                started()

        self._thread: TrioThread = TrioThread(f"relay of {self._relay.path}", main)
        if self._thread.failure is not None:
            raise self._thread.failure

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The addresses it listens on: [(host, port), ...]; a Unix socket is ("unix:PATH", 0)."""
        return self._addresses

    @property
    def port(self) -> int:
        """The TCP port it listens on; 0 if it listens only on a Unix socket."""
        return max(port for _, port in self._addresses)

    @property
    def metrics_port(self) -> int | None:
        """The port of its metrics endpoint; None without one."""
        return self._relay.metrics_port

    @property
    def total_entries(self) -> int:
        """The number of entries in the file, which are served."""
        stream = self._relay.stream
        assert stream is not None
        return stream.total_entries

    @property
    def lag(self) -> int | None:
        """As `Relay.lag`."""
        return self._relay.lag

    @property
    def failure(self) -> DatastreamerError | None:
        """As `Relay.failure`; or why the relay has ended unexpectedly."""
        failure = self._thread.failure
        if failure is None or isinstance(failure, DatastreamerError):
            return failure or self._relay.failure
        return ServerFailed(f"the relay has failed: {failure}")

    def close(self) -> None:
        """Stop the download and shut down; clients have the limits' `grace` to receive the entries
        in the file. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        import trio

        try:
            if self._thread.failure is None:
                self._thread.call(self._relay.finish)
        except (trio.RunFinishedError, trio.Cancelled):
            pass
        finally:
            self._thread.close()

    def __enter__(self) -> BlockingRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
