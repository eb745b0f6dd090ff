"""Which requests are answered, and which pages may read the answers.

Owns the checks of a request before its path: the Host header on loopback, the token, the origin.
Knows no stream.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Final

from datastreamer.http.port.messages import (
    ALLOWED,
    HttpAnswer,
    HttpProblem,
    HttpRequest,
    ensure_reads,
)
from datastreamer.server.admission.tokens import TokenExaminer
from datastreamer.server.command_labels import HTTP

_READABLE: Final = (
    "ETag, Ignored-Parameters, Link, Retry-After, Stream-Cursor, Stream-Next-Offset, "
    "Stream-Up-To-Date"
)
_PREFLIGHT_SECONDS: Final = 600
_LOCAL_NAME: Final = re.compile(
    r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE
)


class HttpAccess:
    """Who may read. `origins` are those whose pages may; `examiner` has the tokens (None: no token
    is needed)."""

    def __init__(
        self,
        origins: Iterable[str] = (),
        examiner: TokenExaminer | None = None,
    ) -> None:
        self._origins = frozenset(origins)
        self._examiner = examiner

    @property
    def private(self) -> bool:
        """Whether answers are for clients with a token only."""
        return self._examiner is not None

    def check_request(self, request: HttpRequest) -> None:
        """Raises `HttpProblem` for a method that writes, and for another host's name."""
        host = request.header(b"host")
        # A page elsewhere could make its own name lead to this machine, and read the answers.
        if request.on_loopback and host is not None and not _LOCAL_NAME.fullmatch(host):
            raise HttpProblem(
                421,
                "on loopback this port serves localhost only, and the request is for "
                f"{host!r:.80}; a proxy in front of it must send Host: localhost",
            )
        ensure_reads(request.method)

    async def check_token(self, request: HttpRequest) -> None:
        """Raises `HttpProblem` without a token that is accepted."""
        examiner = self._examiner
        if examiner is None:
            return
        challenge = [("WWW-Authenticate", 'Bearer realm="datastreamer"')]
        scheme, _, token = (request.header(b"authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            raise HttpProblem(401, "send Authorization: Bearer TOKEN", challenge)
        shown = token.strip().encode("latin-1")
        known = await examiner.examine(
            HTTP, request.host, request.peer, lambda: examiner.knows(shown)
        )
        if known is None:
            raise HttpProblem(
                429, "too many wrong tokens from this address; wait", [("Retry-After", "30")]
            )
        if not known:
            raise HttpProblem(401, "the token is not accepted; ask the operator for one", challenge)

    def preflight(self) -> HttpAnswer:
        """The answer to a browser that asks whether a page may send a request."""
        headers = [
            ("Allow", ALLOWED),
            ("Access-Control-Allow-Methods", ALLOWED),
            ("Access-Control-Allow-Headers", "Authorization, If-None-Match, Last-Event-ID"),
            ("Access-Control-Max-Age", str(_PREFLIGHT_SECONDS)),
        ]
        return HttpAnswer(204, "", b"", headers)

    def secured(self, request: HttpRequest, answer: HttpAnswer) -> HttpAnswer:
        """`answer` with the headers by which a browser decides which pages may read it."""
        headers = list(answer.headers)
        origin = request.header(b"origin")
        shared = "*" in self._origins
        if shared or (origin is not None and origin in self._origins):
            headers.append(("Access-Control-Allow-Origin", "*" if shared else str(origin)))
            headers.append(("Access-Control-Expose-Headers", _READABLE))
        vary = "Accept, Accept-Encoding" + ", Origin" * (bool(self._origins) and not shared)
        headers.append(("Vary", vary))
        return dataclasses.replace(answer, headers=headers)
