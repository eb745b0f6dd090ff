"""Positions that are kept: what comes back, and what a failure leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer.errors import BadPosition, CursorFailed
from datastreamer.position import Identity, Position
from datastreamer.storage.cursors import FileCursor, LmdbCursor

SOME = Position(300, bytes(range(256)) * 8, Identity(3, 1101, 1))
OTHER = Position(2**64 - 1)

trails = st.binary(max_size=256).map(lambda part: part * 8)
identities = st.builds(
    Identity, st.integers(0, 255), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)
)
positions = st.builds(
    Position, st.integers(256, 2**64 - 1), trails, st.one_of(st.none(), identities)
)


@given(positions)
def test_a_position_as_text_and_back(position: Position) -> None:
    text = position.to_json()
    assert Position.from_json(text) == Position.from_json(text.encode()) == position
    assert "\n" not in text
    assert len(text) <= 3000


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "7", "[]", "null", '{"next_entry": "7"}', '{"next_entry": 7.0}'),
        *('{"next_entry": true}', '{"next_entry": -1}', '{"next_entry": 18446744073709551616}'),
        *('{"next_entry": 7, "trail": "?"}', '{"next_entry": 7, "trail": "AAAA"}'),
        '{"next_entry": 0, "trail": "AAAAAAAAAAA="}',
        *('{"next_entry": 7, "version": 1}', '{"next_entry": 7, "trail": 5}', b"\xff"),
    ],
)
def test_what_is_no_position(text: str | bytes) -> None:
    with pytest.raises(BadPosition):
        Position.from_json(text)


def test_a_trail_has_a_bound() -> None:
    with pytest.raises(BadPosition, match="at most 256"):
        Position(1000, bytes(257 * 8))


@pytest.fixture(params=["file", "lmdb path", "lmdb environment", "lmdb database"])
def reopened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[object]]:
    """The same cursor opened anew for each use, by name."""
    if request.param == "file":
        yield [FileCursor(tmp_path / "cursor") for _ in range(3)]
    elif request.param == "lmdb path":
        yield [tmp_path / "made" / "cursor"] * 3
    else:
        with lmdb.open(str(tmp_path), max_dbs=1) as environment:
            database = environment.open_db(b"mine") if "database" in request.param else None
            yield [LmdbCursor(environment, database=database) for _ in range(3)]


def test_kept_and_found_again(reopened: list[object]) -> None:
    for number, cursor in enumerate(reopened):
        opened = LmdbCursor(cursor) if isinstance(cursor, Path) else cursor
        assert isinstance(opened, FileCursor | LmdbCursor)
        assert opened.load() == [None, SOME, OTHER][number]
        opened.save([OTHER, OTHER, SOME][number])
        opened.save([SOME, OTHER, SOME][number])
        if isinstance(opened, LmdbCursor):
            opened.close()


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cursor = FileCursor(tmp_path / "cursor")
    cursor.save(SOME)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(CursorFailed, match="cursor: cannot be written: No space left"):
            cursor.save(OTHER)
    assert cursor.load() == SOME
    assert [path.name for path in tmp_path.iterdir()] == ["cursor"]


def test_a_file_is_on_disk_before_it_takes_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("sync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b)))
    FileCursor(tmp_path / "cursor").save(SOME)
    assert done == ["sync", "rename", "sync"]


def test_a_file_that_is_no_cursor(tmp_path: Path) -> None:
    (tmp_path / "cursor").write_text("hello")
    with pytest.raises(CursorFailed, match=r"not a position in a stream: .*; remove the file"):
        FileCursor(tmp_path / "cursor").load()
    with pytest.raises(CursorFailed, match="is not a regular file"):
        FileCursor(tmp_path).load()
    (tmp_path / "cursor").write_text("[" * 100_000)
    with pytest.raises(CursorFailed, match="not a position in a stream"):
        FileCursor(tmp_path / "cursor").load()


def test_several_cursors_in_one_environment(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path)) as environment:
        first, second = LmdbCursor(environment, "first"), LmdbCursor(environment, "second")
        first.save(SOME)
        assert second.load() is None
        second.save(OTHER)
        assert (first.load(), second.load()) == (SOME, OTHER)
        first.close()
        assert second.load() == OTHER


def test_in_the_callers_own_transaction(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path)) as environment:
        cursor = LmdbCursor(environment)
        with environment.begin(write=True) as transaction:
            transaction.put(b"result", b"1")
            cursor.save(SOME, transaction)
        with environment.begin(write=True) as transaction:
            transaction.put(b"result", b"2")
            cursor.save(OTHER, transaction)
            transaction.abort()
        assert cursor.load() == SOME
        with environment.begin() as transaction:
            assert transaction.get(b"result") == b"1"


def test_what_lmdb_cannot_read(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "env")) as environment:
        with environment.begin(write=True) as transaction:
            transaction.put(b"cursor", b"{}")
        with pytest.raises(CursorFailed, match="cursor cannot be read: not a position"):
            LmdbCursor(environment).load()
    (tmp_path / "file").write_text("")
    with pytest.raises(CursorFailed, match="is not a folder"):
        LmdbCursor(tmp_path / "file")


CUT_SHORT = """
import sys
from datastreamer.errors import CursorFailed
from datastreamer.storage.cursors import LmdbCursor

try:
    with LmdbCursor(sys.argv[1]) as cursor:
        print(cursor.load())
except CursorFailed as error:
    print(error)
"""


@pytest.mark.parametrize("size", [8192, 8193, 12287])
def test_a_file_of_lmdb_that_was_cut_short(tmp_path: Path, size: int) -> None:
    """It is an error, and does not end the process."""
    with LmdbCursor(tmp_path) as cursor:
        cursor.save(SOME)
        cursor.save(OTHER)
    assert (tmp_path / "data.mdb").stat().st_size > size
    os.truncate(tmp_path / "data.mdb", size)
    words = [sys.executable, "-c", CUT_SHORT, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f"{tmp_path}: the cursor cannot be read" in done.stdout or str(OTHER) in done.stdout
