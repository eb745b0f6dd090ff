"""How far a client was promised entries."""

from __future__ import annotations

from datastreamer.server.streaming.send_bounds import SendBounds
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.spans import Cursor


def test_a_commit_that_was_announced_is_sent_to_its_end() -> None:
    """Else it would be announced again, in the middle of it."""
    bounds = SendBounds()
    bounds.to_stream(0, commits=True)
    assert not bounds.has_more(0)
    bounds.announce(Head(5000, 7))
    assert [bounds.has_more(number) for number in (0, 6, 7)] == [True, True, False]


def test_a_part_has_more_until_its_end_is_taken_away() -> None:
    bounds = SendBounds()
    bounds.to_stream(0, commits=False)
    assert not bounds.has_more(3)
    bounds.to_send_part(Cursor(5000, 7))
    assert bounds.has_more(3)
    bounds.bound = None
    assert not bounds.has_more(3)
