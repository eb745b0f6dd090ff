"""Any bytes at all, to the server's side of the protocol: recorded commands, mutilated.

What is asserted of every input: nothing is raised, how the bytes are cut changes nothing, what
was understood says the same bytes again, and what is kept is never more than half a command.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from datastreamer.format import COMMAND_HEAD_SIZE, MAX_CLAUSES
from datastreamer.protocol.commands import (
    CommitStart,
    FilteredRead,
    FilteredStart,
    FilteredStartBookmark,
    FollowStart,
    Start,
    StartBookmark,
    Stop,
    decode_command,
    encode_command,
)
from datastreamer.protocol.server import Drop, End, Event, Refuse, ServerConnection
from tests.protocol.mutilated import RECORDED, TYPE, mutilated

STARTS = (Start, CommitStart, FollowStart, StartBookmark, FilteredStart, FilteredStartBookmark)
FILTERED = (FilteredRead, FilteredStart, FilteredStartBookmark)
LONGEST = COMMAND_HEAD_SIZE + 28 + 4 + 4 * MAX_CLAUSES


def played(pieces: list[bytes]) -> tuple[list[Event], ServerConnection]:
    """The events of a server that answers OK to each Start and Stop."""
    connection = ServerConnection(TYPE)
    events: list[Event] = []
    for piece in pieces:
        connection.receive(piece)
        while (event := connection.next_event()) is not None:
            events.append(event)
            if isinstance(event, STARTS):
                connection.started()
            elif isinstance(event, Stop):
                connection.stopped()
        assert connection.pending < LONGEST, "more than half a command is kept"
        assert not connection._closed or connection.pending == 0
    return events, connection


@settings(max_examples=600, deadline=None)
@given(data=mutilated() | st.binary(max_size=200), places=st.lists(st.integers(0, 400), max_size=8))
@example(data=b"".join(RECORDED)[:4096], places=[])
def test_any_bytes(data: bytes, places: list[int]) -> None:
    events, connection = played([data] if data else [])
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    assert played([data[a:b] for a, b in pairwise(bounds) if b > a])[0] == events
    assert played([data[at : at + 1] for at in range(len(data))])[0] == events

    at = 0
    for event in events[:-1] if connection._closed else events:
        if isinstance(event, Refuse):
            assert event == Refuse(9, close=False)
            at += COMMAND_HEAD_SIZE
        else:
            assert not isinstance(event, Drop | End)
            said = encode_command(event, TYPE)
            if isinstance(event, FILTERED):
                # The types may have been named in another order, and twice.
                command = int.from_bytes(data[at : at + 8], "big")
                found = decode_command(command, data, at + COMMAND_HEAD_SIZE)
                assert found is not None
                again, end = found
                assert again == event
                assert decode_command(command, said, COMMAND_HEAD_SIZE) == (event, len(said))
                assert len(said) <= end - at
                at = end
                continue
            assert data[at : at + len(said)] == said
            at += len(said)
    if connection._closed:
        last = events[-1]
        assert isinstance(last, Drop) or (isinstance(last, Refuse) and last.close)
        connection.receive(data)
        assert connection.next_event() is None
        assert connection.pending == 0
    else:
        assert connection.pending == len(data) - at
        connection.receive(b"")
        assert isinstance(connection.next_event(), End)
        assert connection._closed
