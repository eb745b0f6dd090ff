"""Servers that damaged pages are restored from, as `storage/pages/restore.py` asks them.

Owns the connections: one to each server, made at the first question. A server that does not answer
is not asked again until `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.upstream import Upstream
from datastreamer.errors import DatastreamerError, NoAnswer, PeerError
from datastreamer.format import STREAM_TYPE_SEQUENCER, Header
from datastreamer.protocol import exchanges
from datastreamer.protocol.commands import SumsQuery
from datastreamer.protocol.following import SumsFound
from datastreamer.storage.pages.hashes import Sum
from datastreamer.storage.pages.restore import packed_within

T = TypeVar("T")

# A server that sends nothing for this time is probed, and given up if it does not answer.
_PROBE_SECONDS = 10.0


class _SumsClient(BlockingClient):
    """Also requests checksums of pages."""

    def page_sums(self, pages: int) -> list[Sum]:
        """The checksums of the server's first whole pages, at most that many and up to the first
        that has none. Raises `PeerError` if the server does not send checksums."""
        if not self.capabilities().page_sums:
            raise PeerError(f"{self.peer} has no checksums on this connection")
        sums: list[Sum] = []
        while len(sums) < pages:
            query = SumsQuery(sums[-1][1] if sums else 0, pages - len(sums))
            found = self._driver.run(self._engine.ask(exchanges.ask, query, SumsFound)).pages
            if not found:
                break
            sums += found
        return sums


class ServerPeer:
    """A server of a stream, a `Peer`. A context manager that closes the connection."""

    only_proven = False

    def __init__(
        self,
        server: Upstream,
        *,
        stream_type: int = STREAM_TYPE_SEQUENCER,
        answer_within: float = 60.0,
    ) -> None:
        """`answer_within`: the maximum number of seconds for the answer to a question."""
        self.name = server.name
        self._server = server
        self._stream_type = stream_type
        self._answer_within = answer_within
        self._client: _SumsClient | None = None
        self._failure: DatastreamerError | None = None

    def __enter__(self) -> ServerPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; a later question makes another one. From another thread, a question
        in progress fails."""
        client, self._client, self._failure = self._client, None, None
        if client is not None:
            client.close()

    def header(self) -> Header:
        """Raises `NoAnswer` and other `DatastreamerError`s, as do the other questions."""
        return self._ask("the header", _SumsClient.header)

    def stream_id(self) -> bytes:
        return self._ask("the stream's id", lambda client: client.capabilities().stream_id)

    def page_sums(self, pages: int) -> list[Sum]:
        """The checksums of its first whole pages, at most that many and up to the first that has
        none."""
        return self._ask("the checksums", lambda client: client.page_sums(pages))

    def entries(self, first: int, stop: int, most: int) -> bytes:
        what = f"entries {first} to {stop - 1}"

        def received(client: _SumsClient) -> bytes:
            with client.batches(from_entry=first, stop=stop) as batches:
                return packed_within(most, batches, f"{self.name}: {what}")

        return self._ask(what, received)

    def _ask(self, what: str, question: Callable[[_SumsClient], T]) -> T:
        if self._failure is not None:
            raise self._failure
        try:
            if self._client is None:
                self._client = self._connected()
            return self._answered(what, question, self._client)
        except DatastreamerError as error:
            if isinstance(error, ConnectionError):
                self.close()
                self._failure = error
            raise

    def _connected(self) -> _SumsClient:
        server = self._server
        return _SumsClient(
            server.host,
            server.port,
            stream_type=self._stream_type,
            tls=server.tls,
            tls_server_name=server.tls_server_name,
            token=server.token,
            resume=False,
            heartbeat=_PROBE_SECONDS,
        )

    def _answered(self, what: str, question: Callable[[_SumsClient], T], client: _SumsClient) -> T:
        """The answer to one question. The time of a client is that of each wait: a server that
        sends a byte now and then, or has fewer entries than its header says, would be waited for
        without a limit."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            client.close()

        timer = threading.Timer(self._answer_within, give_up)
        timer.start()
        try:
            return question(client)
        except DatastreamerError as error:
            if not late.is_set():
                raise
            seconds = f"{self._answer_within:g} s"
            raise NoAnswer(f"{self.name}: {what} did not arrive in {seconds}") from error
        finally:
            timer.cancel()
            if late.is_set():
                self.close()
