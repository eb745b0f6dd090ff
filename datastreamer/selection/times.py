"""Times: as people write them, and which entries were committed when.

A time is Unix milliseconds. Must not know how marks are stored or sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, TypeAlias

from datastreamer.errors import BadArgument

Moment: TypeAlias = int | str | datetime
"""A time as callers write it: Unix milliseconds, RFC 3339, a date, or a `datetime` with a zone."""

LATEST_MS: Final = 253_402_300_799_999
"""The end of the year 9999."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# 1 to 11 digits are no Unix milliseconds: they are seconds, say.
_TIME: Final = re.compile(
    "([0-9]{12,15})|[0-9]{4}(-[0-9]{2}){2}"
    "([Tt ][0-9]{2}(:[0-9]{2}){2}([.][0-9]{1,9})?([Zz]|[+-][0-9]{2}:[0-9]{2}))?"
)


class TimeMarks(NamedTuple):
    """When entries were committed: marks by rising entry, each an entry and a time.

    The entries from a mark's on, up to that of the next mark, or to before entry `next`, were
    committed at its time or up to `resolution` milliseconds later. It is not known when those
    before the first mark were, and not known yet of those from `next` on.
    """

    marks: Sequence[tuple[int, int]] = ()
    resolution: int = 0
    next: int = 0


AskTimes: TypeAlias = Callable[[int, int], TimeMarks]
"""Returns the times from an entry on, at most that many marks."""


def moment_ms(moment: Moment) -> int:
    """A time as Unix milliseconds. Raises `BadArgument`."""
    found: Moment = moment
    try:
        if isinstance(moment, str) and (match := _TIME.fullmatch(moment)) is not None:
            found = int(moment) if match[1] else datetime.fromisoformat(moment.upper())
            if isinstance(found, datetime):
                found = found if found.tzinfo else found.replace(tzinfo=UTC)
        if isinstance(found, datetime) and found.tzinfo is not None:
            found = (found - _EPOCH) // timedelta(milliseconds=1)
        if type(found) is int and 0 <= found <= LATEST_MS:
            return found
    except (ValueError, OverflowError):
        pass  # no such day, say
    raise BadArgument(
        f"{moment!r:.80} is not a time: write 2026-11-29T07:00:00Z (or an offset such as +02:00 in "
        "place of Z), 2026-11-29 (UTC), or Unix milliseconds"
    )


def moment_of(ms: int) -> datetime:
    """A time, in UTC."""
    return _EPOCH + timedelta(milliseconds=min(ms, LATEST_MS))


def moment_text(ms: int) -> str:
    """A time as in RFC 3339, in UTC."""
    return moment_of(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")
