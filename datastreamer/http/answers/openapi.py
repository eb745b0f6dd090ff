"""The OpenAPI description of the paths.

Owns the document. `serving.py` has the handlers; tests compare the two, and answers with the
schemas.
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
    404: "No such entry, bookmark or path",
    406: "No such format",
    409: "The range was truncated or updated; ask again",
    410: "Entries before the offset were changed, or it is not known whether they were",
    413: "The answer would be too large",
    416: "From beyond the head",
    422: "The entries cannot be decoded",
    429: "Too many wrong tokens",
    503: "No stream, or too many connections; see Retry-After",
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
_STREAM_NUMBERS: Final = (
    *("version", "system_id", "stream_type", "total_entries", "total_length", "epoch"),
    "first_entry",
)
_SCHEMAS: Final = {
    "Problem": _object({"type": _TEXT, "title": _TEXT, "status": _NUMBER, "detail": _TEXT}),
    "Stream": _object(
        dict.fromkeys(
            (
                *("version", "system_id", "stream_type", "total_entries", "total_length"),
                *("epoch", "first_entry"),
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


def _get(
    about: str,
    content: dict[str, Any],
    *parameters: dict[str, Any],
    errors: tuple[int, ...] = (),
    others: dict[str, Any] | None = None,
) -> dict[str, Any]:
    problem = {"application/problem+json": {"schema": _ref("Problem")}}
    responses: dict[str, Any] = {
        "200": {
            "description": about,
            "content": {kind: {"schema": schema} for kind, schema in content.items()},
        },
        **(others or {}),
    }
    for status in sorted({400, 401, 429, 503, *errors}):
        responses.setdefault(str(status), {"description": _ERRORS[status], "content": problem})
    return {"get": {"summary": about, "parameters": list(parameters), "responses": responses}}


_FROM: Final = _parameter("from", "First entry: its number, block:N, batch:N, or a key as 0x...")
_PLAIN_TEXT: Final = {"text/plain": _TEXT}
_PATHS: Final = {
    "/": _get("The console", {"text/html": _TEXT}),
    "/console/{file}": _get(
        "A file of the console",
        {"text/css": _TEXT, "text/javascript": _TEXT, "image/svg+xml": _TEXT},
        _in_path("file", _TEXT),
        errors=(404,),
    ),
    "/v1/stream": _get("The stream", {JSON: _ref("Stream")}),
    "/v1/entries/{number}": _get(
        "One entry",
        {JSON: _ref("Entry")},
        _in_path("number"),
        _parameter("decode", "Decode the entry", {"enum": ["zkevm"]}),
        errors=(404,),
    ),
    "/v1/entries": _get(
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
        _parameter("type", "Only entries of these types", _list(_NUMBER), explode=True),
        _parameter("format", "Instead of Accept", {"enum": ["ndjson", "json", "arrow", "raw"]}),
        errors=(404, 406, 409, 416),
    ),
    "/v1/bookmarks/{key}": _get(
        "Where a bookmark is",
        {JSON: _ref("Bookmark")},
        _in_path("key", _TEXT),
        errors=(404,),
    ),
    "/v1/blocks/{number}": _get(
        "A block, decoded", {JSON: _ref("Block")}, _in_path("number"), errors=(404, 413, 422)
    ),
    "/v1/batches/{number}": _get(
        "A batch, decoded", {JSON: _ref("Batch")}, _in_path("number"), errors=(404, 413, 422)
    ),
    "/v1/follow": _get(
        "Entries as they are committed, as Server-Sent Events",
        {"text/event-stream": _TEXT},
        {**_FROM, "description": "First entry; by default the next to be committed"},
        {"name": "Last-Event-ID", "in": "header", "schema": _TEXT},
        errors=(404, 410, 416),
    ),
    "/v1/streams/{name}": _get(
        "The read side of Durable Streams 1.0",
        {JSON: _list(_ref("Entry")), "text/event-stream": _TEXT},
        _in_path("name", {"enum": ["default"]}),
        _parameter("offset", "-1, now, or Stream-Next-Offset of an answer"),
        _parameter("live", "Wait for commits", {"enum": ["long-poll", "sse"]}),
        _parameter("cursor", "Stream-Cursor of the last answer"),
        errors=(404, 410),
        others={"204": {"description": "Nothing was committed while the client waited"}},
    ),
    "/v1/clients": _get(
        "The clients of the stream protocol, those with the largest lag",
        {JSON: _ref("Clients")},
        _parameter("limit", "Number of clients", {"type": "integer", "maximum": 10_000}),
    ),
    "/v1/openapi.json": _get("This document", {JSON: _ANY}),
    "/metrics": _get(
        "Metrics for Prometheus",
        _PLAIN_TEXT,
        others={"501": {"description": "prometheus-client is not installed"}},
    ),
    "/healthz": _get("The process is alive", _PLAIN_TEXT),
    "/readyz": _get(
        "New clients are served",
        _PLAIN_TEXT,
        others={"503": {"description": "They are not; the text says why"}},
    ),
}

DOCUMENT: Final[dict[str, Any]] = {
    "openapi": "3.1.0",
    "info": {
        "title": "datastreamer",
        "version": __version__,
        "description": "An append-only stream of numbered entries with bookmarks; read-only.",
    },
    "paths": _PATHS,
    "components": {
        "schemas": _SCHEMAS,
        "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
    },
    "security": [{}, {"token": []}],
}


async def openapi(request: HttpRequest) -> HttpAnswer:
    request.parameters()
    return json_answer(DOCUMENT, [("Cache-Control", "no-cache")])
