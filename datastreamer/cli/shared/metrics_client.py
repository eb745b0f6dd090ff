"""A client of the metrics port: the clients of a server, with rates, as a table.

Owns the request, the check of the answer, and its table. Knows no streams.
"""

from __future__ import annotations

import http.client
import json
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datastreamer.cli.shared.addresses import address_of
from datastreamer.cli.shared.console import rendered, text
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import number_option
from datastreamer.cli.shared.output import count
from datastreamer.format import U64_MAX

if TYPE_CHECKING:
    import rich.console
    import rich.table
    from rich.console import JustifyMethod

MetricsAddressArgument = Annotated[
    str,
    typer.Argument(
        metavar="HOST:METRICSPORT", help="The metrics port of the server, see serve --metrics-port."
    ),
]
LimitOption = Annotated[
    int, number_option("N", "Show at most N clients, those with the largest lag.", most=10_000)
]

Overview = dict[str, Any]

_SECONDS = 10.0
_MOST_BYTES = 16 << 20
_STATES = ("live", "catch-up", "idle", "draining")
_COLUMNS = ("client", "state", "since", "entry", "lag", "lag bytes")
_RATES = ("entries/s", "bytes/s")
_WORDS = ("client", "state")
# A terminal of fewer columns has no place for these: no cell is cut.
_WIDE = 110
_LESS = ("since", "lag bytes")


def get(address: str, path: str) -> tuple[http.client.HTTPResponse, bytes]:
    """The answer of the metrics port at `address`. Raises `Failure`."""
    place = address_of(address)
    if place.tls or not place.port or ":" not in address:
        raise typer.BadParameter(f"{address!r}: write the metrics port as HOST:PORT")
    connection = http.client.HTTPConnection(place.host, place.port, timeout=_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read(_MOST_BYTES)
    except (OSError, UnicodeError) as error:
        system = getattr(error, "strerror", None)
        why = system or str(error.__cause__ or error) or type(error).__name__
        raise Failure(
            f"{address}: no answer: {why}; was the server started with --metrics-port?"
        ) from None
    except http.client.HTTPException:
        raise _not_metrics(address) from None
    finally:
        connection.close()
    return answer, body


def ask(address: str, limit: int) -> Overview:
    """Request the state of the server at `address`, with at most `limit` clients."""
    answer, body = get(address, f"/v1/clients?limit={limit}")
    if b"port of a stream's protocol" in body:
        raise Failure(f"{address}: this is the port of the stream; the metrics have their own port")
    if answer.status == http.client.INTERNAL_SERVER_ERROR:
        raise Failure(f"{address}: the server failed to answer; its log has the reason")
    try:
        state = json.loads(body)
        if answer.status != http.client.OK or not _is_overview(state):
            raise _not_metrics(address)
    except (ValueError, RecursionError):
        raise _not_metrics(address) from None
    return dict(state)


def _not_metrics(address: str) -> Failure:
    return Failure(
        f"{address}: not the metrics port of a datastreamer; `serve` logs the address of its own"
    )


_NUMBER = (int, float)
_OPTIONAL = (int, float, type(None))
_HEAD = {
    "time": _NUMBER,
    "head_entries": _OPTIONAL,
    "head_bytes": _OPTIONAL,
    "sent_bytes": _OPTIONAL,
    "connected": (dict,),
    "clients": (list,),
}
_CLIENT = {
    "id": (str,),
    "client": (str,),
    "state": (str,),
    "seconds": _NUMBER,
    "entry": _OPTIONAL,
    "offset": _OPTIONAL,
    "lag_entries": _OPTIONAL,
    "lag_bytes": _OPTIONAL,
}
_UPSTREAM = {"upstream": (str,), "state": (str,), "lag_entries": _OPTIONAL}


def _is_overview(state: object) -> bool:
    """Whether an answer has what the table and the rates use: any program may have sent it."""
    if not isinstance(state, dict) or not _has(state, _HEAD):
        return False
    upstreams = state.get("upstreams", [])
    return (
        isinstance(upstreams, list)
        and all(_has(each, _UPSTREAM) for each in upstreams)
        and all(_has(each, _CLIENT) for each in state["clients"])
        and all(_is(count, _NUMBER) for count in state["connected"].values())
    )


def _has(value: object, kinds: Mapping[str, tuple[type, ...]]) -> bool:
    return isinstance(value, dict) and all(
        name in value and _is(value[name], kind) for name, kind in kinds.items()
    )


def _is(value: object, kind: tuple[type, ...]) -> bool:
    return isinstance(value, kind) and (not isinstance(value, int | float) or 0 <= value <= U64_MAX)


def with_rates(now: Overview, before: Overview | None) -> Overview:
    """`now`, with the rates since `before` (None if it is None)."""
    seconds = 0.0 if before is None else now["time"] - before["time"]

    def rate(new: Mapping[str, Any], old: Mapping[str, Any] | None, name: str) -> float | None:
        if old is None or seconds <= 0 or new.get(name) is None or old.get(name) is None:
            return None
        return round(max(0.0, float(new[name] - old[name])) / seconds, 1)

    earlier = {client["id"]: client for client in before["clients"]} if before else {}
    return {
        **now,
        "entries_per_second": rate(now, before, "head_entries"),
        "sent_bytes_per_second": rate(now, before, "sent_bytes"),
        "clients": [
            {
                **client,
                "entries_per_second": rate(client, earlier.get(client["id"]), "entry"),
                "bytes_per_second": rate(client, earlier.get(client["id"]), "offset"),
            }
            for client in now["clients"]
        ],
    }


def table(state: Overview) -> rich.console.RenderableType:
    """The head, and a row for each client; rates if they are known."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    rated = state.get("entries_per_second") is not None
    first = "no stream is served yet"
    if state["head_entries"] is not None:
        first = f"head {count(state['head_entries'], 'entry')}, {size(state['head_bytes'])}"
    if rated:
        first += (
            f"   {state['entries_per_second']:,.1f} entries/s"
            f"   sent {size(state['sent_bytes_per_second'])}/s"
        )
    upstreams = [
        text(
            f"upstream {each['upstream']}: {each['state']}"
            + ("" if (lag := each["lag_entries"]) is None else f", lag {count(lag, 'entry')}")
        )
        for each in state.get("upstreams", ())
    ]
    connected = state["connected"]
    counts = ", ".join(f"{connected[state]:,} {state}" for state in _STATES if state in connected)
    narrow = sys.stdout.isatty() and shutil.get_terminal_size().columns < _WIDE
    clients = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0 if narrow else 1))
    left_out = _LESS * narrow
    for title in (*_COLUMNS, *(_RATES * rated)):
        justify: JustifyMethod = "left" if title in _WORDS else "right"
        if title not in left_out:
            folds = title == "client"
            clients.add_column(title, justify=justify, no_wrap=not folds, overflow="fold")
    for client in state["clients"]:
        cells = zip((*_COLUMNS, *_RATES), _cells(client, rated), strict=False)
        clients.add_row(*[text(cell) for title, cell in cells if title not in left_out])
    more = sum(connected.values()) - len(state["clients"])
    rest = [text(f"{more:,} more")] if more > 0 else []
    return Group(text(first), *upstreams, text(f"clients: {counts}"), clients, *rest)


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


def drawn(state: Overview) -> bytes:
    """The table as text, 200 columns wide if standard output is not a terminal."""
    return rendered(table(state), width=200, styled=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def size(value: float | None) -> str:
    """A number of bytes with its unit."""
    if value is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"
