"""The log on stderr: JSON lines with fields, and a serving process that logs as its parent."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from datastreamer.service.log import StderrLog, log_to_stderr, style_of_log
from datastreamer.storage.stream import DataStream
from tests.network import model
from tests.network.fixtures import over_loopback

ROOT = Path(__file__).resolve().parent.parent.parent


async def test_an_ended_connection_has_fields(
    stream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with over_loopback(stream) as rig, rig.client() as peer:
        await peer.ask(model.start(0), model.OK)
        [session] = rig.server.sessions
        name = session.transport.peer
        session.end("write_timeout", "it has received nothing for 3 s")
        await peer.was_reset()
    [record] = [record for record in caplog.records if "ended" in record.message]
    line = StderrLog()
    line.style = "json"
    result = json.loads(line.format(record))
    # RFC 3339, with milliseconds and the colon in the zone's offset.
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", result["time"])
    assert result["level"] == "info"
    assert result["message"] == f"{name}: connection ended: it has received nothing for 3 s"
    assert {key: result[key] for key in ("peer", "reason", "entry")} == {
        "peer": name,
        "reason": "write_timeout",
        "entry": 0,
    }
    assert result.keys() == {"time", "level", "logger", "message", "peer", "reason", "entry"}
    line.style = "text"
    ending = f"info  {name}: connection ended: it has received nothing for 3 s"
    assert line.format(record) == f"{result['time']} {ending}"


async def test_commands_are_not_logged(
    stream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with over_loopback(stream) as rig, rig.client() as peer:
        await peer.ask(model.start(0), model.OK)
        await peer.send(model.stop())
        await peer.expect(model.OK)
        await peer.nothing_more()
    assert caplog.records == []


PARENT = """
import logging, sys
from datastreamer import StreamServer
from datastreamer.service.log import StderrLog
if sys.argv[2] != "none":
    handler = StderrLog()
    handler.style = sys.argv[2]
    logging.basicConfig(level="INFO", handlers=[handler])
    logging.getLogger("datastreamer").setLevel("INFO")
with StreamServer(sys.argv[1], host="127.0.0.1", port=0, metrics_port=0):
    pass
"""


@pytest.mark.parametrize("style", ["json", "text", "none"])
def test_the_serving_process_logs_as_its_parent(path: Path, style: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT, str(path), style],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = done.stderr.splitlines()
    if style == "none":
        assert lines == []
    else:
        [line] = [line for line in lines if "metrics on" in line]
        if style == "json":
            assert json.loads(line)["address"].startswith("http://127.0.0.1:")
        else:
            assert " info  metrics on http://127.0.0.1:" in line


def test_an_applications_own_log_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    assert style_of_log() is None
    log_to_stderr("json", logging.INFO)
    assert style_of_log() == "json"
