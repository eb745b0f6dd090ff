"""A server that is looked at through its metrics port: what it tells, rates, tables.

Owns the question, and what is shown of the answer. Knows no streams.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import typer

from datastreamer.cli.shared.console import rendered, text
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import number_option
from datastreamer.cli.shared.source import parse_address
from datastreamer.format import U64_MAX

if TYPE_CHECKING:
    import rich.console
    import rich.table
    from rich.console import JustifyMethod

MetricsAddressArgument = Annotated[
    str,
    typer.Argument(
        metavar="HOST:METRICSPORT", help="Where the server answers with metrics, see serve."
    ),
]
LimitOption = Annotated[
    int,
    number_option("--limit", "N", "Show so many clients, those furthest behind.", most=10_000),
]

Overview = dict[str, Any]

_SECONDS = 10.0
_MOST_BYTES = 16 << 20
_STATES = ("live", "catch-up", "idle", "draining")
_COLUMNS = ("client", "state", "since", "entry", "lag", "lag bytes")
_RATES = ("entries/s", "bytes/s")
_WORDS = ("client", "state")
# In a terminal that is too narrow for all these go, the first one first.
_LEFT_OUT = ("since", "lag bytes", "entries/s", "bytes/s", "entry", "state")
_WIDE = 10_000


def ask(address: str, limit: int) -> Overview:
    """What the server at `address` tells, with at most `limit` clients."""
    place = parse_address(address)
    if place is None or place.tls or not place.port:
        raise typer.BadParameter(f"{address!r}: a metrics port is named as HOST:PORT")
    connection = http.client.HTTPConnection(place.host, place.port, timeout=_SECONDS)
    try:
        connection.request("GET", f"/clients.json?limit={limit}")
        answer = connection.getresponse()
        body = answer.read(_MOST_BYTES)
    except (OSError, UnicodeError) as error:
        system = getattr(error, "strerror", None)
        why = system or str(error.__cause__ or error) or type(error).__name__
        raise Failure(f"{address}: no answer: {why}; is --metrics-port given there?") from None
    except http.client.HTTPException:
        raise _nothing_known(address) from None
    finally:
        connection.close()
    if answer.status == http.client.INTERNAL_SERVER_ERROR:
        raise Failure(f"{address}: the server could not tell; its log says why")
    try:
        told = json.loads(body)
        if answer.status != http.client.OK or not _is_overview(told):
            raise _nothing_known(address)
    except (ValueError, RecursionError):
        raise _nothing_known(address) from None
    return dict(told)


def _nothing_known(address: str) -> Failure:
    return Failure(f"{address}: this is no metrics port of a datastreamer; serve says which it is")


def _is_overview(told: object) -> bool:
    return _has(told, _HEAD) and _are(told.get("upstreams", []), _UPSTREAM)


def _is_word(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= U64_MAX


def _is_number_or_none(value: object) -> bool:
    return value is None or _is_number(value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _are_clients(value: object) -> bool:
    return _are(value, _CLIENT)


def _are(value: object, kinds: _Kinds) -> bool:
    return isinstance(value, list) and all(_has(each, kinds) for each in value)


def _has(value: object, kinds: _Kinds) -> TypeGuard[Overview]:
    return isinstance(value, dict) and all(
        name in value and fits(value[name]) for name, fits in kinds.items()
    )


_Kinds = Mapping[str, Callable[[object], bool]]
_HEAD: _Kinds = {
    "time": _is_number,
    "head_entries": _is_number_or_none,
    "head_bytes": _is_number_or_none,
    "sent_bytes": _is_number_or_none,
    "connected": _are_numbers,
    "clients": _are_clients,
}
_CLIENT: _Kinds = {
    "id": _is_word,
    "client": _is_word,
    "state": _is_word,
    "seconds": _is_number,
    "entry": _is_number_or_none,
    "offset": _is_number_or_none,
    "lag_entries": _is_number_or_none,
    "lag_bytes": _is_number_or_none,
}
_UPSTREAM: _Kinds = {
    "upstream": _is_word,
    "state": _is_word,
    "lag_entries": _is_number_or_none,
}


def with_rates(now: Overview, before: Overview | None) -> Overview:
    """`now`, and how fast things went since `before` (None: not known)."""
    seconds = 0.0 if before is None else now["time"] - before["time"]

    def rate(new: Mapping[str, Any], old: Mapping[str, Any] | None, name: str) -> float | None:
        if old is None or seconds <= 0 or new.get(name) is None or old.get(name) is None:
            return None
        return round(max(0.0, float(new[name] - old[name])) / seconds, 1)

    told = {client["id"]: client for client in before["clients"]} if before else {}
    return {
        **now,
        "entries_per_second": rate(now, before, "head_entries"),
        "sent_bytes_per_second": rate(now, before, "sent_bytes"),
        "clients": [
            {
                **client,
                "entries_per_second": rate(client, told.get(client["id"]), "entry"),
                "bytes_per_second": rate(client, told.get(client["id"]), "offset"),
            }
            for client in now["clients"]
        ],
    }


# For people.


def table(told: Overview) -> rich.console.RenderableType:
    """The head, and a row for each client; rates where they are known."""
    from rich.console import Group

    rated = told.get("entries_per_second") is not None
    first = "nothing is served yet"
    if told["head_entries"] is not None:
        first = f"head {told['head_entries']:,} entries, {size(told['head_bytes'])}"
    if rated:
        first += (
            f"   {told['entries_per_second']:,.1f} entries/s"
            f"   sent {size(told['sent_bytes_per_second'])}/s"
        )
    upstreams = [
        text(
            f"upstream {each['upstream']}: {each['state']}"
            + ("" if each["lag_entries"] is None else f", {each['lag_entries']:,} entries to come")
        )
        for each in told.get("upstreams", ())
    ]
    connected = told["connected"]
    counts = ", ".join(f"{connected[state]:,} {state}" for state in _STATES if state in connected)
    titles = [*_COLUMNS, *(_RATES * rated)]
    clients = _Fitting(titles, [_cells(client, rated) for client in told["clients"]])
    shown, all_of_them = len(told["clients"]), sum(connected.values())
    rest = [text(f"{all_of_them - shown:,} more")] if all_of_them > shown else []
    return Group(text(first), *upstreams, text(f"clients: {counts}"), clients, *rest)


class _Fitting:
    """A table with as many of its columns as there is room for: half a number says nothing."""

    def __init__(self, titles: list[str], rows: list[list[str]]) -> None:
        self._titles = titles
        self._rows = rows

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[rich.table.Table]:
        from rich.measure import Measurement

        wide, left = options.update(width=_WIDE), self._titles
        made = self._with(left)
        for least in _LEFT_OUT:
            if Measurement.get(console, wide, made).maximum <= options.max_width:
                break
            left = [title for title in left if title != least]
            made = self._with(left)
        yield made

    def _with(self, titles: list[str]) -> rich.table.Table:
        from rich import box
        from rich.table import Table

        made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in titles:
            justify: JustifyMethod = "left" if title in _WORDS else "right"
            made.add_column(title, justify=justify, no_wrap=True)
        places = [self._titles.index(title) for title in titles]
        for row in self._rows:
            made.add_row(*(text(row[place]) for place in places))
        return made


def _cells(client: Mapping[str, Any], rated: bool) -> list[str]:
    cells = [
        client["client"],
        client["state"],
        f"{client['seconds']:,.0f} s",
        _number(client["entry"]),
        _number(client["lag_entries"]),
        size(client["lag_bytes"]),
    ]
    if rated:
        cells += [_number(client["entries_per_second"]), size(client["bytes_per_second"])]
    return cells


def drawn(told: Overview) -> bytes:
    """The same as text, as wide as it wants where nobody's terminal is in the way."""
    return rendered(table(told), width=200, styled=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Bytes, for people."""
    if value is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"
