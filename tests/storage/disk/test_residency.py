"""What is in the page cache, and what is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datastreamer.storage.disk import residency
from datastreamer.storage.disk.residency import CAN_SAY, Residency
from tests.storage.made import evict

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_bytes(os.urandom(8 * MIB))
    return made


@pytest.mark.skipif(not CAN_SAY, reason="the system cannot say")
@pytest.mark.parametrize("asks_first", [True, False])
def test_what_is_in_memory_and_what_is_not(
    path: Path, monkeypatch: pytest.MonkeyPatch, asks_first: bool
) -> None:
    if not asks_first:  # as an older system
        monkeypatch.setattr(residency, "_CACHESTAT", -1)
    with path.open("rb", buffering=0) as file:
        known = Residency(file.fileno())
        file.read(8 * MIB)
        assert known.holds(0, 8 * MIB)
        evict(path)
        assert not known.holds(0, 8 * MIB)
        os.pread(file.fileno(), MIB, 3 * MIB)
        assert known.holds(3 * MIB, MIB)
        assert known.holds(3 * MIB + 17, MIB - 17)
        assert not known.holds(3 * MIB - 1, MIB)
        assert known.holds(0, 0)


@pytest.mark.skipif(not CAN_SAY, reason="the system cannot say")
def test_to_ask_reads_nothing(path: Path) -> None:
    """A read of the first byte would have the system read more, and find it the next time."""
    evict(path)
    with path.open("rb", buffering=0) as file:
        known = Residency(file.fileno())
        if not known._misses(0, MIB):
            pytest.skip("this system is older than Linux 6.5")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for _ in range(200):
            assert not known.holds(5 * MIB, 100)


def test_where_the_system_cannot_say(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with path.open("rb") as file:
        known = Residency(file.fileno())
        monkeypatch.setattr(residency, "_NOWAIT", None)
        assert known.holds(0, 4)
        monkeypatch.setattr(residency, "_NOWAIT", 0x4000_0000)  # not a flag: EOPNOTSUPP
        assert known.holds(0, 4)
    assert Residency(-1).holds(0, 4)
