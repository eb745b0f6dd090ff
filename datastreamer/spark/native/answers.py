"""The answers to the requests of the reader in Java, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from datastreamer.spark.native import following, plans

Answer = dict[str, Any] | Iterator[Any]

_PLANS: Final[dict[str, Callable[[Mapping[str, Any]], Answer]]] = {
    "schema": plans.schema_of,
    "scan": plans.scan,
    "count": plans.count,
    "read": plans.read,
}


class Answers:
    """Answers requests, and remembers the stream that a streaming query follows."""

    def __init__(self) -> None:
        self._followed: following.Following | None = None

    def answer(self, request: Mapping[str, Any]) -> Answer:
        """The answer: JSON, or record batches. Raises what planning and reading raise."""
        what = request["do"]
        if what == "follow":
            self._followed = following.Following(request)
            return self._followed.begun()
        if what in _PLANS:
            return _PLANS[what](request)
        assert self._followed is not None
        return following.ANSWERS[what](self._followed, request)
