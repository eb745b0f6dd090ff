"""What a server must answer, written again with `struct` alone.

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
    5: b"Bad to bookmark",
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


def range_bookmark(first: bytes, last: bytes, stream_type: int = 1) -> bytes:
    head = struct.pack(">QQI", 7, stream_type, len(first)) + first
    return head + struct.pack(">I", len(last)) + last


def capabilities(stream_type: int = 1) -> bytes:
    return struct.pack(">QQ", 0x1000, stream_type)


def batch(number: int, count: int = 0, size: int = 0, wait: int = 0, stream_type: int = 1) -> bytes:
    return struct.pack(">QQQIII", 0x1001, stream_type, number, count, size, wait)


def unknown(command: int = 99, stream_type: int = 1) -> bytes:
    return struct.pack(">QQ", command, stream_type)


def pack(number: int, kind: int, data: bytes, packet: int = 2) -> bytes:
    return struct.pack(">BIIQ", packet, 17 + len(data), kind, number) + data


def packets(data: bytes) -> list[bytes]:
    """The packets in `data`, which must be whole."""
    found, at = [], 0
    while at < len(data):
        size = struct.unpack_from(">I", data, at + 1)[0]
        assert data[at] in (1, 2, 0xFB, 0xFD, 0xFE, 0xFF), f"packet type {data[at]} at byte {at}"
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
        self.stream_id, self.epoch = bytes(16), 0
        # The server's own limits of a batch.
        self.most_entries, self.most_bytes = 1 << 18, 4 << 20
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

    def capabilities(self) -> bytes:
        reported = (self.stream_id, self.epoch, self.most_entries, self.most_bytes)
        return struct.pack(">BIIQ16sQII", 0xFD, 49, 1, 955, *reported)

    def batch(self, number: int, count: int, size: int) -> bytes:
        """As many as the limits allow, one at least: what a server may answer, all of it."""
        total, found, payload = len(self.entries), 0, b""
        count = min(count or self.most_entries, self.most_entries)
        size = min(size or self.most_bytes, self.most_bytes)
        for kind, data in self.entries[number : number + count]:
            if found and len(payload) + 17 + len(data) > size:
                break
            payload += pack(number + found, kind, data)
            found += 1
        return struct.pack(">BIIQQ", 0xFB, 25 + len(payload), found, number, total) + payload

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
        # The request of a batch that waits for a commit.
        self.waiting: tuple[int, int, int] | None = None

    def moved(self) -> bytes:
        """What a streaming client is sent now that something was committed."""
        if not self.streaming or self.closed:
            return b""
        news = self.model.packed(self.sent)
        self.sent = len(self.model.entries)
        return news

    def woken(self) -> bytes:
        """The answer to a waiting client after the timeout, or when the stream has moved."""
        if self.waiting is None:
            return b""
        (number, count, size), self.waiting = self.waiting, None
        return self._batch(number, count, size) + self.feed(b"")

    def _batch(self, number: int, count: int, size: int) -> bytes:
        if number > len(self.model.entries):
            return result(3)
        return OK + self.model.batch(number, count, size)

    def feed(self, data: bytes) -> bytes:
        """What the server answers to these bytes, all of it."""
        self.unread += data
        answer = b""
        while not self.closed and not self.waiting and len(self.unread) >= 16:
            command, stream_type = struct.unpack_from(">QQ", self.unread)
            if stream_type != self.model.stream_type:
                self.closed = self.dropped = True
                break
            known = 1 <= command <= 7 or command in (0x1000, 0x1001)
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
            elif command == 0x1000:
                answer += OK + self.model.capabilities()
            elif command == 7:
                keys = self._keys()
                if keys is None:
                    break
                answer += self._range(*keys)
                continue
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
        """The command's parameter; None while it is incomplete."""
        if command in (1, 5):
            return (16, 24) if len(self.unread) >= 24 else None
        if command == 0x1001:
            return (16, 36) if len(self.unread) >= 36 else None
        if len(self.unread) < 20:
            return None
        (length,) = struct.unpack_from(">I", self.unread, 16)
        if not 1 <= length <= 16:
            self.closed = self.dropped = True
            return None
        return (20, 20 + length) if len(self.unread) >= 20 + length else None

    def _keys(self) -> tuple[bytes, bytes] | None:
        """The two keys of a range, taken; None while they are not all there."""
        found, at = [], 16
        for _ in range(2):
            if len(self.unread) < at + 4:
                return None
            (length,) = struct.unpack_from(">I", self.unread, at)
            if not 1 <= length <= 16:
                self.closed = self.dropped = True
                return None
            if len(self.unread) < at + 4 + length:
                return None
            found.append(self.unread[at + 4 : at + 4 + length])
            at += 4 + length
        self.unread = self.unread[at:]
        return found[0], found[1]

    def _range(self, first: bytes, last: bytes) -> bytes:
        start, end = self.model.number_of(first), self.model.number_of(last)
        if start is None:
            return result(4)
        if end is None or end < start:
            return result(5)
        return OK + struct.pack(">Q", end) + self.model.packed(start, end + 1)

    def _asked(self, command: int, parameter: bytes) -> bytes:
        entries = self.model.entries
        if command == 0x1001:
            number, count, size, wait = struct.unpack(">QIII", parameter)
            if number == len(entries) and wait:
                self.waiting = number, count, size
                return b""
            return self._batch(number, count, size)
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
