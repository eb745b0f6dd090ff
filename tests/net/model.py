"""What a server must answer, said once more with `struct` alone.

A `Model` is a stream, a `Conversation` one client's connection to it: bytes in, the
exact bytes out. No sockets, no clocks, nothing of the package.
"""

from __future__ import annotations

import struct

from tests.oracle import lay_out

BOOKMARK = 0xB0
PAGE = 1 << 20
TEXTS = {
    0: b"OK",
    1: b"Already started",
    2: b"Already stopped",
    3: b"Bad from entry",
    4: b"Bad from bookmark",
    9: b"Invalid command",
}


def result(number: int) -> bytes:
    text = TEXTS[number]
    return struct.pack(">BII", 0xFF, 9 + len(text), number) + text


OK = result(0)
NOT_FOUND = OK + struct.pack(">BIIQ", 0xFE, 17, 0xFFFFFFFF, 0)


def start(number: int, stream_type: int = 1) -> bytes:
    return struct.pack(">QQQ", 1, stream_type, number)


def stop(stream_type: int = 1) -> bytes:
    return struct.pack(">QQ", 2, stream_type)


def header(stream_type: int = 1) -> bytes:
    return struct.pack(">QQ", 3, stream_type)


def start_bookmark(key: bytes, stream_type: int = 1) -> bytes:
    return struct.pack(">QQI", 4, stream_type, len(key)) + key


def entry(number: int, stream_type: int = 1) -> bytes:
    return struct.pack(">QQQ", 5, stream_type, number)


def bookmark(key: bytes, stream_type: int = 1) -> bytes:
    return struct.pack(">QQI", 6, stream_type, len(key)) + key


def unknown(command: int = 99, stream_type: int = 1) -> bytes:
    return struct.pack(">QQ", command, stream_type)


def pack(number: int, kind: int, data: bytes, packet: int = 2) -> bytes:
    return struct.pack(">BIIQ", packet, 17 + len(data), kind, number) + data


def packets(data: bytes) -> list[bytes]:
    """The packets in `data`, which must be whole."""
    found, at = [], 0
    while at < len(data):
        size = struct.unpack_from(">I", data, at + 1)[0]
        assert data[at] in (1, 2, 0xFE, 0xFF), f"packet type {data[at]} at byte {at}"
        assert at + size <= len(data), f"the packet at byte {at} is cut off"
        found.append(data[at : at + size])
        at += size
    return found


class Model:
    """A stream: the committed entries as (type, data), and what an operation holds."""

    def __init__(self, content: bytes = b"") -> None:
        self.entries: list[tuple[int, bytes]] = []
        self.pending: list[tuple[int, bytes]] = []
        self.version, self.system_id, self.stream_type, self.total_length = 1, 0, 1, 4096
        if content:
            fields = struct.unpack_from(">BQQQ", content, 21)
            self.version, self.system_id, self.stream_type, self.total_length = fields
            offset = 4096
            while offset < self.total_length:
                if content[offset] == 0:
                    offset += PAGE - (offset - 4096) % PAGE
                    continue
                packet, length, kind, number = struct.unpack_from(">BIIQ", content, offset)
                assert (packet, number) == (2, len(self.entries))
                self.entries.append((kind, content[offset + 17 : offset + length]))
                offset += length

    def commit(self) -> None:
        _, self.total_length = lay_out(self.pending, self.total_length, len(self.entries))
        self.entries += self.pending
        self.pending = []

    def truncate(self, number: int) -> None:
        kept = self.entries[:number]
        _, length = lay_out([*kept, self.entries[number]], 4096, 0)
        self.total_length = length - 17 - len(self.entries[number][1])
        self.entries = kept

    def header(self) -> bytes:
        fields = (self.version, self.system_id, self.stream_type)
        return struct.pack(">BIBQQQQ", 1, 38, *fields, self.total_length, len(self.entries))

    def packed(self, start: int = 0, stop: int | None = None) -> bytes:
        numbered = enumerate(self.entries[start:stop], start)
        return b"".join(pack(number, kind, data) for number, (kind, data) in numbered)

    def number_of(self, key: bytes) -> int | None:
        found = [
            n for n, (kind, data) in enumerate(self.entries) if (kind, data) == (BOOKMARK, key)
        ]
        return found[-1] if found else None


class Conversation:
    """One connection. `sent` is how far a streaming client has been given the entries.

    `closed` by the server, `dropped` where that is without a Result.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.unread = b""
        self.streaming = False
        self.sent = 0
        self.closed = self.dropped = False

    def moved(self) -> bytes:
        """What a streaming client is sent now that something was committed."""
        if not self.streaming or self.closed:
            return b""
        news = self.model.packed(self.sent)
        self.sent = len(self.model.entries)
        return news

    def feed(self, data: bytes) -> bytes:
        """What the server answers to these bytes, all of it."""
        self.unread += data
        answer = b""
        while not self.closed and len(self.unread) >= 16:
            command, stream_type = struct.unpack_from(">QQ", self.unread)
            if stream_type != self.model.stream_type:
                self.closed = self.dropped = True
                break
            known = 1 <= command <= 6
            if command == 2 and self.streaming:
                answer += OK
                self.streaming = False
            elif command == 2 or (known and self.streaming):
                self.closed = True
                return answer + result(2 if command == 2 else 1)
            elif not known:
                answer += result(9)
            elif command == 3:
                answer += OK + self.model.header()
            else:
                size = self._size(command)
                if size is None:
                    break
                answer += self._asked(command, self.unread[size[0] : size[1]])
                self.unread = self.unread[size[1] :]
                continue
            self.unread = self.unread[16:]
        return answer

    def _size(self, command: int) -> tuple[int, int] | None:
        """Where the command's parameter stands; None while it is not all there."""
        if command in (1, 5):
            return (16, 24) if len(self.unread) >= 24 else None
        if len(self.unread) < 20:
            return None
        (length,) = struct.unpack_from(">I", self.unread, 16)
        if not 1 <= length <= 16:
            self.closed = self.dropped = True
            return None
        return (20, 20 + length) if len(self.unread) >= 20 + length else None

    def _asked(self, command: int, parameter: bytes) -> bytes:
        entries = self.model.entries
        if command in (1, 5):
            (number,) = struct.unpack(">Q", parameter)
        else:
            found = self.model.number_of(parameter)
            if found is None:
                return result(4) if command == 4 else NOT_FOUND
            number = found
        if command in (1, 4):
            if number > len(entries):
                return result(3)
            self.streaming, self.sent = True, number
            return OK + self.moved()
        if command == 6:
            while number < len(entries) and entries[number][0] == BOOKMARK:
                number += 1
        if number >= len(entries):
            return NOT_FOUND
        return OK + pack(number, *entries[number], packet=0xFE)
