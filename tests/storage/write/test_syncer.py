"""The thread that syncs: when a sync begins."""

from __future__ import annotations

import queue

import pytest

from datastreamer.storage.write import background as syncer_module
from datastreamer.storage.write.background import Syncer

PATIENCE = 60


@pytest.fixture
def endless_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syncer_module, "_TIMES", 1e12)
    monkeypatch.setattr(syncer_module, "_MOST_PAUSE", 1_000)


@pytest.mark.usefixtures("endless_pauses")
@pytest.mark.parametrize("words", [{"urgent": True}, {"seconds": 0.001}])
def test_what_waits_for_no_pause(words: dict[str, float]) -> None:
    """After a sync of many commits: a thread that waits, and a policy that names a time."""
    calls: queue.SimpleQueue[int] = queue.SimpleQueue()

    def work() -> int:
        calls.put(1)
        return 100

    syncer = Syncer(work)
    syncer.request()
    calls.get(timeout=PATIENCE)
    syncer.request()
    syncer.request(**words)  # type: ignore[arg-type]
    calls.get(timeout=PATIENCE)
    syncer.request()
    syncer.close()
    assert calls.empty()


@pytest.mark.usefixtures("endless_pauses")
def test_no_pause_after_a_sync_of_few_commits() -> None:
    calls: queue.SimpleQueue[int] = queue.SimpleQueue()

    def work() -> int:
        calls.put(1)
        return 1

    syncer = Syncer(work)
    for _ in range(3):
        syncer.request()
        calls.get(timeout=PATIENCE)
    syncer.close()
