"""The gate at which a test holds a keeper's thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from datastreamer.storage.bookmarks import builder
from datastreamer.storage.bookmarks.builder import IndexBuilder
from tests.storage.bookmarks.keeping import Gate


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A catch-up indexes one page per transaction, and waits at the gate before each."""
    gate = Gate()
    chunk = IndexBuilder._catch_up_some

    def held(self: IndexBuilder) -> bool:
        gate.pass_by(self.thread)
        return chunk(self)

    monkeypatch.setattr(IndexBuilder, "_catch_up_some", held)
    monkeypatch.setattr(builder, "_CATCH_UP_BYTES", 1)
    yield gate
    gate.pass_all()
