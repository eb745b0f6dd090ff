"""/v1/overview: the last hour, and what is not well in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import trio

from datastreamer.archive.options import ArchiveOptions
from datastreamer.http.answers.monitoring import UpstreamStatus
from datastreamer.http.answers.openapi import DOCUMENT
from datastreamer.http.answers.overview import Overview, spell
from datastreamer.http.answers.reading import HttpSource
from datastreamer.http.options import HttpOptions
from datastreamer.http.port.messages import HttpRequest
from datastreamer.metrics.exposition import MetricsSnapshot
from datastreamer.metrics.names import METRICS
from datastreamer.relay.relay import Relay
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.http.asking import ask
from tests.http.serving import serving
from tests.network.fixtures import append

BOUNDS = METRICS["datastreamer_commit_seconds"].bounds


def snapshot(at: float, entries: int, clients: int = 2, commits: tuple[int, int] = (0, 0)) -> Any:
    """`commits`: how many took up to the first bound, and up to the fifth."""
    few, most = commits
    buckets = [few] * 4 + [most] * (len(BOUNDS) - 3)
    samples: dict[str, Any] = {
        "datastreamer_head_entries": [([], entries)],
        "datastreamer_head_bytes": [([], 4096 + 100 * entries)],
        "datastreamer_clients": [(["live"], clients), (["idle"], 1)],
        "datastreamer_clients_limit": [([], 3)],
        "datastreamer_damaged_pages": [([], 2)],
        "datastreamer_commit_seconds": [([], {"buckets": buckets, "sum": 1.0})],
    }
    return {"time": at, "samples": samples, "clients": [{"lag_entries": 7}]}


async def answer_of(overview: Overview) -> Any:
    answer = await overview.answer(HttpRequest("GET", "/v1/overview", "", []))
    assert isinstance(answer.body, bytes)
    return json.loads(answer.body)


async def test_the_last_hour_is_kept_and_no_more() -> None:
    async def gather(*, limit: int) -> MetricsSnapshot:
        return snapshot(20_000.0, 5)

    overview = Overview(HttpSource(lambda: None, gather, lambda: "no room", "x.bin"))
    overview.add({"time": 1.0, "samples": {}, "clients": []})
    assert (await answer_of(overview))["samples"] == []
    for at in range(500):
        overview.add(snapshot(10.0 * at, 50 * at, commits=(99 * at, 100 * at)))
    overview.add(snapshot(5000.0, 10, commits=(99 * 499, 100 * 500)))
    found = await answer_of(overview)
    assert len(found["samples"]) == 360
    assert found["samples"][-2] == [4990, 5.0, 500.0, 3, 7, BOUNDS[0]]
    assert found["samples"][-1] == [5000, None, None, 3, 7, BOUNDS[4]]
    assert (found["path"], found["role"]) == (str(Path("x.bin").absolute()), "server")
    assert [each["text"] for each in found["problems"]] == [
        "Not ready: no room",
        "2 pages are damaged: readers of these entries get an error",
        "All 3 places for clients are taken: further ones are refused",
    ]


def test_durations_have_two_units() -> None:
    assert [spell(s) for s in (0.9, 59, 60, 250, 3605, 90061)] == [
        *("0 s", "59 s", "1 min", "4 min 10 s", "1 h", "1 d 1 h")
    ]


async def test_the_last_commit_of_a_served_stream(stream: DataStream) -> None:
    append(stream, (1, b"one"))
    async with serving(stream) as web:
        found = json.loads((await ask(web.port, "/v1/overview"))[2])
        assert found["time"] - 60 < found["last_commit"] <= found["time"] + 1
        assert (found["problems"], found["upstreams"]) == ([], None)


async def test_a_dead_upstream_comes_first(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "relay.bin", stream_type=1):
        pass
    options = HttpOptions(port=0)
    relay = Relay(["127.0.0.1:9"], tmp_path / "relay.bin", host="127.0.0.1", port=0, http=options)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(relay.run)
            await relay.until(lambda: bool(relay.download.states[0].lost))
            assert relay.http_port is not None
            found = json.loads((await ask(relay.http_port, "/v1/overview"))[2])
            nursery.cancel_scope.cancel()
    [state] = found["upstreams"]
    assert (state["upstream"], state["state"], found["role"]) == ("127.0.0.1:9", "lost", "relay")
    assert state["seconds"] < 30
    texts = [each["text"] for each in found["problems"]]
    [text] = [text for text in texts if text.startswith("No upstream for ")]
    assert "127.0.0.1:9" in text
    assert "refused" in text


async def test_what_a_relay_lacks_is_said_once() -> None:
    async def gather(*, limit: int) -> MetricsSnapshot:
        return snapshot(20_000.0, 5)

    def upstream(name: str, state: str, reason: str) -> UpstreamStatus:
        return {
            "upstream": name,
            "state": state,
            "lag_entries": 0,
            "seconds": 70.0,
            "reason": f"{name} {reason}",
        }

    listed = [upstream("h:1", "set-aside", "holds less")]
    overview = Overview(HttpSource(lambda: None, gather, lambda: "", "x.bin", lambda: listed))
    [damage, *problems] = (await answer_of(overview))["problems"]
    assert "--heal" not in damage["advice"]
    assert [each["text"] for each in problems] == [
        "No upstream for 1 min 10 s: all are set aside",
        "h:1 has been set aside for 1 min 10 s: holds less",
    ]
    listed.append(upstream("h:2", "lost", "closed"))
    problems = (await answer_of(overview))["problems"]
    assert problems[1]["text"] == "No upstream for 1 min 10 s: h:2 closed"


async def test_a_stream_that_is_archived(tmp_path: Path) -> None:
    """The console and /v1/archive have what the archiver counts."""
    options = ArchiveOptions((tmp_path / "archive").as_uri(), interval=0.1)
    with StreamServer(
        tmp_path / "s.bin",
        host="127.0.0.1",
        port=0,
        in_process=True,
        http=HttpOptions(port=0),
        archive=options,
    ) as server:
        server.stream.append(2, b"x")
        assert server.http_port is not None
        with trio.fail_after(60):
            found: Any = {}
            while found.get("entries") != 1:
                status, _, body = await ask(server.http_port, "/v1/archive")
                found = json.loads(body) if status == 200 else {}
                await trio.sleep(0.05)
        assert (found["generation"], found["lag_bytes"], found["fenced"]) == (1, 0, 0)
        jsonschema.validate(found, DOCUMENT["components"]["schemas"]["Archive"])
        overview = json.loads((await ask(server.http_port, "/v1/overview"))[2])
        assert overview["archive"]["entries"] == 1
