"""A store that answers no request until a test lets it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from datastreamer.storage.objects.store import ObstoreBackend

T = TypeVar("T")
PATIENCE = 30.0


class Withholding:
    """What the folders of archives answer in this process. While it is `closed`, each request
    waits until it is `answered`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self.waiting = 0
        """Requests that wait."""
        self._answers = 0
        for name in ("get", "get_range", "list"):
            self._withhold(monkeypatch, name)

    def _withhold(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(ObstoreBackend, name)

        def call(backend: ObstoreBackend, *words: Any) -> Any:
            self._wait()
            return real(backend, *words)

        monkeypatch.setattr(ObstoreBackend, name, call)

    def _wait(self) -> None:
        with self._changed:
            if not self._closed:
                return
            self.waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._closed or self._answers)
            self._answers = max(0, self._answers - 1)
            self.waiting -= 1
            self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._closed = True
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()

    def asked(self, requests: int = 1, unless: Callable[[], bool] = lambda: False) -> bool:
        """Return when that many requests wait; False if `unless` holds first."""
        with self._changed:
            for _ in range(int(PATIENCE / 0.05)):
                if self._changed.wait_for(lambda: self.waiting >= requests, 0.05):
                    return True
                if unless():
                    return False
        raise AssertionError(f"{self.waiting} of {requests} requests wait")

    def answer(self) -> None:
        """Answer one request."""
        with self._changed:
            before = self.waiting
            self._answers += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.waiting != before or not self._answers, PATIENCE)


class Running:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - raised by `ended`
            self.error = error

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def ended(self) -> None:
        """Wait for its end. Raises what it raised."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it waits"
        if self.error is not None:
            raise self.error


def served(call: Callable[[], T]) -> T:
    """The result of a call that must not wait for the store."""
    found: list[T] = []
    Running(lambda: found.append(call())).ended()
    return found[0]
