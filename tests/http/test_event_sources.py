"""`EventSource` as npm packages make it, through updates, a restart and heartbeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from datastreamer.http.options import HttpOptions
from datastreamer.service.embedded import StreamServer
from tests.cli.process import Running
from tests.http.test_clients import running
from tests.network.fixtures import append
from tests.ports import free_port
from tests.programs import needs, npm_package

PROGRAM = """
const [module, url] = process.argv.slice(2)
const made = await import(module)
const EventSource = made.default?.EventSourcePolyfill ?? made.EventSource
const events = new EventSource(url)
for (const kind of ["message", "updated", "truncated"]) {
  events.addEventListener(kind, (event) => {
    const found = JSON.parse(event.data)
    console.log(JSON.stringify([kind, found.total_entries ?? found.map((entry) => entry.number)]))
  })
}
events.onerror = () => console.log(events.readyState === 2 ? "closed" : "again")
"""
MODULES = {
    "event-source-polyfill": "src/eventsource.js",
    "eventsource": "dist/index.js",
}
# More than the file records, so that a client which repeats an old id cannot continue.
UPDATES = 17


def next_event(client: Running) -> Any:
    """The next line of the program, but for lost connections."""
    while True:
        line = client.out.next()
        assert line not in (None, "closed")
        if line != "again":
            return json.loads(line)


@needs("node")
@pytest.mark.parametrize("package", MODULES)
def test_continues_without_gap_or_repeat(
    path: Path, tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datastreamer.http.answers.follow._HEARTBEAT_SECONDS", 0.05)
    program = tmp_path / "follow.mjs"
    program.write_text(PROGRAM)
    module = npm_package(package) / MODULES[package]
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1/follow?from=0"
    http = HttpOptions(port=port)
    with StreamServer(path, host="127.0.0.1", port=0, in_process=True, http=http) as server:
        append(server.stream, *[(1, b"one")] * 3)
        started = running("node", program, module.as_uri(), url)
        client = started.__enter__()
        try:
            assert next_event(client) == ["message", [0, 1, 2]]
            for at in range(UPDATES):
                server.stream.update_entry(at % 3, 1, b"%03d" % at)
                assert next_event(client) == ["updated", [at % 3]]
            server.close()
            with StreamServer(path, host="127.0.0.1", port=0, in_process=True, http=http) as again:
                append(again.stream, (1, b"two"))
                assert next_event(client) == ["message", [3]]
                again.stream.truncate(2)
                assert next_event(client) == ["truncated", 2]
        finally:
            started.__exit__(None, None, None)
