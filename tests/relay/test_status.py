"""The status of a relay and its upstreams: metrics, /readyz, `top`'s overview."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.upstream import Upstream
from datastreamer.errors import ConnectFailed, ConnectionLost, ListenFailed, UpstreamShorter
from datastreamer.relay.relay import Relay
from datastreamer.relay.upstream_state import UpstreamState
from datastreamer.service.blocking_relay import BlockingRelay
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import open_listeners
from tests.relay.relaying import Rig, contents, fill, new, nursery_for, relaying, serving, twin
from tests.server.test_metrics import ask


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[DataStream]:
    with new(tmp_path / "upstream.bin") as made:
        yield made


async def seen(rig: Rig, path: str) -> tuple[int, str]:
    port = rig.relay.metrics_port
    assert port is not None
    code, _, body = await ask(port, path)
    return code, body.decode()


async def series(rig: Rig, name: str) -> dict[str, float]:
    code, text = await seen(rig, "/metrics")
    assert code == 200
    lines = [line for line in text.splitlines() if line.startswith(f"datastreamer_relay_{name}")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_the_lag_of_each_upstream_and_its_state(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 100)
    with twin(tmp_path / "second.bin", upstream, 100) as second:
        fill(second, 20)
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(
                nursery, tmp_path / "relay.bin", one.port, two.port, metrics_port=0
            )
            await relay.has(100)
            await relay.relay.until(lambda: relay.download.states[1].entries == 120)
            first, other = f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}"
            assert await series(relay, "lag_entries") == {
                f'datastreamer_relay_lag_entries{{upstream="{first}"}}': 0,
                f'datastreamer_relay_lag_entries{{upstream="{other}"}}': 20,
            }
            states = await series(relay, "upstream_state")
            assert {name for name, is_so in states.items() if is_so} == {
                f'datastreamer_relay_upstream_state{{state="in-use",upstream="{first}"}}',
                f'datastreamer_relay_upstream_state{{state="spare",upstream="{other}"}}',
            }
            code, text = await seen(relay, "/v1/clients")
            assert (code, json.loads(text)["upstreams"]) == (
                200,
                [
                    {"upstream": first, "state": "in-use", "lag_entries": 0},
                    {"upstream": other, "state": "spare", "lag_entries": 20},
                ],
            )
            code, text = await seen(relay, "/metrics")
            assert "datastreamer_committed_entries_total 100.0" in text
            assert "datastreamer_head_entries 100.0" in text


async def test_ready_while_the_lag_is_under_its_bound(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 100)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(
            nursery,
            tmp_path / "relay.bin",
            server.port,
            metrics_port=0,
            ready_lag=50,
            look_seconds=1000,  # nothing else reports the upstream's head
        )
        await relay.has(100)
        assert await seen(relay, "/readyz") == (200, "serving\n")
        state = relay.download.states[0]
        for entries, code in ((150, 200), (151, 503)):
            state.entries = entries
            assert (await seen(relay, "/readyz"))[0] == code
        _, why = await seen(relay, "/readyz")
        assert why == f"51 entries behind 127.0.0.1:{server.port}; at most 50 are allowed\n"
        assert (await seen(relay, "/healthz"))[0] == 200
        state.entries = 100
        # What is here is served, also when its upstream is lost.
        await server.stop()
        await relay.relay.until(lambda: relay.download.current is None and bool(state.lost))
        assert await seen(relay, "/readyz") == (200, "serving\n")
        states = await series(relay, "upstream_state")
        assert [name for name, is_so in states.items() if is_so and "lost" in name]


async def test_not_ready_when_nothing_is_downloaded_any_more(
    tmp_path: Path, upstream: DataStream
) -> None:
    fill(upstream, 100)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port, metrics_port=0)
        await relay.has(100)
        upstream.truncate(60)
        await relay.relay.until(lambda: relay.relay.failure is not None)
        code, why = await seen(relay, "/readyz")
        assert (code, "entries 60 to 99" in why) == (503, True)
        states = await series(relay, "upstream_state")
        assert [name for name, is_so in states.items() if is_so and "set-aside" in name]


async def test_before_an_upstream_has_answered(tmp_path: Path, upstream: DataStream) -> None:
    """The endpoint is there, with a file and without one."""
    with new(tmp_path / "old.bin") as old:
        fill(old, 10)
    for file, why in (
        ("none.bin", "no upstream has answered yet, so the stream is not known\n"),
        ("old.bin", "no upstream has reported its head yet\n"),
    ):
        relay = Relay([("127.0.0.1", 1)], tmp_path / file, host="127.0.0.1", port=0, metrics_port=0)
        rig = Rig(relay, 0)
        async with nursery_for() as nursery:
            nursery.start_soon(relay.run)
            await relay.until(lambda relay=relay: bool(relay.download.states[0].lost))
            assert await seen(rig, "/readyz") == (503, why)
            assert (await seen(rig, "/healthz"))[0] == 200
            assert (await seen(rig, "/metrics"))[0] == 200
            code, text = await seen(rig, "/v1/clients")
            overview = json.loads(text)
            assert (code, overview["head_entries"]) == (200, 10 if file == "old.bin" else None)
            [first] = overview["upstreams"]
            assert first == {"upstream": "127.0.0.1:1", "state": "lost", "lag_entries": None}
            nursery.cancel_scope.cancel()


async def test_a_metrics_port_in_use_leaves_no_file(tmp_path: Path) -> None:
    [listener] = open_listeners("127.0.0.1", 0)
    with listener:
        taken = listener.getsockname()[1]
        relay = Relay(
            [("127.0.0.1", 1)], tmp_path / "r.bin", host="127.0.0.1", port=0, metrics_port=taken
        )
        with trio.fail_after(10), pytest.raises(ListenFailed):
            await relay.run()
    assert list(tmp_path.iterdir()) == []


def test_for_synchronous_code(tmp_path: Path) -> None:
    with StreamServer(
        tmp_path / "s.bin", host="127.0.0.1", port=0, index="memory", in_process=True
    ) as server:
        fill(server.stream, 30)
        with BlockingRelay(
            [("127.0.0.1", server.port)],
            tmp_path / "r.bin",
            host="127.0.0.1",
            port=0,
            index="memory",
            metrics_port=0,
            ready_lag=0,
        ) as relay:
            with BlockingClient("127.0.0.1", relay.port) as client:
                assert len(list(client.entries(stop=30))) == 30
            url = f"http://127.0.0.1:{relay.metrics_port}/readyz"
            with urllib.request.urlopen(url, timeout=20) as answer:
                assert answer.read() == b"serving\n"
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(url, timeout=20)
        with DataStream.open(tmp_path / "r.bin", read_only=True, index="memory") as kept:
            assert contents(kept) == contents(server.stream)


def test_a_failure_names_its_server_once(caplog: pytest.LogCaptureFixture) -> None:
    state = UpstreamState(Upstream("h", 7))
    state.log_failure(logging.WARNING, "", ConnectionLost("h:7 closed the connection; again"))
    state.log_failure(logging.WARNING, "", ConnectFailed("cannot connect to h:7"))
    state.log_failure(logging.ERROR, "is set aside", UpstreamShorter("h:7 holds only 1 entry", 1))
    assert [record.getMessage() for record in caplog.records] == [
        "h:7 closed the connection",
        "h:7: cannot connect to h:7",
        "h:7 is set aside: holds only 1 entry",
    ]
