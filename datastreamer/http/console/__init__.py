"""The console: a page that shows the stream, with its own script and style.

Owns the files and their headers. They have nothing of the stream; they read the API.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Final

from datastreamer.http.port.messages import HttpAnswer, HttpProblem, HttpRequest

_KINDS: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)


@cache
def _content() -> dict[str, bytes]:
    """The files by name."""
    found = files(__name__)
    return {
        each.name: each.read_bytes()
        for each in found.iterdir()
        if each.name.rpartition(".")[2] in _KINDS
    }


async def page(request: HttpRequest) -> HttpAnswer:
    """The console itself."""
    request.parameters()
    return _file("index.html")


async def file(request: HttpRequest) -> HttpAnswer:
    """Its script and style."""
    request.parameters()
    return _file(request.found["file"])


def _file(name: str) -> HttpAnswer:
    content = _content().get(name)
    if content is None:
        raise HttpProblem(404, f"the console has no file {name!r:.80}")
    headers = [
        ("Content-Security-Policy", _POLICY),
        ("ETag", f'"{hashlib.sha256(content).hexdigest()[:16]}"'),
        ("Cache-Control", "no-cache"),
    ]
    return HttpAnswer(200, _KINDS[name.rpartition(".")[2]], content, headers)
