"""The same relay for plain synchronous code: it runs in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from datastreamer.errors import DatastreamerError, ServerFailed


class BlockingRelay:
    """A relay in a thread: ``with BlockingRelay([("sequencer", 6900)], path) as relay: ...``

    Takes what `Relay` takes, and returns when clients are served: where there is no file yet,
    when an upstream has answered. Raises `ListenFailed` and what `DataStream.open` raises. A
    program that keeps its interpreter busy slows it down; `datastreamer relay` is a process of
    its own.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        import trio

        from datastreamer.relay.relay import Relay

        self._addresses: list[tuple[str, int]] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._ready = threading.Event()
        self._relay = Relay(*arguments, **options)
        self._thread = threading.Thread(
            target=self._run, name=f"relay of {self._relay.path}", daemon=True
        )
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:
            self._cancel()
            raise
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """What it listens on: [(host, port), ...]; a Unix socket is ("unix:PATH", 0)."""
        return self._addresses

    @property
    def port(self) -> int:
        """The TCP port it listens on; 0 where it listens on a Unix socket alone."""
        return max(port for _, port in self._addresses)

    @property
    def metrics_port(self) -> int | None:
        """Where it answers with metrics; None where it does not."""
        return self._relay.metrics_port

    @property
    def total_entries(self) -> int:
        """How many entries are here and served."""
        stream = self._relay.stream
        assert stream is not None
        return stream.total_entries

    @property
    def lag(self) -> int | None:
        """As `Relay.lag`."""
        return self._relay.lag

    @property
    def failure(self) -> DatastreamerError | None:
        """As `Relay.failure`; or why the relay has ended, which it should not."""
        failure = self._failure
        if failure is None or isinstance(failure, DatastreamerError):
            return failure or self._relay.failure
        return ServerFailed(f"the relay ended: {failure}")

    def close(self) -> None:
        """End it: nothing more is downloaded, clients have the limits' `grace` to take what
        is here. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        import trio

        from datastreamer.server.server import outside_of_loops

        def finish() -> None:
            trio.from_thread.run(self._relay.finish, trio_token=self._token)

        try:
            if self._failure is None:
                outside_of_loops(finish)
        except (trio.RunFinishedError, trio.Cancelled):
            pass
        finally:
            self._cancel()
            self._thread.join()

    def _cancel(self) -> None:
        import trio

        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)

    def _run(self) -> None:
        import trio

        async def main() -> None:
            self._token = trio.lowlevel.current_trio_token()
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._addresses = await nursery.start(self._relay.run)
                    self._ready.set()

        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller is told
            while inner := getattr(error, "exceptions", ()):
                error = inner[0]
            self._failure = error
        finally:
            self._ready.set()

    def __enter__(self) -> BlockingRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
