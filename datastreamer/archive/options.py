"""Options of an archive. Loads nothing of the extra."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

from datastreamer.errors import BadArgument
from datastreamer.format import PAGE_SIZE
from datastreamer.storage.objects import LEVEL, TIMEOUT

SEGMENT_PAGES: Final = 64
INTERVAL: Final = 60.0
LEAST_RETENTION: Final = 256 * PAGE_SIZE
_LEAST_SEGMENT, _MOST_SEGMENT = 16 * PAGE_SIZE, 256 * PAGE_SIZE


@dataclass(frozen=True)
class ArchiveOptions:
    """Where a stream is archived, and how.

    `url` is s3://BUCKET/PATH, gs://, az:// or file:///FOLDER. With `mode` "push" the archive is
    brought up to date every `interval` seconds, and when `segment` bytes are new (16 to 256 MiB);
    a relay without a file begins with what is in the archive, with "read" it only does that, and
    with "follow" it appends what is archived later, every `interval` seconds.
    `level` is zstd's, 1 to 9. `takeover`: also over the archive of another file, or of other
    entries; with "follow", entries of the file that the archive does not have are truncated.
    `timeout`, in seconds, is that of each request with its retries. With `local_retention` the
    file keeps that many bytes of its newest pages (at least 256 MiB), or those of that time; older
    ones are read from the archive. /readyz answers 503 once the archive has lacked entries, or a
    follower could not read it, for `ready_lag` seconds (0: it ignores the archive).

    Raises `BadArgument`.
    """

    url: str
    mode: Literal["push", "read", "follow"] = "push"
    interval: float = INTERVAL
    segment: int = SEGMENT_PAGES * PAGE_SIZE
    level: int = LEVEL
    takeover: bool = False
    timeout: float = TIMEOUT
    local_retention: int | timedelta | None = None
    ready_lag: float = 0.0

    def __post_init__(self) -> None:
        if not _LEAST_SEGMENT <= self.segment <= _MOST_SEGMENT:
            raise BadArgument(f"a segment has 16 to 256 MiB, not {self.segment} bytes")
        if not 1 <= self.level <= 9:
            raise BadArgument(f"the level is 1 to 9, not {self.level}")
        if not (self.interval > 0 and self.timeout > 0):
            raise BadArgument("the interval and the timeout are above 0 seconds")
        kept = self.local_retention
        if isinstance(kept, int) and kept < LEAST_RETENTION:
            raise BadArgument(f"the local retention is at least 256 MiB, not {kept} bytes")
        if isinstance(kept, timedelta) and kept < timedelta(0):
            raise BadArgument(f"the local retention is a time, or a size, not {kept}")
