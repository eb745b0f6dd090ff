"""The OpenAPI description of the paths.

Owns the document. `serving.py` has the handlers; tests compare the two, and answers with their
statuses, headers and schemas.
"""

from __future__ import annotations

from typing import Any, Final

from datastreamer._version import __version__
from datastreamer.http.answers.formats import ARROW, NDJSON, OCTETS
from datastreamer.http.answers.ranges import MOST_JSON
from datastreamer.http.port.messages import JSON, HttpAnswer, HttpRequest, json_answer

_NUMBER: Final = {"type": "integer", "minimum": 0}
_TEXT: Final = {"type": "string"}
_HEX: Final = {"type": "string", "pattern": "^0x([0-9a-f]{2})*$"}
_ANY: Final = {"type": "object"}
_ERRORS: Final = {
    400: "A parameter is not valid; the detail names it",
    401: "No token that is accepted",
    404: "No such entry, bookmark or path, or it is not known which entry the time leads to",
    405: "A method that writes",
    406: "No such format",
    408: "The request did not arrive in time",
    409: "The range was truncated or updated; ask again",
    410: "Entries before the offset were changed, or it is not known whether they were",
    413: "A body, or the answer would be too large",
    416: "From beyond the head",
    421: "On loopback, another host's name",
    422: "The entries cannot be decoded",
    429: "Too many wrong tokens",
    431: "Headers that are too long",
    500: "Damaged entries, or a fault; the server's log has the reason",
    501: "prometheus-client is not installed",
    503: "No stream, or too many connections; see Retry-After",
    505: "Another version of HTTP",
}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"oneOf": [schema, {"type": "null"}]}


_EVENT: Final = _object({"entry": _NUMBER, "kind": _TEXT, "fields": _ANY})
_BLOCK: Final = {
    "bookmark": _or_null(_NUMBER),
    "block": _ref("Event"),
    "transactions": _list(_ref("Event")),
    "end": _or_null(_ref("Event")),
}
# Errors of all paths, of those that need a token, and of those that read the stream.
_OF_REQUESTS: Final = (400, 405, 408, 413, 421, 431, 500, 503, 505)
_OF_TOKENS: Final = (401, 429)
_RETRY: Final = {"Retry-After": {"schema": _NUMBER, "description": "Seconds"}}
_ERROR_HEADERS: Final[dict[int, dict[str, Any]]] = {
    401: {"WWW-Authenticate": {"schema": _TEXT}},
    405: {"Allow": {"schema": _TEXT}},
    416: {"Content-Range": {"schema": _TEXT}},
    429: _RETRY,
    503: _RETRY,
}
_CACHED: Final = {"Cache-Control": {"schema": _TEXT}}
_TAGGED: Final = {**_CACHED, "ETag": {"schema": _TEXT}}
_LINKED: Final = {**_TAGGED, "Link": {"schema": _TEXT}, "Content-Encoding": {"schema": _TEXT}}
_OF_CONSOLE: Final = {**_TAGGED, "Content-Security-Policy": {"schema": _TEXT}}
_EVENTS_TOO: Final = {"X-Accel-Buffering": {"schema": _TEXT}}
_DURABLE: Final = {
    name: {"schema": _TEXT} for name in ("Stream-Next-Offset", "Stream-Up-To-Date", "Stream-Cursor")
}
_SCHEMAS: Final = {
    "Problem": _object({"type": _TEXT, "title": _TEXT, "status": _NUMBER, "detail": _TEXT}),
    "Stream": _object(
        dict.fromkeys(
            (
                *("version", "system_id", "stream_type", "total_entries", "total_length"),
                *("epoch", "first_entry", "floor"),
            ),
            _NUMBER,
        ),
        sync={"type": ["string", "integer", "null"]},
    ),
    "Entry": _object(
        {"number": _NUMBER, "type": _NUMBER, "length": _NUMBER, "data": _HEX},
        kind=_or_null(_TEXT),
        fields=_or_null(_ANY),
        error=_TEXT,
        time={"type": "string", "format": "date-time"},
    ),
    "Bookmark": _object({"key": _HEX, "entry": _NUMBER, "first_event": _or_null(_NUMBER)}),
    "Event": _EVENT,
    "Block": _object({"number": _NUMBER, **_BLOCK}),
    "Batch": _object(
        {
            "number": _NUMBER,
            "bookmark": _NUMBER,
            "start": _or_null(_ref("Event")),
            "blocks": _list(_object(_BLOCK)),
            "ger_updates": _list(_ref("Event")),
            "end": _or_null(_ref("Event")),
        }
    ),
    "Overview": _object(
        {
            **dict.fromkeys(("name", "path", "server_version"), _TEXT),
            "role": {"enum": ["server", "relay"]},
            "time": {"type": "number"},
            "uptime_seconds": _NUMBER,
            "last_commit": {"type": ["number", "null"]},
            "problems": _list(_object(dict.fromkeys(("severity", "text", "advice"), _TEXT))),
            "upstreams": {"type": ["array", "null"]},
            "archive": _or_null(_ref("Archive")),
            "sample_seconds": _NUMBER,
            "samples": {
                **_list(_list({"type": ["number", "null"]})),
                "description": "Time, entries and bytes a second, clients, the largest lag in "
                "entries, the 99th percentile of the commits in seconds",
            },
        }
    ),
    "Archive": _object(
        dict.fromkeys(
            (
                *("entries", "lag_bytes", "generation", "term"),
                *("uploaded_bytes_total", "publications_total", "failures_in_a_row"),
                *("fenced", "diverged", "evicted_pages", "local_bytes", "retention_bytes"),
            ),
            _NUMBER,
        )
        | {"lag_seconds": {"type": "number"}}
    ),
    "Search": _object(
        {
            "found": _list(
                _object({"kind": {"enum": ["block", "transaction", "damaged"]}, "entry": _NUMBER})
            ),
            "before": _or_null(_NUMBER),
            "complete": {
                "type": "boolean",
                "description": "Whether all entries were searched; else the rest may have it",
            },
            "searched_entries": _NUMBER,
            "unread_entries": _NUMBER,
            "total_entries": _NUMBER,
            "trouble": _TEXT,
        }
    ),
    "Clients": _object(
        {
            "time": {"type": "number"},
            "head_entries": _or_null(_NUMBER),
            "head_bytes": _or_null(_NUMBER),
            "connected": {"type": "object", "additionalProperties": _NUMBER},
            "clients": _list(_ANY),
        },
        upstreams=_list(_ANY),
        index_lag_entries=_or_null(_NUMBER),
    ),
}


def _parameter(name: str, about: str, schema: Any = _TEXT, **more: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": about, "schema": schema, **more}


def _in_path(name: str, schema: Any = _NUMBER) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _reads(
    about: str,
    content: dict[str, Any],
    *parameters: dict[str, Any],
    headers: dict[str, Any] = _CACHED,
    errors: tuple[int, ...] = (),
    token: bool = True,
    others: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The operations of a path. `headers` are those of its answer; with an ETag among them it may
    also be 304. `token`: it needs one, if the port has any. `others` are further responses."""
    problem = {"application/problem+json": {"schema": _ref("Problem")}}
    responses: dict[str, Any] = {
        "200": {
            "description": about,
            "headers": headers,
            "content": {kind: {"schema": schema} for kind, schema in content.items()},
        },
        **(others or {}),
    }
    if "ETag" in headers:
        names = {"ETag", "Cache-Control", "Link"} & headers.keys()
        kept = {name: headers[name] for name in sorted(names)}
        responses["304"] = {"description": "The client has the answer already", "headers": kept}
    for status in sorted({*_OF_REQUESTS, *_OF_TOKENS[: 2 * token], *errors}):
        described = {
            "description": _ERRORS[status],
            "headers": _CACHED | _ERROR_HEADERS.get(status, {}),
            "content": problem,
        }
        responses.setdefault(str(status), described)
    operation: dict[str, Any] = {
        "summary": about,
        "parameters": list(parameters),
        "responses": responses,
    }
    if not token:
        operation["security"] = []
    without = {
        status: {name: value for name, value in each.items() if name != "content"}
        for status, each in responses.items()
    }
    head = {**operation, "summary": f"{about}: the headers alone", "responses": without}
    return {"get": operation, "head": head}


_FROM: Final = _parameter("from", "First entry: N, block:N, batch:N, a key as 0x..., or time:...")
_SELECTION: Final = (
    _parameter("type", "Only entries of these types", _list(_NUMBER), explode=True),
    _parameter(
        "prefix",
        "Of these types, only entries that have these bytes at this offset of their data, as "
        "2:0x01",
        _list(_TEXT),
        explode=True,
    ),
)
_PLAIN_TEXT: Final = {"text/plain": _TEXT}
_PATHS: Final = {
    "/": _reads("The console", {"text/html": _TEXT}, headers=_OF_CONSOLE, token=False),
    "/console/{file}": _reads(
        "A file of the console",
        {"text/css": _TEXT, "text/javascript": _TEXT, "image/svg+xml": _TEXT},
        _in_path("file", _TEXT),
        headers=_OF_CONSOLE,
        errors=(404,),
        token=False,
    ),
    "/v1/stream": _reads("The stream", {JSON: _ref("Stream")}),
    "/v1/entries/{number}": _reads(
        "One entry",
        {JSON: _ref("Entry")},
        _in_path("number"),
        _parameter("decode", "Decode the entry", {"enum": ["zkevm"]}),
        headers=_TAGGED,
        errors=(404,),
    ),
    "/v1/entries": _reads(
        "Committed entries",
        {
            NDJSON: _TEXT,
            JSON: _list(_ref("Entry")),
            ARROW: {"type": "string", "contentEncoding": "binary"},
            OCTETS: {"type": "string", "contentEncoding": "binary"},
        },
        _FROM,
        _parameter("to", "Last entry, included", _NUMBER),
        _parameter(
            "limit",
            f"Number of entries, those of other types included; at most {MOST_JSON} for JSON",
            {"type": "integer", "minimum": 1},
        ),
        *_SELECTION,
        _parameter("format", "Instead of Accept", {"enum": ["ndjson", "json", "arrow", "raw"]}),
        headers=_LINKED,
        errors=(404, 406, 409, 416),
    ),
    "/v1/bookmarks/{key}": _reads(
        "Where a bookmark is",
        {JSON: _ref("Bookmark")},
        _in_path("key", _TEXT),
        errors=(404,),
    ),
    "/v1/blocks": _reads(
        "A line about each of the newest blocks",
        {JSON: _object({"blocks": _list(_ANY), "before": _or_null(_NUMBER)})},
        _parameter("before", "Only blocks before this one", _NUMBER),
        _parameter("limit", "Number of blocks", {"type": "integer", "minimum": 1, "maximum": 100}),
        errors=(422,),
    ),
    "/v1/transactions/{number}": _reads(
        "The transaction that an entry is, decoded, and its block",
        {JSON: _object({"entry": _NUMBER, "kind": _TEXT, "fields": _ANY, "block": _or_null(_ANY)})},
        _in_path("number"),
        errors=(404, 422),
    ),
    "/v1/blocks/{number}": _reads(
        "A block, decoded", {JSON: _ref("Block")}, _in_path("number"), errors=(404, 413, 422)
    ),
    "/v1/batches/{number}": _reads(
        "A batch, decoded", {JSON: _ref("Batch")}, _in_path("number"), errors=(404, 413, 422)
    ),
    "/v1/follow": _reads(
        "Entries as they are committed, as Server-Sent Events",
        {"text/event-stream": _TEXT},
        {**_FROM, "description": "First entry; by default the next to be committed"},
        {"name": "Last-Event-ID", "in": "header", "schema": _TEXT},
        _parameter("lastEventId", "The same, of clients that cannot send that header"),
        *_SELECTION,
        headers=_CACHED | _EVENTS_TOO,
        errors=(404, 410, 416),
    ),
    "/v1/streams/{name}": _reads(
        "The read side of Durable Streams 1.0",
        {JSON: _list(_ref("Entry")), "text/event-stream": _TEXT},
        _in_path("name", {"enum": ["default"]}),
        _parameter("offset", "-1, now, or Stream-Next-Offset of an answer"),
        _parameter("live", "Wait for commits", {"enum": ["long-poll", "sse"]}),
        _parameter("cursor", "Stream-Cursor of the last answer"),
        headers=_TAGGED | _DURABLE | _EVENTS_TOO,
        errors=(404, 409, 410),
        others={
            "204": {
                "description": "Nothing was committed while the client waited",
                "headers": _CACHED | _DURABLE,
            }
        },
    ),
    "/v1/clients": _reads(
        "The clients of the stream protocol, those with the largest lag",
        {JSON: _ref("Clients")},
        _parameter("limit", "Number of clients", {"type": "integer", "maximum": 10_000}),
    ),
    "/v1/overview": _reads(
        "The server, what is not well, and samples of the last hour", {JSON: _ref("Overview")}
    ),
    "/v1/archive": _reads(
        "How far the archive of the stream is, if this server keeps one",
        {JSON: _ref("Archive")},
        errors=(404,),
    ),
    "/v1/search/{key}": _reads(
        "The newest blocks and transactions that a hash or an address leads to",
        {JSON: _ref("Search")},
        _in_path("key", _TEXT),
        _parameter("before", "Only entries before this one", _NUMBER),
        _parameter("limit", "Number of entries", {"type": "integer", "minimum": 1, "maximum": 100}),
    ),
    "/v1/openapi.json": _reads("This document", {JSON: _ANY}),
    "/metrics": _reads(
        "Metrics for Prometheus",
        _PLAIN_TEXT,
        errors=(501,),
    ),
    "/healthz": _reads("The process is alive", _PLAIN_TEXT, token=False),
    "/readyz": _reads(
        "New clients are served",
        _PLAIN_TEXT,
        others={
            "503": {
                "description": "They are not; the text says why",
                "content": {"text/plain": {"schema": _TEXT}},
            }
        },
    ),
}

# The name of each path in generated clients, and what it is about.
_NAMED: Final = {
    "/": ("console", "console"),
    "/console/{file}": ("console_file", "console"),
    "/v1/stream": ("stream", "stream"),
    "/v1/entries/{number}": ("entry", "stream"),
    "/v1/entries": ("entries", "stream"),
    "/v1/bookmarks/{key}": ("bookmark", "stream"),
    "/v1/blocks": ("blocks", "zkevm"),
    "/v1/blocks/{number}": ("block", "zkevm"),
    "/v1/transactions/{number}": ("transaction", "zkevm"),
    "/v1/search/{key}": ("search", "zkevm"),
    "/v1/batches/{number}": ("batch", "zkevm"),
    "/v1/follow": ("follow", "stream"),
    "/v1/streams/{name}": ("durable_stream", "stream"),
    "/v1/clients": ("clients", "monitoring"),
    "/v1/overview": ("overview", "monitoring"),
    "/v1/archive": ("archive", "monitoring"),
    "/v1/openapi.json": ("openapi", "monitoring"),
    "/metrics": ("metrics", "monitoring"),
    "/healthz": ("healthz", "monitoring"),
    "/readyz": ("readyz", "monitoring"),
}


def _operations(path: str) -> dict[str, Any]:
    """The operations of a path, with their ids and tags."""
    name, tag = _NAMED[path]
    return {
        method: {"operationId": f"{method}_{name}", "tags": [tag], **operation}
        for method, operation in _PATHS[path].items()
    }


DOCUMENT: Final[dict[str, Any]] = {
    "openapi": "3.1.0",
    "info": {
        "title": "datastreamer",
        "version": __version__,
        "description": "An append-only stream of numbered entries with bookmarks; read-only. Every "
        "answer has the headers X-Content-Type-Options, Referrer-Policy, Vary and "
        "Cross-Origin-Resource-Policy; and Ignored-Parameters, if the path does not know some "
        "parameters of the request.",
    },
    "paths": {path: _operations(path) for path in _PATHS},
    "components": {
        "schemas": _SCHEMAS,
        "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
    },
    "security": [{}, {"token": []}],
}


async def openapi(request: HttpRequest) -> HttpAnswer:
    request.parameters()
    return json_answer(DOCUMENT, [("Cache-Control", "no-cache")])
