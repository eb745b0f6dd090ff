"""Publishing against a model: lost bytes, lost acknowledgements and restarts in any order.

Without sockets and tasks: the publisher's side, the parser of the server's and its operations on
a real file, driven step by step.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datastreamer.errors import DatastreamerError, NotWritten, ProtocolViolation, SourceBusy
from datastreamer.format import FEATURE_PUBLISH, RESULT_NOT_WRITTEN, RESULT_SOURCE_BUSY
from datastreamer.protocol.messages import OK, Capabilities
from datastreamer.protocol.publish.messages import (
    Add,
    AnswerParser,
    Commit,
    Lease,
    PublishQuery,
    Receipt,
    RequestParser,
    Wrong,
    decode_publish,
    encode_lease,
    encode_publish,
    encode_receipt,
    encode_refusal,
    encode_where,
)
from datastreamer.protocol.publish.publisher import Outgoing, SourceConnection, SourceTerms
from datastreamer.server.publish.apply import OperationRefused, PublishedOperation, commit_together
from datastreamer.storage.stream import DataStream

Item = tuple[int, bytes]
BOOKMARK = 0xB0
ID = b"i" * 16
CAPABILITIES = OK + Capabilities(features=FEATURE_PUBLISH).pack()
LEASE = Lease(1, 0, b"s" * 16, 30_000, 1 << 20, 4, 1 << 30)

items = st.one_of(
    st.tuples(st.integers(0, 5), st.binary(max_size=40)),
    st.tuples(st.just(BOOKMARK), st.binary(min_size=1, max_size=16)),
)
operations = st.lists(st.lists(items, max_size=4), min_size=1, max_size=8)


class Served:
    """A server's side of one connection; what it answers is acknowledged when it is on disk."""

    def __init__(self, stream: DataStream, together: bool) -> None:
        self.stream, self.lease, self.together = stream, object(), together
        self.parser = RequestParser(1)
        self.head = b""
        self.granted = False
        self.operation: PublishedOperation | None = None
        stream.parts.writer.lend(self.lease)

    def receive(self, data: bytes) -> bytes:
        if self.granted:
            self.parser.receive(data)
            return self.answer()
        self.head += data
        if len(self.head) < 16:
            return b""
        found = decode_publish(self.head, 32)
        if found is None:
            return CAPABILITIES if len(self.head) == 16 or len(self.head) - len(data) < 16 else b""
        assert not isinstance(found, Wrong)
        self.granted = True
        self.stream.sync()
        total = self.stream.total_entries
        said = encode_lease(Lease(1, total, b"s" * 16, 1000, 1 << 20, 5, 1 << 30))
        self.parser.receive(self.head[found[1] :])
        return said + self.answer()

    def answer(self) -> bytes:
        reported = b""
        commits: list[Commit] = []
        while (request := self.parser.next_request()) is not None:
            assert isinstance(request, (Add, Commit)), request
            if isinstance(request, Commit) and self.operation is None and self.together:
                commits.append(request)
                continue
            reported += self.one(request)
        if len(commits) > 1 and commit_together(self.stream, self.lease, commits) is not None:
            self.stream.sync()
            total = self.stream.total_entries
            return reported + b"".join(
                encode_receipt(Receipt(c.first, c.entries, total)) for c in commits
            )
        return reported + b"".join(map(self.one, commits))

    def one(self, request: Add | Commit) -> bytes:
        try:
            if self.operation is None:
                self.operation = PublishedOperation(self.stream, self.lease, request.first, 1 << 20)
            self.operation.add(request.payload)
            if isinstance(request, Add):
                return b""
            operation, self.operation = self.operation, None
            operation.commit(request.entries)
        except OperationRefused as refused:
            self.operation = None
            return refused.answer
        self.stream.sync()
        return encode_receipt(Receipt(request.first, request.entries, self.stream.total_entries))

    def end(self) -> None:
        self.stream.parts.writer.end_lease(self.lease)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=150)
@given(
    made=operations,
    cuts=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 400)), max_size=6),
    piece=st.integers(1, 200),
    together=st.booleans(),
    reopen=st.booleans(),
    ahead=st.integers(1, 5),
)
def test_each_operation_is_there_once(
    made: list[list[Item]],
    cuts: list[tuple[int, int]],
    piece: int,
    together: bool,
    reopen: bool,
    ahead: int,
) -> None:
    """Connection n passes this many bytes to the server, and this many of its answers."""
    source = SourceConnection(SourceTerms(1, ID))
    waiting = list(made)
    receipts = 0
    with folder() as at:
        stream = DataStream.create(at / "s.bin", sync="os", index="memory")
        try:
            for limits in [*cuts, (1 << 40, 1 << 40)]:
                up, down = limits
                if reopen:
                    stream.close()
                    stream = DataStream.open(at / "s.bin", sync="os", index="memory")
                served = Served(stream, together)
                source.begin("the server")
                while True:
                    if source.granted:
                        while waiting and len(source.underway) < ahead:
                            operation = Outgoing(source.next_entry)
                            for kind, data in waiting.pop(0):
                                if kind == BOOKMARK:
                                    operation.add_bookmark(data)
                                else:
                                    operation.add_entry(kind, data)
                            source.put(operation)
                    data = source.take()[:up]
                    if not data:
                        break
                    up -= len(data)
                    for start in range(0, len(data), piece):
                        answer = served.receive(data[start : start + piece])[:down]
                        down -= len(answer)
                        for byte in range(0, len(answer), 7):
                            source.receive(answer[byte : byte + 7])
                served.end()
                receipts = len(made) - len(waiting) - len(source.underway)
                # What was acknowledged is there, whatever comes.
                acknowledged = [item for op in made[:receipts] for item in op]
                stored = [(e.type, e.data) for e in stream.entries()]
                assert stored[: len(acknowledged)] == acknowledged
            assert not waiting
            assert not source.underway
            assert stored == [item for op in made for item in op]
            assert source.failure is None
        finally:
            stream.close()


@settings(max_examples=100)
@given(made=operations, cut=st.integers(0, 20), change=st.booleans())
def test_entries_that_are_lost_or_replaced_are_noticed(
    made: list[list[Item]], cut: int, change: bool
) -> None:
    """A history that was truncated during a source's lease: never another one in its place."""
    flat = [item for op in made for item in op]
    cut = min(cut, len(flat))
    with folder() as at, DataStream.create(at / "s.bin", sync="os", index="memory") as stream:
        lease = object()
        stream.parts.writer.lend(lease)
        requests = []
        first = 0
        for op in made:
            operation = Outgoing(first)
            for kind, data in op:
                if kind == BOOKMARK:
                    operation.add_bookmark(data)
                else:
                    operation.add_entry(kind, data)
            requests += operation.requests(1)
            first = operation.next_number
        parser = RequestParser(1)
        parser.receive(b"".join(requests))
        commits = [r for r in iter(parser.next_request, None) if isinstance(r, Commit)]
        for commit in commits:
            made_one = PublishedOperation(stream, lease, commit.first, 1 << 20)
            made_one.add(commit.payload)
            made_one.commit(commit.entries)
        stream.parts.writer.end_lease(lease)
        stream.sync()
        if cut < len(flat):
            stream.truncate(cut)
        if change and cut < len(flat):
            with stream.atomic_op() as op:
                op.add_entry(7, b"of another history")
        stream.parts.writer.lend(lease)
        for commit in commits:
            end, refused = stream.parts.writer.next_entry, 0
            try:
                again = PublishedOperation(stream, lease, commit.first, 1 << 20)
                again.add(commit.payload)
                again.commit(commit.entries)
            except OperationRefused as error:
                refused = error.number
            if commit.first > end:
                assert refused == 20
            elif refused:
                assert refused == 21
                assert commit.first + commit.entries > cut
        stream.sync()
        stored = [(e.type, e.data) for e in stream.entries()]
        if change and cut < len(flat):
            assert stored[cut] == (7, b"of another history")
        assert stored[:cut] == flat[:cut]


# What cannot be read.


@given(data=st.binary(max_size=300), piece=st.integers(1, 50))
def test_any_bytes_are_read_or_refused(data: bytes, piece: int) -> None:
    for whole in (data, b"\x00" * 6 + b"\x10\x11" + b"\x00" * 7 + b"\x01" + data):
        parser, at_once = RequestParser(1), RequestParser(1)
        at_once.receive(whole)
        wanted = list(iter(at_once.next_request, None))
        found = []
        for at in range(0, len(whole), piece):
            parser.receive(whole[at : at + piece])
            found += list(iter(parser.next_request, None))
        assert found == wanted
        assert sum(isinstance(request, Wrong) for request in found) <= 1


@given(data=st.binary(max_size=200), at=st.integers(0, 120))
def test_any_answer_is_understood_or_ends_it(data: bytes, at: int) -> None:
    good = CAPABILITIES + encode_lease(Lease(1, 0, b"s" * 16, 1000, 1 << 20, 5, 1 << 30))
    source = SourceConnection(SourceTerms(1, ID))
    source.begin("the server")
    source.take()
    try:
        source.receive(good[:at] + data or b"x")
        source.take()
    except DatastreamerError:
        assert source.over or not data or source.failure is None
    parser = AnswerParser("the server")
    parser.receive(data)
    with contextlib.suppress(ProtocolViolation):
        while parser.next_answer(Receipt) is not None:
            pass


@given(st.binary(max_size=1100), st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 32) - 1))
def test_a_request_for_the_lease_is_read_as_it_was_made(
    token: bytes, epoch: int, lease_ms: int
) -> None:
    query = PublishQuery(ID, epoch, lease_ms, token[:1024])
    sent = encode_publish(7, query)
    for size in range(16, len(sent), 13):
        assert decode_publish(sent[:size], 16) is None
    assert decode_publish(sent, 16) == (query, len(sent))
    assert token[:1024] not in repr(query).encode() or len(token) < 6


def granted() -> SourceConnection:
    """A source that has the lease, and nothing underway."""
    source = SourceConnection(SourceTerms(1, ID))
    come_back(source)
    source.receive(encode_lease(LEASE))
    assert source.granted
    return source


def come_back(source: SourceConnection) -> None:
    """Another connection, up to where it has asked for the lease."""
    source.begin("the server")
    source.take()
    source.receive(CAPABILITIES)
    source.take()


def test_the_lease_is_renewed_while_an_answer_is_due() -> None:
    """To wait for a slow disk is silence, too."""
    source = granted()
    operation = Outgoing(0)
    operation.add_entry(3, b"x")
    source.put(operation)
    source.take()
    for _ in range(LEASE.most_underway - 1):
        source.ask_where()
        assert source.take() == encode_where(1)
    # No more than the server takes in before it answers.
    source.ask_where()
    assert source.take() == b""
    where = encode_receipt(Receipt(1, 0, 1))
    source.receive(encode_receipt(Receipt(0, 1, 1)) + where * (LEASE.most_underway - 1))
    assert not source.underway
    assert not source.asking


@pytest.mark.parametrize(
    ("number", "error"), [(RESULT_NOT_WRITTEN, NotWritten), (RESULT_SOURCE_BUSY, SourceBusy)]
)
def test_a_lease_that_is_refused_for_now(number: int, error: type[Exception]) -> None:
    """A publisher that had the lease before requests it again; another one raises the error."""
    refusal = encode_refusal(number, "the disk is full, say")
    source = SourceConnection(SourceTerms(1, ID))
    come_back(source)
    with pytest.raises(error, match="the disk is full, say"):
        source.receive(refusal)
    assert source.over
    source = granted()
    operation = Outgoing(0)
    operation.add_entry(3, b"x")
    source.put(operation)
    come_back(source)
    with pytest.raises(error, match="the disk is full, say"):
        source.receive(refusal)
    assert not source.over
    come_back(source)
    source.receive(encode_lease(LEASE))
    assert source.take()
    source.receive(encode_receipt(Receipt(0, 1, 1)))
    assert not source.underway
