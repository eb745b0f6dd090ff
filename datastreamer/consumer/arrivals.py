"""The queue between the sources of a reassembly and its consumer."""

from __future__ import annotations

from collections import deque

from datastreamer.client.effects import Driver, Steps, Wait
from datastreamer.consumer.state import Arrival


class Arrivals:
    """What has arrived from all sources, at most `size` items; a source that has more waits."""

    def __init__(self, driver: Driver, size: int) -> None:
        self._driver = driver
        self._size = size
        self._waiting: deque[Arrival] = deque()
        self._failure: Exception | None = None
        self._put = driver.signal()
        self._received = driver.signal()

    @property
    def full(self) -> bool:
        """Whether a source that has more waits."""
        return len(self._waiting) >= self._size

    def put(self, arrival: Arrival) -> Steps[None]:
        """Append it, as soon as there is room."""
        while self.full:
            if self._received.is_set():
                self._received = self._driver.signal()
            yield Wait(self._received)
        self._waiting.append(arrival)
        self._put.set()

    def receive(self, seconds: float) -> Steps[Arrival | None]:
        """The next one; None after `seconds`. Raises the error of `fail`."""
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            if self._put.is_set():
                self._put = self._driver.signal()
            try:
                yield Wait(self._put, seconds)
            except TimeoutError:
                return None
        self._received.set()
        return self._waiting.popleft()

    def fail(self, error: Exception) -> None:
        """An error that is not a source's: `receive` raises it."""
        self._failure = error
        self._put.set()
