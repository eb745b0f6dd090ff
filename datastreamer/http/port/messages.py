"""A request as handlers see it, their answers, and the errors that clients get.

Owns how parameters are checked and how an error becomes JSON (RFC 9457). Knows no socket and no
stream.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import parse_qsl

import trio

from datastreamer.errors import UsageError
from datastreamer.format import MAX_CLAUSES, U32_MAX, U64_MAX
from datastreamer.metrics.counters import HttpCounts
from datastreamer.printable import json_text
from datastreamer.selection.clauses import Selection, with_prefixes
from datastreamer.transport.server_stream import Buffer, Transport

JSON: Final = "application/json"
PLAIN: Final = "text/plain; charset=utf-8"
_PROBLEM: Final = "application/problem+json"
_MOST_PARAMETERS: Final = 64

Headers = Sequence[tuple[str, str]]

T = TypeVar("T")


class HttpProblem(Exception):
    """An error that the client gets: `detail` says what failed, where, and what to do."""

    def __init__(self, status: int, detail: str, headers: Headers = ()) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers

    def answer(self) -> HttpAnswer:
        body = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
        }
        headers = [("Cache-Control", "no-store"), *self.headers]
        return HttpAnswer(self.status, _PROBLEM, f"{json_text(body)}\n".encode(), headers)


ALLOWED: Final = "GET, HEAD"


def ensure_reads(method: str) -> None:
    """Raises `HttpProblem` for a method that writes."""
    if method not in ("GET", "HEAD", "OPTIONS"):
        raise HttpProblem(405, f"{method:.20}: the stream is read-only here", [("Allow", ALLOWED)])


class AnswerCut(Exception):
    """An answer that has begun cannot be completed: its body ends without its end."""


async def unless_gone(
    until_gone: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[T]]
) -> T | None:
    """The result of `work()`, or None if `until_gone()` returns first, which cancels the work.
    Raises the errors of `work`."""
    results: list[T] = []
    # Not in a group: an error of the other task only says that the client has left.
    failure: Exception | None = None

    async def watch() -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await until_gone()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        try:
            results.append(await work())
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return results[0] if results else None


class BodyOutput(Protocol):
    """Where a body goes."""

    @property
    def transport(self) -> Transport:
        """The connection, for entries that are sent from the file."""

    async def send(self, data: Buffer) -> None:
        """Send a piece of the body. After a cancellation or failure the connection is unusable."""

    async def begin_piece(self, size: int) -> None:
        """The caller sends `size` bytes through `transport` itself, and calls `end_piece` then."""

    async def end_piece(self) -> None: ...

    async def end(self) -> None:
        """Send the end of the body, if there is more to do before the next request is answered."""

    @property
    def counts(self) -> HttpCounts:
        """Where bytes are counted that other parts send."""

    @property
    def in_chunks(self) -> bool:
        """Whether other parts may send whole chunks of the body through `transport`; a body of
        HTTP/1.0 has none."""

    async def send_rest(self, data: Buffer) -> None:
        """Send what such a part could not send of its chunk, and what `transport` holds back."""

    async def until_gone(self) -> None:
        """Return when the client has ended its side of the connection."""

    @property
    def finishing(self) -> bool:
        """Whether the server shuts down."""

    def on_finish(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the server begins to shut down."""


Body = Callable[[BodyOutput], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer: its body is whole, or a function that sends it."""

    status: int
    kind: str
    body: bytes | Body
    headers: Headers = ()
    follows: bool = False
    """Whether the body waits for commits: it counts against the limit of followers."""
    route: str = ""
    """The path, with the names of its variable parts; empty for an unknown path."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request without a body. `path` is still percent-encoded."""

    method: str
    path: str
    query: str
    headers: Sequence[tuple[bytes, bytes]]
    peer: str = ""
    """The client's address, for the log."""
    host: str = ""
    """The client's host, as limits count it."""
    on_loopback: bool = False
    """Whether the connection was accepted on an address of this machine alone."""
    found: dict[str, str] = field(default_factory=dict)
    """The variable parts of the path."""
    until_gone: Callable[[], Awaitable[None]] = trio.sleep_forever
    """Returns when the client has ended its side of the connection."""
    follower: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Within the block the client counts as a follower. Raises `HttpProblem` if there are too many
    of them."""
    ignored: list[str] = field(default_factory=list)
    """The parameters of the query that mean nothing here; the answer names them."""

    def header(self, name: bytes) -> str | None:
        """The values of a header, joined; None without it. `name` is in lower case."""
        values = [value.decode("latin-1") for each, value in self.headers if each == name]
        return ", ".join(values) if values else None

    def parameters(self, *names: str, repeated: Iterable[str] = ()) -> Parameters:
        """The parameters of the query that have these names; others are `ignored`. Raises
        `HttpProblem`."""
        try:
            pairs = parse_qsl(
                self.query,
                keep_blank_values=True,
                errors="strict",
                max_num_fields=_MOST_PARAMETERS,
            )
        except ValueError:
            raise HttpProblem(
                400,
                f"the query {self.query!r:.200} is not UTF-8, or has more than {_MOST_PARAMETERS} "
                "parameters",
            ) from None
        values: dict[str, list[str]] = {}
        for name, value in pairs:
            if name not in names and name not in repeated:
                self.ignored.append(name)
                continue
            values.setdefault(name, []).append(value)
            if len(values[name]) > 1 and name not in repeated:
                raise HttpProblem(400, f"the parameter {name} is given twice; give it once")
        return Parameters(values)


class Parameters:
    """The parameters of a request. Each method raises `HttpProblem`, which names the parameter."""

    def __init__(self, values: dict[str, list[str]]) -> None:
        self._values = values

    def text(self, name: str) -> str | None:
        found = self._values.get(name)
        return None if found is None else found[0]

    def number(self, name: str, *, most: int = U64_MAX, least: int = 0) -> int | None:
        found = self.text(name)
        return None if found is None else number(name, found, most=most, least=least)

    def numbers(self, name: str, *, most: int) -> list[int]:
        return [number(name, each, most=most) for each in self._values.get(name, ())]

    def texts(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def selection(self) -> Selection | None:
        """The entries that `type` and `prefix` select; None: all."""
        types = self.numbers("type", most=U32_MAX)
        try:
            found = with_prefixes(types, self.texts("prefix"))
        except UsageError as error:
            raise HttpProblem(400, f"prefix: {error}") from None
        if found is not None and self.texts("prefix") and len(found) > MAX_CLAUSES:
            raise HttpProblem(
                400, f"type and prefix select by {len(found)} clauses; at most {MAX_CLAUSES} fit"
            )
        return found

    def choice(self, name: str, *known: str) -> str | None:
        found = self.text(name)
        if found is not None and found not in known:
            raise HttpProblem(400, f"{name} is {' or '.join(known)}, not {found!r:.80}")
        return found


def number(name: str, text: str, *, most: int = U64_MAX, least: int = 0) -> int:
    """The number that a parameter has. Raises `HttpProblem`."""
    if text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= most:
        return int(text)
    problem = f"{name} is a number from {least} to {most}, not {text!r:.80}"
    raise HttpProblem(400, problem + search_hint(text))


def search_hint(text: str) -> str:
    """The end of an error for a text that may be a hash or an address; else empty."""
    is_name = text.startswith("0x") and len(text) in (42, 66)
    return f"; /v1/search/{text} finds a hash or an address" if is_name else ""


def json_answer(value: Any, headers: Headers = ()) -> HttpAnswer:
    return HttpAnswer(200, JSON, json.dumps(value).encode() + b"\n", headers)
