"""Opening costs the same whatever the size of the stream: 1 MiB beside 100 GiB."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.stored import sparse_stream
from datastreamer import DataStream

Versus = Callable[..., None]
LARGE = 100 * 1024  # pages


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sparse_stream(tmp_path_factory.mktemp("small") / "s.bin", 1)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sparse_stream(tmp_path_factory.mktemp("large") / "s.bin", LARGE, filled=False)


def opening(path: Path, times: int, **mode: bool) -> Callable[[], None]:
    def work() -> None:
        for _ in range(times):
            with DataStream.open(path, **mode) as stream:  # type: ignore[arg-type]
                assert stream.total_entries

    return work


@pytest.mark.parametrize("mode", ["read_only", "follow", "write"])
def test_open(versus: Versus, smoke: bool, small: Path, large: Path, mode: str) -> None:
    times = 1 if smoke else 50 if mode == "write" else 500
    options = {} if mode == "write" else {mode: True}
    versus(
        f"open and close, {'for writing' if mode == 'write' else mode}, 100 GiB",
        opening(large, times, **options),
        {"the same, 1 MiB": opening(small, times, **options)},
        unit="opens/s",
        amount=times,
        at_least=0.7,
    )


def test_open_and_look_up(versus: Versus, smoke: bool, small: Path, large: Path) -> None:
    """With the newest entry, and a bookmark that is not there (through the index)."""
    times = 1 if smoke else 200

    def looking(path: Path) -> Callable[[], None]:
        def work() -> None:
            for _ in range(times):
                with DataStream.open(path, read_only=True) as stream:
                    stream.entry(stream.total_entries - 1)
                    assert stream.bookmarks.newest(b"nobody") is None

        return work

    versus(
        "open read_only, newest entry, look up a bookmark, 100 GiB",
        looking(large),
        {"the same, 1 MiB": looking(small)},
        unit="opens/s",
        amount=times,
        at_least=0.6,
    )
