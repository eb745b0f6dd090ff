"""Every client reads why a server whose copy of a page is damaged does not send its entries."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer._codec import Entry
from datastreamer.errors import ConnectionLost, EntriesDamaged
from datastreamer.protocol.retry import Backoff
from datastreamer.service.embedded import StreamServer
from tests.network.damage import A_PAGE, PAGES, flip, written
from tests.network.drivers import client_of_kind, kinds

BAD = 2
FIRST_BAD = BAD * A_PAGE
TOTAL = PAGES * A_PAGE + 3
WORDS = (
    rf"the server refused {{}}: Damaged: at byte \d+: page {BAD} \(entries {FIRST_BAD} to "
    rf"{FIRST_BAD + A_PAGE - 1}\): the entries do not match their checksum \(error 27\); the "
    "server's copy of these entries is damaged, and its other entries can be read: request these "
    "from another server; `datastreamer repair --from` restores them"
)


@pytest.fixture
def server(path: Path) -> Iterator[StreamServer]:
    written(path)
    flip(path, BAD)
    with StreamServer(path, host="127.0.0.1", port=0, create=False, in_process=True) as made:
        yield made


def gather(items: Any, seen: list[Entry]) -> None:
    for item in items:
        seen.extend([item] if isinstance(item, Entry) else item)


@kinds
def test_queries_are_refused_and_others_answered(kind: str, server: StreamServer) -> None:
    with client_of_kind(kind, "127.0.0.1", server.port, resume=False) as client:
        for _ in range(2):
            with pytest.raises(EntriesDamaged, match=WORDS.format(f"Entry {FIRST_BAD + 7}")):
                client.entry(FIRST_BAD + 7)
            with pytest.raises(EntriesDamaged, match=WORDS.format("Bookmark 0x6b6579")):
                client.bookmark(b"key")
            for types in (None, [1]):
                with pytest.raises(EntriesDamaged, match=f"page {BAD} "):
                    client.batch_read(FIRST_BAD, max_count=2, types=types)
            with pytest.raises(EntriesDamaged, match=f"page {BAD} "):
                gather(client.between_bookmarks(b"key", b"key"), [])
            assert client.entry(FIRST_BAD - 1).number == FIRST_BAD - 1
            for types in (None, [1]):
                before = client.batch_read(FIRST_BAD - 3, max_count=9, types=types)
                assert [each.number for each in before] == list(range(FIRST_BAD - 3, FIRST_BAD))
        with pytest.raises(EntriesDamaged, match=WORDS.format(f"Start from entry {FIRST_BAD}")):
            gather(client.batches(from_entry=FIRST_BAD), [])


@kinds
@pytest.mark.parametrize("options", [{}, {"types": [1]}], ids=["all", "types"])
def test_batches_end_before_the_damage(
    kind: str, options: dict[str, Any], server: StreamServer
) -> None:
    seen: list[Entry] = []
    with client_of_kind(kind, "127.0.0.1", server.port, resume=False) as client:
        with pytest.raises(EntriesDamaged, match=f"page {BAD} "):
            gather(client.read_batches(**options), seen)
        assert [each.number for each in seen] == list(range(FIRST_BAD))


@kinds
@pytest.mark.parametrize("options", [{"types": [1]}, {"commits": True}], ids=["types", "commits"])
def test_a_streaming_by_an_extension_ends_with_the_reason(
    kind: str, options: dict[str, Any], server: StreamServer
) -> None:
    seen: list[Entry] = []
    with client_of_kind(kind, "127.0.0.1", server.port, resume=False) as client:
        with pytest.raises(EntriesDamaged, match=f"page {BAD} "):
            gather(client.batches(from_entry=FIRST_BAD - 60, **options), seen)
        assert [each.number for each in seen] == list(range(FIRST_BAD - 60, FIRST_BAD))
        # The published protocol has no word for it.
        with pytest.raises(ConnectionLost):
            gather(client.batches(from_entry=FIRST_BAD - 60), [])


@kinds
@pytest.mark.parametrize("method", ["batches", "read_batches"])
def test_a_client_logs_the_reason_once_and_continues_after_the_repair(
    kind: str, method: str, server: StreamServer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It asks for the next entry alone, once a connection has brought nothing."""
    caplog.set_level(logging.WARNING, "datastreamer.client")
    seen: list[Entry] = []

    class Operator(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Damaged" in record.getMessage():
                flip(path, BAD)

    operator = Operator()
    logging.getLogger("datastreamer.client").addHandler(operator)
    try:
        address = "127.0.0.1", server.port
        with client_of_kind(kind, *address, backoff=Backoff(0.01, 0.01)) as client:
            gather(getattr(client, method)(stop=TOTAL), seen)
    finally:
        logging.getLogger("datastreamer.client").removeHandler(operator)
    assert [each.number for each in seen] == list(range(TOTAL))
    lines = [each.getMessage() for each in caplog.records if "Damaged" in each.getMessage()]
    [line] = [each for each in lines if each.startswith(f"127.0.0.1:{server.port}, trying again: ")]
    assert "another server" in line
