"""A consumer's turns, without a loop: what may be saved when."""

from __future__ import annotations

from datastreamer._codec import scan
from datastreamer.consumer.state import Arrived, Begun, ConsumerState
from datastreamer.position import Position
from datastreamer.reassembly import Malformed, PayloadComplete, pack_message
from datastreamer.reassembly.merge import Merge
from tests.oracle import pack
from tests.reassembly.generated import name, records


def test_between_the_events_of_one_message_nothing_is_saved() -> None:
    """Its payload has not been given yet, and would not come again."""
    merge = Merge(["a"])
    state = ConsumerState(merge, ["a"])
    messages = [
        (name(1) + b"1", b"x"),
        (name(1) + b"2", b"one too many"),
        (name(0), records((name(1), 1))),
    ]
    entries = [pack(at, 0x10, pack_message(*each)) for at, each in enumerate(messages)]
    state.arrive(Begun("a", Position(0)), 0.0)
    state.arrive(Arrived("a", scan(b"".join(entries[:2])), Position(2)), 0.0)
    assert state.next_event() is None
    state.arrive(Arrived("a", scan(entries[2]), Position(3)), 0.0)
    assert isinstance(state.next_event(), Malformed)
    # The callback that is notified raises, or is cancelled.
    assert state.to_save(0.0, at_end=True) is None
    assert isinstance(state.next_event(), PayloadComplete)
    state.given()
    progress = state.to_save(0.0)
    assert progress is not None
    assert progress.places["a"].position == 3
    assert [own for own, _ in progress.known] == [name(0)[1:]]
