"""Files that are truncated while a command reads them are busy, not damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.cli.shared.file_source import FileSource
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from tests.cli.conftest import Invoke


def rewrite(stream: DataStream, size: int) -> None:
    """Replace entries that a reader has counted."""
    stream.truncate(1)
    with stream.atomic_op() as op:
        for number in range(100):
            op.add_entry(1, bytes(size + number))


@pytest.mark.parametrize(
    "words", [["bookmark", "key"], ["entry", "60"], ["info", "--json"], ["info"]], ids=" ".join
)
def test_a_file_that_is_rewritten_while_it_is_read(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    path = tmp_path / "stream.bin"
    with DataStream.create(path, index="memory") as stream:
        with stream.atomic_op() as op:
            op.add_entries(1, [b"x" * 5000] * 500)
        real = FileSource.__enter__

        def enter(source: FileSource) -> FileSource:
            rewrite(stream, 0)
            return real(source)

        monkeypatch.setattr(FileSource, "__enter__", enter)
        count = BookmarkKeeper.__len__

        def count_rewritten(keeper: BookmarkKeeper) -> int:
            rewrite(stream, 1000)
            return count(keeper)

        monkeypatch.setattr(BookmarkKeeper, "__len__", count_rewritten)
        done = invoke(words[0], path, *words[1:])
    assert "verify" not in done.err
    if words[0] == "entry":
        assert done.code == 0
    elif words[0] == "bookmark":
        assert "no bookmark" in done.failed()
    else:
        assert "busy: it was truncated or updated during the read" in done.failed()
