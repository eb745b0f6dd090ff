"""Recorded conversations, and a small model of a server that answers them as it should.

The model is a stream in memory (`Model`) and a session that knows nothing but
`ServerConnection` and that stream (`Session`). What it says to the commands of a
conversation is what any server of ours should say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from datastreamer.format import (
    ENTRY_HEAD_SIZE,
    ENTRY_HEAD_STRUCT,
    HEADER_OFFSET,
    HEADER_PAGE_SIZE,
    PACKET_ANSWER,
    PACKET_ENTRY,
    PAGE_SIZE,
    RESULT_BAD_FROM_BOOKMARK,
    RESULT_BAD_FROM_ENTRY,
    RESULT_BAD_TO_BOOKMARK,
    TYPE_BOOKMARK,
    Header,
    page_of,
    page_start,
)
from datastreamer.protocol.commands import (
    BookmarkQuery,
    EntryQuery,
    HeaderQuery,
    RangeQuery,
    Start,
    StartBookmark,
    Stop,
)
from datastreamer.protocol.messages import NOT_FOUND, OK, encode_result
from datastreamer.protocol.server import Drop, End, Refuse, ServerConnection
from tests.conftest import Golden, make_data

Step = dict[str, Any]
Cut = Callable[[bytes], Iterable[bytes]]


def whole(data: bytes) -> Iterable[bytes]:
    return [data]


def bytewise(data: bytes) -> Iterable[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


class Model:
    """A stream: committed entries, packed, with their file offsets; and an open operation."""

    def __init__(self, golden: Golden, name: str) -> None:
        content = golden.content(name)
        self.header = Header.unpack(content[HEADER_OFFSET:])
        self.length = HEADER_PAGE_SIZE
        self.entries: list[tuple[int, bytes]] = []
        self.operation: list[bytes] = []
        self.sessions: list[Session] = []
        for row in golden.entries(name):
            # A truncation may have left room in a page that an entry would fit in.
            self.length = row["offset"]
            self._append(content[self.length : self.length + row["length"]])
        assert self.current_header() == self.header

    def current_header(self) -> Header:
        return self.header._replace(total_length=self.length, total_entries=len(self.entries))

    def _append(self, packed: bytes) -> None:
        if self.length + len(packed) > page_start(page_of(self.length) + 1):
            self.length = page_start(page_of(self.length) + 1)
        self.entries.append((self.length, packed))
        self.length += len(packed)

    def play(self, operation: dict[str, Any]) -> None:
        """One of the recorded operations of a server's program."""
        kind = operation["op"]
        if kind in ("entry", "bookmark"):
            number = len(self.entries) + len(self.operation)
            assert number == operation["result"]["number"]
            entry_type = TYPE_BOOKMARK if kind == "bookmark" else operation["type"]
            data = make_data(operation["data"])
            head = ENTRY_HEAD_STRUCT.pack(
                PACKET_ENTRY, ENTRY_HEAD_SIZE + len(data), entry_type, number
            )
            self.operation.append(head + data)
        elif kind == "commit":
            for packed in self.operation:
                self._append(packed)
            self.operation = []
            for session in self.sessions:
                session.pump()
        elif kind == "rollback":
            self.operation = []
        elif kind == "truncate":
            self.length = self.entries[operation["entry"]][0]
            del self.entries[operation["entry"] :]
            for session in self.sessions:
                session.truncated()
        elif kind == "update":
            offset, packed = self.entries[operation["entry"]]
            data = make_data(operation["data"])
            self.entries[operation["entry"]] = (offset, packed[:ENTRY_HEAD_SIZE] + data)
        else:
            assert kind == "start_op"
            assert not self.operation

    def type_of(self, number: int) -> int:
        return int.from_bytes(self.entries[number][1][5:9], "big")

    def bookmark(self, key: bytes) -> int | None:
        for number in reversed(range(len(self.entries))):
            if (
                self.type_of(number) == TYPE_BOOKMARK
                and self.entries[number][1][ENTRY_HEAD_SIZE:] == key
            ):
                return number
        return None

    def packed_from(self, number: int) -> bytes:
        return b"".join(packed for _, packed in self.entries[number:])


class Session:
    """One connection: what it has sent since it was last asked, and whether it is closed."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.connection = ServerConnection(model.header.stream_type)
        self.sent = bytearray()
        self.closed = False
        self.last: object = None
        self.cursor: int | None = None
        model.sessions.append(self)

    def take_sent(self) -> bytes:
        sent = bytes(self.sent)
        self.sent.clear()
        return sent

    def receive(self, data: bytes) -> None:
        self.connection.receive(data)
        while (event := self.connection.next_event()) is not None:
            self.last = event
            self.answer(event)

    def answer(self, event: object) -> None:
        match event:
            case HeaderQuery():
                self.sent += OK + self.model.current_header().pack()
            case EntryQuery(number):
                self.answer_entry(number if number < len(self.model.entries) else None)
            case BookmarkQuery(key):
                self.answer_entry(self.first_event(self.model.bookmark(key)))
            case Start(from_entry):
                known = from_entry <= len(self.model.entries)
                self.start(from_entry if known else None, RESULT_BAD_FROM_ENTRY)
            case StartBookmark(key):
                self.start(self.model.bookmark(key), RESULT_BAD_FROM_BOOKMARK)
            case RangeQuery(first, last):
                self.range(self.model.bookmark(first), self.model.bookmark(last))
            case Stop():
                self.sent += OK
                self.connection.stopped()
                self.cursor = None
            case Refuse(number, close):
                self.sent += encode_result(number)
                self.closed = close
            case Drop() | End():
                self.closed = True
            case _:
                raise AssertionError(event)

    def first_event(self, number: int | None) -> int | None:
        if number is None:
            return None
        events = range(number, len(self.model.entries))
        return next((n for n in events if self.model.type_of(n) != TYPE_BOOKMARK), None)

    def answer_entry(self, number: int | None) -> None:
        self.sent += OK
        if number is None:
            self.sent += NOT_FOUND
        else:
            self.sent += bytes([PACKET_ANSWER]) + self.model.entries[number][1][1:]

    def range(self, first: int | None, last: int | None) -> None:
        if first is None:
            self.sent += encode_result(RESULT_BAD_FROM_BOOKMARK)
        elif last is None or last < first:
            self.sent += encode_result(RESULT_BAD_TO_BOOKMARK)
        else:
            self.sent += OK + last.to_bytes(8, "big")
            self.sent += b"".join(packed for _, packed in self.model.entries[first : last + 1])

    def start(self, number: int | None, refusal: int) -> None:
        if number is None:
            self.sent += encode_result(refusal)
            return
        self.sent += OK
        self.connection.started()
        self.cursor = number
        self.pump()

    def pump(self) -> None:
        if self.cursor is not None and not self.closed:
            self.sent += self.model.packed_from(self.cursor)
            self.cursor = len(self.model.entries)

    def truncated(self) -> None:
        if self.cursor is not None and self.cursor > len(self.model.entries):
            self.closed = True


def is_about_ranges(conversation: list[Step]) -> bool:
    """Whether a client asks for command 7, which one fork knows."""
    return any(step["send_hex"].startswith("0000000000000007") for step in conversation)


def read_as_length_0(step: Step) -> bool:
    """Whether what is sent ends as a bookmark's length of 0, on which ours closes."""
    return step["name"] == "small/range-16-bytes-alone" and step["step"] == 1


def packets(data: bytes) -> list[bytes]:
    """Cut what a server sent into packets: all have their length in bytes 1 to 4."""
    found, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at + 1 : at + 5], "big")
        assert 0 < length <= len(data) - at <= 20 * PAGE_SIZE
        found.append(data[at : at + length])
        at += length
    return found
