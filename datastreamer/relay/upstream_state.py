"""What a relay knows of one upstream: whether it can be used, and how much it holds.

`upstreams.py` changes it. Decides nothing.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Final

from datastreamer.client.upstream import Upstream
from datastreamer.errors import ConnectionLost, DatastreamerError, UpstreamShorter
from datastreamer.printable import counted

_log = logging.getLogger(__name__)

STATES: Final = ("in-use", "spare", "lost", "set-aside")
WAY_ON: Final = (
    '; --on-rewrite follow (on_rewrite="follow") truncates this relay to the entries that both '
    "have, and continues from there; or restart it with a new file"
)
"""The end of the reason for which an upstream with another history is set aside."""

# An upstream that closes this many connections in a row on a query for its capabilities has none.
_CLOSED_ON_ASKING: Final = 3


@dataclass(slots=True, eq=False)
class UpstreamState:
    """State of one upstream."""

    upstream: Upstream
    entries: int | None = None
    """Its number of entries when last reported; None: never."""

    set_aside: DatastreamerError | None = None
    """Why it is not used until it holds the relay's entries again."""

    lost: str = ""
    """Why it cannot be used now; empty if it can."""

    shorter_since: float | None = None
    """Since when, by the loop's clock, it holds fewer entries than the relay and gained none, while
    no upstream could be used."""

    closed_on_asking: int = 0
    """Number of connections in a row that it closed on a query for its capabilities."""

    damaged: int = 0
    """How often what it sent did not match its checksums."""

    damaged_in_a_row: int = 0
    """The same, since the relay last caught up with it."""

    unused_until: float = 0.0
    """It is not used before this time, by the loop's clock, because what it sent was damaged."""

    shorter_total: int = 0
    """Its number of entries at `shorter_since`."""

    reported_shorter: bool = False
    """Whether the log says that it is reachable again and holds fewer entries than the relay."""

    distrusted: bool = False
    """Whether the relay followed an upstream that differs and precedes it: not followed again."""

    shown: str = "spare"
    """Its state, one of `STATES`, when it was last looked at."""

    since: float = field(default_factory=time.time)
    """The Unix time since which it has that state."""

    def beside(self, current: UpstreamState | None) -> str:
        """Its state, one of `STATES`, while `current` is in use."""
        if self.set_aside is not None:
            return "set-aside"
        if self is current:
            return "in-use"
        return "lost" if self.lost else "spare"

    def note(self, current: UpstreamState | None) -> None:
        """Note since when it has its state."""
        if (name := self.beside(current)) != self.shown:
            self.shown, self.since = name, time.time()

    def count_closed_on_asking(self, closed: bool, peer: str) -> None:
        """Raises `ConnectionLost`: only several connections in a row that were lost on a query for
        capabilities show that the upstream does not support it."""
        self.closed_on_asking = self.closed_on_asking + 1 if closed else 0
        if 0 < self.closed_on_asking < _CLOSED_ON_ASKING:
            raise ConnectionLost(
                f"{peer} closed the connection on a query for its capabilities; trying again"
            )

    def used_again(self) -> None:
        """It holds the relay's entries again."""
        self.set_aside, self.lost, self.shorter_since = None, "", None
        text, name = "%s holds the relay's entries, and is used again", self.upstream.name
        _log.warning(text, name, extra={"upstream": name})

    def found_shorter(self, error: UpstreamShorter, now: float) -> float:
        """It holds fewer entries than the relay; since when it has gained none."""
        self.entries = error.total
        since = self.shorter_since
        if since is None:
            _log.warning("%s", error)
        if since is None or error.total > self.shorter_total:
            since = self.shorter_since = now
            self.shorter_total = error.total
        return since

    def log_relaying(self, next_number: int) -> None:
        text = "relaying from %s: next entry %d, the upstream holds %d"
        self.log_progress(text, next_number, self.entries)

    def log_progress(self, text: str, next_number: int, *more: object) -> None:
        """Log that the relay has entries up to, not including, `next_number`."""
        fields = {"upstream": self.upstream.name, "entry": next_number}
        _log.info(text, *(self.upstream.name, next_number, *more), extra=fields)

    def log_failure(self, level: int, what: str, error: DatastreamerError) -> None:
        """Log why it is not used; `what` says for how long, or nothing."""
        name = self.upstream.name
        text = f" {what}: {error}" if what else f": {str(error).partition(';')[0]}"
        # Most errors of a connection begin with the name.
        text = text.replace(f": {name} ", ": " if what else " ", 1)
        _log.log(level, "%s%s", name, text, extra={"upstream": name, "error": type(error).__name__})

    def log_shorter(self, total: int, ours: int) -> None:
        """Log once that it is reachable again and holds `total` entries, fewer than the relay's."""
        if not self.reported_shorter:
            self.reported_shorter = True
            _log.warning(
                "%s is reachable again and holds only %s: entries %d to %d are in doubt; "
                "returning to it once it holds as many",
                *(self.upstream.name, counted(total), total, ours - 1),
            )
