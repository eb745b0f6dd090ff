"""The server's side of a connection: a client's bytes in, its commands out.

Owns the order of checks, and what a refusal does to the connection. Must not know the stream
(sessions find entries and bookmarks), sockets or clocks.

A request is checked as early as the protocol allows: stream type, command number and state on its
first 16 bytes; a bookmark's length as soon as it has arrived.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from datastreamer.format import (
    COMMAND_AUTHENTICATE,
    COMMAND_HEAD_SIZE,
    COMMAND_PUBLISH,
    COMMAND_PUBLISH_WHERE,
    COMMAND_STOP,
    RESULT_ALREADY_STARTED,
    RESULT_ALREADY_STOPPED,
    RESULT_INVALID_COMMAND,
    RESULT_NO_LEASE,
)
from datastreamer.protocol._queries import queries_in
from datastreamer.protocol.commands import (
    LAYOUTS,
    BookmarkQuery,
    Command,
    EntryQuery,
    HeaderQuery,
    Stop,
    decode_command,
)
from datastreamer.protocol.publish.messages import PublishQuery, Wrong, decode_publish

if TYPE_CHECKING:
    from datastreamer.protocol._queries import Asked

_HEAD: Final = struct.Struct(">QQ")
# The first bytes of TLS, of any version since SSL 3.
_TLS_RECORD: Final = b"\x16\x03"


@dataclass(frozen=True, slots=True)
class Refuse:
    """Send the Result `number`; then close the connection if `close`."""

    number: int
    close: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the connection without a Result. The log shows `reason`, and counts by `kind`."""

    reason: str
    kind: str = field(default="protocol", compare=False)
    answer: bytes = b""


@dataclass(frozen=True, slots=True)
class End:
    """The client closed its sending side: close the connection."""


Event: TypeAlias = Command | PublishQuery | Refuse | Drop | End

_HTTP_REQUEST: Final = re.compile(rb"(GET|HEAD|POST|PUT|OPTIONS|DELETE|CONNECT|PRI) ")
_NO_HTTP_TEXT: Final = (
    b"this is the port of a stream's protocol, not of HTTP: serve --http-port has the stream for "
    b"HTTP, serve --metrics-port the metrics\n"
)
_NO_HTTP: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_NO_HTTP_TEXT), _NO_HTTP_TEXT)
)
_STOP: Final = Stop()
_END: Final = End()
_REFUSE_STARTED: Final = Refuse(RESULT_ALREADY_STARTED, close=True)
_REFUSE_STOPPED: Final = Refuse(RESULT_ALREADY_STOPPED, close=True)
_REFUSE_COMMAND: Final = Refuse(RESULT_INVALID_COMMAND, close=False)


def query_of(asked: Asked) -> EntryQuery | BookmarkQuery | HeaderQuery:
    """One of `ServerConnection.queries` as an event."""
    if isinstance(asked, int):
        return EntryQuery(asked)
    return BookmarkQuery(asked) if isinstance(asked, bytes) else asked


class ServerConnection:
    """The state of one client's connection.

    Pass bytes to `receive`, then call `next_event` until it returns None; process each event
    before the next call, since what is allowed depends on `streaming`, which `started` and
    `stopped` change. `queries` and `took` are a shorter way for the most frequent ones. After a
    `Refuse` that closes, a `Drop` or an `End`, no event follows.
    """

    __slots__ = ("_at", "_authenticating", "_buffer", "_closed", "_ended", "_found", "_publishing",
                 "_stream_type", "streaming")  # fmt: skip

    def __init__(
        self, stream_type: int, *, publishing: bool = False, authenticating: bool = False
    ) -> None:
        # Whether publishers' commands are allowed, and whether clients may authenticate.
        self._publishing = publishing
        self._authenticating = authenticating
        self.streaming = False
        self._stream_type = stream_type
        self._buffer = b""
        self._at = 0
        # The number of the last `queries`, and where they end.
        self._found = 0, 0
        self._ended = False
        self._closed = False

    @property
    def pending(self) -> int:
        """Bytes received and not yet returned as events: incomplete or further commands.

        `receive` accepts any number; a session that needs a bound stops reading from its socket
        while events remain.
        """
        return len(self._buffer) - self._at

    def started(self) -> None:
        """A Start was answered OK: the connection streams."""
        self.streaming = True

    def stopped(self) -> None:
        """A Stop was answered: the connection no longer streams."""
        self.streaming = False

    def receive(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes of the client; empty: it closed its sending side."""
        if not data:
            self._ended = True
        elif self._closed:
            pass
        elif self._at == len(self._buffer):
            self._buffer = bytes(data)
            self._at = 0
        else:
            self._buffer = b"".join((self._buffer[self._at :], data))
            self._at = 0

    def queries(self, most: int) -> list[Asked]:
        """The client's next commands as far as they are queries that are allowed now, up to `most`:
        the number of an entry, the key of a bookmark, or a `HeaderQuery`. After it call `took`."""
        if self.streaming or self._closed:
            self._found = 0, self._at
            return []
        found, end = queries_in(self._buffer, self._at, self._stream_type, most)
        self._found = len(found), end
        return found

    def took(self, count: int) -> None:
        """The first `count` of the last `queries` were answered: they are no events any more."""
        found, end = self._found
        if count < found:
            _, end = queries_in(self._buffer, self._at, self._stream_type, count)
        self._at = end

    def next_event(self) -> Event | None:
        """The client's next command, or what to do instead; None until more bytes arrive."""
        buffer, at = self._buffer, self._at
        have = len(buffer) - at
        if have < COMMAND_HEAD_SIZE or self._closed:
            return self._wait()
        command, stream_type = _HEAD.unpack_from(buffer, at)
        if stream_type != self._stream_type:
            if buffer[at : at + 2] == _TLS_RECORD:
                return self._drop("it uses TLS, which this port does not", "no TLS here")
            if _HTTP_REQUEST.match(buffer, at):
                self._close()
                return Drop("it uses HTTP, which this port does not", "no HTTP here", _NO_HTTP)
            reason = f"stream type {stream_type}, but {self._stream_type} is served"
            return self._drop(reason, "stream type")
        if command == COMMAND_STOP:
            if not self.streaming:
                return self._refuse(_REFUSE_STOPPED)
            self._at = at + COMMAND_HEAD_SIZE
            return _STOP
        if self._publishing and COMMAND_PUBLISH <= command <= COMMAND_PUBLISH_WHERE:
            return self._publish(command)
        if command not in LAYOUTS or (command == COMMAND_AUTHENTICATE and not self._authenticating):
            self._at = at + COMMAND_HEAD_SIZE
            return _REFUSE_COMMAND
        if self.streaming:
            return self._refuse(_REFUSE_STARTED)
        try:
            found = decode_command(command, buffer, at + COMMAND_HEAD_SIZE)
        except ValueError as error:
            return self._drop(str(error))
        if found is None:
            return self._wait()
        event, self._at = found
        return event

    def _publish(self, command: int) -> Event | None:
        if self.streaming:
            return self._refuse(_REFUSE_STARTED)
        if command != COMMAND_PUBLISH:
            return self._refuse(Refuse(RESULT_NO_LEASE, True, "request the lease first"))
        found = decode_publish(self._buffer, self._at + COMMAND_HEAD_SIZE)
        if found is None:
            return self._wait()
        if isinstance(found, Wrong):
            return self._refuse(Refuse(found.number, True, found.why))
        query, self._at = found
        return query

    def hand_over(self) -> bytes:
        """The bytes received after the last event; this object receives no more."""
        left = self._buffer[self._at :]
        self._close()
        return left

    def _wait(self) -> Event | None:
        if not self._ended or self._closed:
            return None
        self._close()
        return _END

    def _refuse(self, refusal: Refuse) -> Event:
        self._close()
        return refusal

    def _drop(self, reason: str, kind: str = "protocol") -> Event:
        self._close()
        return Drop(reason, kind)

    def _close(self) -> None:
        self._closed = True
        self._buffer = b""
        self._at = 0
