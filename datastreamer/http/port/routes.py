"""The paths of an HTTP port: which handler answers which.

Owns the order of checks: method and host, path, token; and conditional requests, which are the same
for all paths. Knows no stream.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from urllib.parse import quote, unquote

from datastreamer.http.port.access import HttpAccess
from datastreamer.http.port.messages import HttpAnswer, HttpProblem, HttpRequest

_log = logging.getLogger(__name__)

Handler = Callable[[HttpRequest], Awaitable[HttpAnswer]]

# Headers of an answer that a client has already.
_OF_UNCHANGED: Final = {"etag", "cache-control", "vary", "link"}
# The names of ignored parameters that an answer has, and the characters of each.
_NAMED: Final = 8, 40


class Routes:
    """Paths and their handlers. A part of a path in braces is a variable: ``/v1/entries/{number}``.
    Paths in `open_paths` need no token: they have nothing of the stream."""

    def __init__(
        self, handlers: Mapping[str, Handler], access: HttpAccess, open_paths: frozenset[str]
    ) -> None:
        self.paths = list(handlers)
        self._handlers = [(path.split("/"), handler) for path, handler in handlers.items()]
        self._access = access
        self._open = open_paths

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        """The answer to a request. An error of a handler is logged."""
        route, found, handler = self._find(request)
        try:
            answer = await self._answer(route, found, handler)
        except HttpProblem as problem:
            answer = problem.answer()
        except Exception:  # noqa: BLE001 - the client is answered, and others continue
            _log.exception("a request for %s failed", request.path)
            answer = HttpProblem(
                500, "the server failed to answer; its log has the reason"
            ).answer()
        if request.ignored:
            most, length = _NAMED
            names = ", ".join(quote(each[:length]) for each in request.ignored[:most])
            answer = dataclasses.replace(
                answer, headers=[*answer.headers, ("Ignored-Parameters", names)]
            )
        return dataclasses.replace(self._access.secured(request, answer), route=route)

    async def _answer(
        self, route: str, request: HttpRequest, handler: Handler | None
    ) -> HttpAnswer:
        self._access.check_request(request)
        if request.method == "OPTIONS":
            return self._access.preflight()
        if route not in self._open:
            await self._access.check_token(request)
        if handler is None:
            raise HttpProblem(404, f"no such path; there are {', '.join(self.paths)}")
        return _conditional(request, await handler(request))

    def _find(self, request: HttpRequest) -> tuple[str, HttpRequest, Handler | None]:
        """The path with its variables, the request with their values, and the handler."""
        parts = request.path.split("/")
        for pattern, handler in self._handlers:
            if len(pattern) == len(parts):
                pairs = list(zip(pattern, parts, strict=True))
                if all(each[:1] == "{" or each == part for each, part in pairs):
                    found = {
                        each[1:-1]: unquote(part, errors="surrogateescape")
                        for each, part in pairs
                        if each[:1] == "{"
                    }
                    return "/".join(pattern), dataclasses.replace(request, found=found), handler
        return "", request, None


def _conditional(request: HttpRequest, answer: HttpAnswer) -> HttpAnswer:
    """`answer`, or 304 if the client has it already."""
    tag = next((value for name, value in answer.headers if name == "ETag"), None)
    known = request.header(b"if-none-match")
    if tag is None or known is None:
        return answer
    tags = [each.strip().removeprefix("W/") for each in known.split(",")]
    if tag.removeprefix("W/") not in tags and known.strip() != "*":
        return answer
    kept = [(name, value) for name, value in answer.headers if name.lower() in _OF_UNCHANGED]
    return HttpAnswer(304, "", b"", kept)
