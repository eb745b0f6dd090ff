"""The OpenAPI document is valid, names the paths that there are, and describes the answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from datastreamer.cli.demo import DemoSequencer
from datastreamer.http.answers.openapi import DOCUMENT
from datastreamer.storage.stream import DataStream
from tests.http.asking import ask
from tests.http.serving import serving

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

# For each path, requests and their status.
REQUESTS = {
    "/": [("/", 200)],
    "/console/{file}": [("/console/main.js", 200), ("/console/x.js", 404)],
    "/v1/stream": [("/v1/stream", 200), ("/v1/stream?x=1", 400)],
    "/v1/entries/{number}": [
        ("/v1/entries/0", 200),
        ("/v1/entries/1?decode=zkevm", 200),
        ("/v1/entries/99999", 404),
        ("/v1/entries/x", 400),
    ],
    "/v1/entries": [
        ("/v1/entries", 200),
        ("/v1/entries?format=json&type=176", 200),
        ("/v1/entries?from=99999", 416),
        ("/v1/entries?from=block:99", 404),
        ("/v1/entries?from=x", 400),
    ],
    "/v1/bookmarks/{key}": [("/v1/bookmarks/block:1", 200), ("/v1/bookmarks/none", 404)],
    "/v1/blocks/{number}": [("/v1/blocks/1", 200), ("/v1/blocks/99", 404)],
    "/v1/batches/{number}": [("/v1/batches/1", 200), ("/v1/batches/99", 404)],
    "/v1/follow": [("/v1/follow?from=99999", 416), ("/v1/follow?from=block:99", 404)],
    "/v1/streams/{name}": [
        ("/v1/streams/default", 200),
        ("/v1/streams/default?offset=x", 400),
        ("/v1/streams/other", 404),
    ],
    "/v1/clients": [("/v1/clients", 200), ("/v1/clients?limit=x", 400)],
    "/v1/openapi.json": [("/v1/openapi.json", 200)],
    "/metrics": [("/metrics", 200)],
    "/healthz": [("/healthz", 200)],
    "/readyz": [("/readyz", 200)],
}


def test_the_document_is_valid() -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(DOCUMENT)


@pytest.mark.parametrize("version", [1, 3])
async def test_answers_are_as_described(path: Path, version: int) -> None:
    with DataStream.create(path, version=version, sync="os", index="memory") as stream:
        sequencer = DemoSequencer(stream)
        for _ in range(4):
            sequencer.write()
        async with serving(stream) as web:
            assert json.loads((await ask(web.port, "/v1/openapi.json"))[2]) == DOCUMENT
            for path_, requests in REQUESTS.items():
                responses = DOCUMENT["paths"][path_]["get"]["responses"]
                for request, status in requests:
                    code, headers, body = await ask(web.port, request)
                    assert (request, code) == (request, status)
                    content = responses[str(code)]["content"]
                    kind = headers["Content-Type"].partition(";")[0]
                    assert kind in content, request
                    if kind == "application/json" or code >= 400:
                        check(json.loads(body), content[kind]["schema"])


def check(value: Any, schema: Any) -> None:
    jsonschema.validate(value, {**schema, "components": DOCUMENT["components"]})


async def test_the_document_names_the_paths(stream: DataStream) -> None:
    async with serving(stream) as web:
        _, _, body = await ask(web.port, "/nothing")
    served = set(re.findall(r"/[^ ,]*", json.loads(body)["detail"]))
    assert served == set(DOCUMENT["paths"]) == set(REQUESTS)
