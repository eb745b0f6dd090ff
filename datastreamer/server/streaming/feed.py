"""The pass over live clients that are sent entries in another form than TCP clients, or over TLS.

Owns who is in the pass. Reads and encodes each piece once for all members with the same form and
cursor. A member leaves the pass for its own task if its connection accepts less than a piece. The
bytes of a piece are sent in the turn in which they were read only, and only to members whose cursor
is at its beginning. Knows no form, and no client but as a member.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import trio

from datastreamer.errors import UNREADABLE, NotFound
from datastreamer.server.streaming._feed_pass import fan_out
from datastreamer.server.streaming.turns import Turns
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.spans import Chunk, Cursor
from datastreamer.storage.stream import DataStream
from datastreamer.transport.server_stream import Buffer, Transport

# A pass runs at most this long before other tasks run: TCP clients come first.
_PASS_NS = 2_000_000


class Encoded(NamedTuple):
    """Entries in some form: `data` begins with `ahead` bytes that precede the entries."""

    data: Buffer
    ahead: int = 0


class FeedForm(Protocol):
    """How entries are written for some clients."""

    @property
    def most_bytes(self) -> int:
        """Bytes of the file in one piece, which has at least one entry."""

    def encode(self, stream: DataStream, entries: Chunk, end: Head) -> Encoded | None:
        """The entries, when the stream ends at `end`; None if each client is to be sent them by
        its own task."""


class FeedPiece(NamedTuple):
    """Encoded entries from `start` to `after`, read in this turn. Unless the form changes the
    entries, those in `data` begin at file offset `at`."""

    turn: int
    start: Cursor
    after: Cursor
    at: int
    data: Buffer
    ahead: int


class Member(Protocol):
    """One client, as the pass knows it."""

    cursor: Cursor
    transport: Transport

    def took(self, piece: FeedPiece, sent: int) -> bool:
        """Its connection accepted `sent` bytes of the piece, or failed (a negative number). False
        if it leaves the pass; it is woken then."""

    def wake(self) -> None:
        """It is not in the pass any more."""


class Feed:
    """The members, by form. `run` keeps the pass going."""

    def __init__(self, stream: DataStream, turns: Turns) -> None:
        self._stream = stream
        self._turns = turns
        self._members: dict[FeedForm, dict[Member, None]] = {}
        # The last piece of each form, which more members may be due in its turn.
        self._pieces: dict[FeedForm, FeedPiece] = {}
        self._news = trio.Event()

    def __len__(self) -> int:
        return sum(map(len, self._members.values()))

    def join(self, member: Member, form: FeedForm) -> None:
        """Let the pass send to a member, which waits until it is woken, or leaves."""
        self._members.setdefault(form, {})[member] = None
        self._news.set()

    def leave(self, member: Member) -> bool:
        """The member's own task sends again; whether it was in the pass."""
        for form, members in self._members.items():
            if member in members:
                del members[member]
                if not members:
                    del self._members[form]
                return True
        return False

    def wake(self) -> None:
        """There are new entries."""
        self._news.set()

    def dismiss(self) -> None:
        """Let all members continue by themselves."""
        self._dismiss([each for members in self._members.values() for each in members])

    def _dismiss(self, members: Iterable[Member]) -> None:
        for member in members:
            self.leave(member)
            member.wake()

    async def run(self) -> None:
        """Make a pass whenever there are new entries, forever."""
        while True:
            self._news = trio.Event()
            if self._pass(time.monotonic_ns() + _PASS_NS):
                await trio.lowlevel.checkpoint()
            else:
                await self._news.wait()

    def _pass(self, until: int) -> bool:
        """Send the next piece of each form; whether there may be more to send."""
        more = False
        for form in list(self._members):
            if form in self._members and self._send_next(form, until):
                more = True
                if time.monotonic_ns() > until:
                    # The others come first next time.
                    if form in self._members:
                        self._members[form] = self._members.pop(form)
                    break
        return more

    def _send_next(self, form: FeedForm, until: int) -> bool:
        """Send the members that have least what comes next; whether there may be more to send."""
        members = self._members[form]
        start = min((member.cursor for member in members), key=_number)
        end = self._stream.reader.head
        if start.number >= end.entries:
            return False
        piece = self._pieces.get(form)
        if piece is None or piece.start.number != start.number or not self._is_current(piece.turn):
            piece = self._pieces[form] = self._read(form, start, end)
            if not self._is_current(piece.turn):
                return False
        # From the last look at the stream to the sends no other task runs.
        due = self._due(form, piece.start)
        if piece.data:
            self._send(piece, due, until)
        else:
            self._dismiss(due)
        return True

    def _is_current(self, turn: int) -> bool:
        """Whether what was read in this turn may be sent. If not, all members are dismissed when
        the change is over."""
        try:
            return self._turns.is_at(turn)
        except (*UNREADABLE, OSError):
            self.dismiss()  # each meets the damage by itself
            return False

    def _due(self, form: FeedForm, start: Cursor) -> list[Member]:
        """The members that are due a piece which begins at `start`."""
        return [each for each in self._members[form] if each.cursor.number == start.number]

    def _read(self, form: FeedForm, start: Cursor, end: Head) -> FeedPiece:
        """The next piece, without data if the members' own tasks have to send it."""
        reader, turn = self._stream.reader, self._turns.now
        try:
            place = start if start.offset else reader.cursor(start.number)
            chunk = reader.chunk(place, form.most_bytes)
            encoded = form.encode(self._stream, chunk, end)
        except (*UNREADABLE, NotFound):
            encoded = None
        if encoded is None:
            return FeedPiece(turn, start, start, start.offset, b"", 0)
        return FeedPiece(turn, start, chunk.next, chunk.start, *encoded)

    def _send(self, piece: FeedPiece, due: list[Member], until: int) -> None:
        """Send the piece to these members, as many as there is time for: first to plain sockets."""
        fds = {each: fd for each in due if (fd := each.transport.socket_fd) is not None}
        if fds:
            budget = max(0, until - time.monotonic_ns())
            results = fan_out(list(fds.values()), piece.data, budget)
            for member, sent in zip(fds, results, strict=False):
                self._note(member, piece, sent)
            return
        for member in due:
            try:
                sent = member.transport.send_now(piece.data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                sent = -1
            self._note(member, piece, sent)
            if time.monotonic_ns() > until:
                return

    def _note(self, member: Member, piece: FeedPiece, sent: int) -> None:
        if not member.took(piece, sent):
            self._dismiss([member])


def _number(cursor: Cursor) -> int:
    return cursor.number
