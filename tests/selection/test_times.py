"""How times are written, and which entries were committed when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer.errors import BadArgument, UsageError
from datastreamer.selection.times import (
    LATEST_MS,
    moment_ms,
    moment_text,
)

SEVEN = 1_795_935_600_000


@pytest.mark.parametrize(
    "moment",
    [
        "2026-11-29T07:00:00Z",
        "2026-11-29t07:00:00z",
        "2026-11-29 07:00:00Z",
        "2026-11-29T07:00:00.000999Z",
        "2026-11-29T09:30:00+02:30",
        "2026-11-28T23:00:00.0-08:00",
        "1795935600000",
        SEVEN,
        datetime(2026, 11, 29, 7, tzinfo=UTC),
        datetime(2026, 11, 29, 8, tzinfo=timezone(timedelta(hours=1))),
    ],
)
def test_one_time_in_all_forms(moment: Any) -> None:
    assert moment_ms(moment) == SEVEN
    assert moment_text(SEVEN) == "2026-11-29T07:00:00.000Z"


def test_dates_and_bounds() -> None:
    assert moment_ms("2026-11-29") == SEVEN - 7 * 3_600_000
    assert moment_ms("1970-01-01") == moment_ms(0) == 0
    assert moment_ms("9999-12-31T23:59:59.999999999Z") == moment_ms(LATEST_MS) == LATEST_MS
    assert moment_text(LATEST_MS) == moment_text(2**48) == "9999-12-31T23:59:59.999Z"


@pytest.mark.parametrize(
    "moment",
    [
        *(
            "",
            "now",
            "7",
            "0",
            "1795935600",
            "-1795935600000",
            "9" * 13 + "\n",
            "9" * 15,
            "9" * 400,
            "\u0661" * 13,
        ),
        *("2026-11-29T07:00:00", "2026-11-29T07:00Z", "2026-11-29T07:00:00+0200", "20261129"),
        *("2026-13-01", "2026-02-30", "2026-11-29T24:00:01Z", "2026-11-29T07:00:60Z", "2026-W48-7"),
        *(" 2026-11-29", "2026-11-29\n", "1969-12-31", "0001-01-01T00:00:00+14:00", "10m"),
        *(-1, LATEST_MS + 1, True, 1.5, None, b"2026-11-29", datetime(2026, 11, 29)),
    ],
)
def test_what_is_no_time(moment: Any) -> None:
    with pytest.raises(BadArgument) as caught:
        moment_ms(moment)
    assert isinstance(caught.value, UsageError)
    assert "is not a time: write 2026-11-29T07:00:00Z" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@given(st.integers(0, LATEST_MS))
def test_what_is_printed_is_read(ms: int) -> None:
    assert moment_ms(moment_text(ms)) == ms
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
    assert moment_ms(moment) == ms
