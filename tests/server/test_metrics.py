"""A server's metrics, as Prometheus reads them, and the limits of the endpoint."""

from __future__ import annotations

import errno
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from datastreamer.errors import ExtraMissing, WriteFailed
from datastreamer.format import RESULT_BAD_FROM_ENTRY
from datastreamer.http.serving import serve_metrics, source_of
from datastreamer.metrics import exposition, writer_numbers
from datastreamer.metrics.exposition import Tally, exposition_parts, merge
from datastreamer.metrics.names import METRICS
from datastreamer.metrics.writer_numbers import WriterNumbers
from datastreamer.server.command_labels import COMMANDS
from datastreamer.server.limits import Limits
from datastreamer.server.metrics import collect
from datastreamer.server.server import Server
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from datastreamer.transport import listeners as listen
from tests.http.asking import answering, ask
from tests.network import model
from tests.network.fixtures import append, over_loopback
from tests.storage.made import FaultyDisk

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def test_commands_have_the_labels_that_alerts_name() -> None:
    assert sorted(COMMANDS) == [
        *("batch_read", "bookmark", "capabilities", "client_name", "commit_start"),
        *("entry", "entry_at_time"),
        *("filtered_read", "filtered_start", "filtered_start_bookmark", "follow_start", "header"),
        *("page_sums", "range_bookmark", "range_hash", "start", "start_bookmark", "stop"),
        "time_marks",
    ]


OK = model.result(0)


def parsed(text: bytes | str) -> Samples:
    """Each sample by name and labels; none twice."""
    if isinstance(text, bytes):
        text = text.decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"datastreamer_{name}", tuple(sorted(labels.items()))]


def scraping(server: Server) -> Any:
    source = source_of(server, server.stream.parts.counters.share())
    return answering(partial(serve_metrics, gather=source.gather, unready=source.unready))


def histogram_of(name: str, values: Iterable[float]) -> Any:
    tally = Tally(name)
    for value in values:
        tally.add(value)
    return tally.histogram()


# The writer's numbers.


def reported(stream: DataStream) -> dict[str, Any]:
    numbers = stream.parts.counters.share()
    assert numbers is not None
    return {name: samples[0][1] for name, samples in numbers.samples().items()}


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_counts_commits_from_the_first_on(path: Path, sync: Any) -> None:
    with DataStream.create(path, sync=sync, index="memory") as stream:
        append(stream, (1, b"a"), (2, b"bc"))  # before anybody shares them
        numbers = stream.parts.counters.share()
        assert numbers is not None
        assert stream.parts.counters.share() is numbers
        for _ in range(2):
            append(stream, (1, b"def"))
        now = reported(stream)
        assert now["datastreamer_committed_operations_total"] == 3
        assert now["datastreamer_committed_entries_total"] == 4
        assert now["datastreamer_committed_bytes_total"] == stream.header.total_length - 4096
        assert now["datastreamer_commit_failures_total"] == 0
        commits = now["datastreamer_commit_seconds"]
        assert commits["buckets"][-1] == 3
        assert 0 < commits["sum"] < 10
        syncs = now["datastreamer_sync_seconds"]
        assert syncs["buckets"][-1] == (3 if sync == "commit" else 0)
        assert (syncs["sum"] > 0) == (sync == "commit")
        stream.sync()
        assert reported(stream)["datastreamer_sync_seconds"]["buckets"][-1] == (
            3 if sync == "commit" else 1
        )


def test_an_operation_of_several_pages_counts_its_padding(stream: DataStream) -> None:
    append(stream, *[(1, bytes(400_000))] * 9)
    assert reported(stream)["datastreamer_committed_entries_total"] == 9
    assert (
        reported(stream)["datastreamer_committed_bytes_total"] == stream.header.total_length - 4096
    )


def test_commits_that_fail_are_counted_apart(path: Path) -> None:
    disk = FaultyDisk()

    def refuse() -> None:
        disk.before.clear()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with DataStream.create(path, sync="os", index="memory", disk=disk) as stream:
        append(stream, (1, b"a"))
        disk.before["commit data"] = refuse
        stream.start_atomic_op()
        stream.add_entry(1, b"b")
        with pytest.raises(WriteFailed):
            stream.commit_atomic_op()
        assert reported(stream)["datastreamer_commit_failures_total"] == 1
        assert reported(stream)["datastreamer_committed_operations_total"] == 1
        stream.commit_atomic_op()
        assert reported(stream)["datastreamer_committed_operations_total"] == 2


@pytest.mark.parametrize("entries", [1, 5])  # at once, and in parts that are written ahead
def test_a_full_disk_is_a_commit_that_fails(path: Path, entries: int) -> None:
    disk = FaultyDisk()
    with DataStream.create(path, sync="os", index="memory", disk=disk) as stream:
        append(stream, (1, bytes(900_000)))
        disk.largest = stream.file_size
        with pytest.raises(WriteFailed):
            append(stream, *[(1, bytes(1_000_000))] * entries)
        assert reported(stream)["datastreamer_commit_failures_total"] == 1
        disk.largest = None
        if stream.atomic_op().is_open:
            stream.rollback_atomic_op()


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_a_sync_that_fails_is_counted_once(path: Path, sync: Any) -> None:
    disk = FaultyDisk()
    with DataStream.create(path, sync=sync, index="memory", disk=disk) as stream:
        append(stream, (1, b"a"))
        stream.sync()

        def refuse() -> None:
            disk.before.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        disk.before["commit sync" if sync == "commit" else "sync"] = refuse
        with suppress(WriteFailed):
            append(stream, (1, b"b"))
            stream.sync()
        assert not disk.before
        assert reported(stream)["datastreamer_commit_failures_total"] == 1
        if stream.atomic_op().is_open:
            stream.rollback_atomic_op()


def test_another_process_reads_the_same(stream: DataStream) -> None:
    append(stream, (1, b"a"))
    ours = stream.parts.counters.share()
    assert ours is not None
    theirs = WriterNumbers(os.dup(ours.fd), write=False)
    append(stream, (1, b"b"))
    assert theirs.samples() == ours.samples()
    with pytest.raises(TypeError):
        theirs.memory[0] = 1  # for reading alone
    stream.close()
    assert theirs.samples()["datastreamer_committed_operations_total"] == [([], 2)]
    theirs.close()


def test_who_reads_has_no_numbers(stream: DataStream, path: Path) -> None:
    with DataStream.open(path, follow=True) as follower:
        assert follower.parts.counters.share() is None


def test_every_slot_is_one_metrics_alone() -> None:
    places = [
        writer_numbers.ENTRIES,
        writer_numbers.BYTES,
        writer_numbers.FAILURES,
        writer_numbers.COMMIT_NS,
        writer_numbers.SYNC_NS,
    ]
    size = len(METRICS["datastreamer_commit_seconds"].bounds) + 1
    places += range(writer_numbers.COMMIT_BUCKETS, writer_numbers.COMMIT_BUCKETS + size)
    places += range(writer_numbers.SYNC_BUCKETS, writer_numbers.SYNC_BUCKETS + size)
    places += range(writer_numbers.ARCHIVE, writer_numbers.ARCHIVE + 16)
    requests = writer_numbers.ARCHIVE + 16
    places += range(requests, requests + len(writer_numbers.REQUESTS))
    assert sorted(places) == list(range(writer_numbers.SLOTS))


# Samples of one process and of several.


def test_histograms() -> None:
    name = "datastreamer_clients_lag_entries"
    empty = histogram_of(name, [])
    assert empty["sum"] == 0
    assert set(empty["buckets"]) == {0}
    assert len(empty["buckets"]) == len(METRICS[name].bounds) + 1
    some = histogram_of(name, [10, 0, 0, 11, 10**12])
    assert some["buckets"][:4] == [2, 2, 3, 4]
    assert some["buckets"][-2:] == [4, 5]
    assert some["sum"] == 21 + 10**12


def test_several_processes_are_told_as_one() -> None:
    def snapshot(sent: int, head: int, start: float, lags: list[int]) -> exposition.MetricsSnapshot:
        name = "datastreamer_clients_lag_entries"
        return {
            "time": start,
            "samples": {
                "datastreamer_sent_bytes_total": [([], sent)],
                "datastreamer_head_entries": [([], head)],
                "datastreamer_clients": [(["live"], len(lags)), (["idle"], 1)],
                "process_start_time_seconds": [([], start)],
                name: [([], histogram_of(name, lags))],
                "datastreamer_commit_seconds": [([], {"buckets": [head] * 20, "sum": head / 2})],
            },
            "clients": [
                {
                    "id": str(lag),
                    "client": f"[::1]:{lag}",
                    "state": "live",
                    "seconds": 1.0,
                    "entry": 0,
                    "offset": None,
                    "lag_entries": lag,
                    "lag_bytes": None,
                }
                for lag in lags
            ],
        }

    parts = [snapshot(10, 7, 5.0, [1, 900]), snapshot(3, 8, 4.0, [20])]
    merged = merge([json.loads(json.dumps(part)) for part in parts], 2)
    assert [client["id"] for client in merged["clients"]] == ["900", "20"]
    samples = parsed(b"".join(exposition_parts(merged)))
    assert value(samples, "sent_bytes_total") == 13
    assert value(samples, "head_entries") == 8
    assert value(samples, "clients", state="live") == 3
    assert value(samples, "clients", state="idle") == 2
    assert value(samples, "commit_seconds_count") == 8  # all read the same writer's
    assert value(samples, "commit_seconds_sum") == 4
    assert value(samples, "clients_lag_entries_bucket", le="10") == 1
    assert value(samples, "clients_lag_entries_gsum") == 921
    assert samples["process_start_time_seconds", ()] == 4
    assert value(samples, "client_lag_entries", client="[::1]:900") == 900


# A server.


async def test_tells_what_happens(stream: DataStream) -> None:
    append(stream, *[(7, bytes(83))] * 10)
    async with over_loopback(stream) as rig, scraping(rig.server) as port:
        before = parsed((await ask(port, "/metrics"))[2])
        assert value(before, "clients", state="live") == 0
        assert value(before, "sent_entries_total") == 0
        async with rig.client() as live, rig.client() as idle:
            await idle.ask(model.entry(3), OK + model.pack(3, 7, bytes(83), 0xFE))
            await idle.ask(model.start(99), model.result(RESULT_BAD_FROM_ENTRY))
            await live.ask(model.start(4), OK)
            for number in range(4, 10):
                await live.expect(model.pack(number, 7, bytes(83)))
            while rig.server.counts.entries_sent < 6:
                await trio.lowlevel.checkpoint()
            code, headers, text = await ask(port, "/metrics")
            overview = json.loads((await ask(port, "/v1/clients"))[2])
    assert (code, headers["Content-Type"]) == (200, exposition.TEXT)
    now = parsed(text)
    assert value(now, "head_entries") == 10
    assert value(now, "head_bytes") == 4096 + 1000
    assert value(now, "committed_operations_total") == 1
    assert value(now, "committed_entries_total") == 10
    assert value(now, "commit_seconds_count") == 1
    assert value(now, "sent_entries_total") == 6
    assert value(now, "sent_bytes_total") == rig.server.counts.bytes_sent
    assert value(now, "commands_total", command="entry") == 1
    assert value(now, "commands_total", command="start") == 2
    assert value(now, "clients", state="idle") == 1
    assert value(now, "connections_accepted_total") == rig.server.counts.accepted == 2
    assert value(now, "clients_lag_entries_gcount") == 1
    assert value(now, "clients_lag_entries_bucket", le="0") == 1
    assert value(now, "clients_lag_bytes_gsum") == 0
    [(name, error)] = rig.server.counts.errors.items()
    assert value(now, "errors_total", kind=name) == error == 1
    first, second = overview["clients"]
    assert (first["entry"], first["lag_entries"], first["lag_bytes"]) == (10, 0, 0)
    assert first["offset"] == 5096
    assert (second["state"], second["entry"], second["lag_entries"]) == ("idle", None, None)
    assert overview["head_entries"] == 10
    assert overview["connected"]["idle"] == 1


async def test_what_has_not_happened_yet_is_told_as_0(stream: DataStream) -> None:
    # Else Prometheus sees no increase in the first refusal, or the first fault.
    async with over_loopback(stream) as rig, scraping(rig.server) as port:
        before = parsed((await ask(port, "/metrics"))[2])
        async with rig.client() as client:
            await client.ask(model.start(99), model.result(RESULT_BAD_FROM_ENTRY))
        while not rig.server.counts.ended:
            await trio.lowlevel.checkpoint()
        after = parsed((await ask(port, "/metrics"))[2])
    for name, labels in {
        "connections_refused_total": {"reason": "max_clients"},
        "connections_ended_total": {"reason": "failed"},
        "errors_total": {"kind": "fault"},
        "commands_total": {"command": "batch_read"},
    }.items():
        assert value(before, name, **labels) == 0
    assert value(before, "errors_total", kind="bad_from_entry") == 0
    assert value(after, "errors_total", kind="bad_from_entry") == 1
    assert set(after) == set(before)
    assert not any(
        "lease" in str(labels) for _, labels in after
    )  # tokens cannot be checked, every publisher is refused here


async def test_who_is_behind_is_told_first(stream: DataStream) -> None:
    append(stream, *[(7, bytes(100_000))] * 200)
    async with (
        over_loopback(stream, receive_buffer=4096) as rig,
        scraping(rig.server) as port,
        rig.client() as stalled,
        rig.client() as live,
    ):
        await live.ask(model.start(200), OK)
        await stalled.ask(model.start(0), OK)
        while not any(session.blocked for session in rig.server.sessions):
            await trio.lowlevel.checkpoint()
        samples = parsed((await ask(port, "/metrics"))[2])
        limited = json.loads((await ask(port, "/v1/clients?limit=1"))[2])
    (behind, ahead) = sorted(
        (lag for (name, _), lag in samples.items() if name == "datastreamer_client_lag_entries"),
        reverse=True,
    )
    assert ahead == 0
    assert 150 < behind <= 200
    [client] = limited["clients"]
    assert client["state"] == "catch-up"
    assert client["lag_entries"] == behind
    assert client["lag_bytes"] >= (behind - 1) * 100_017
    peer = client["client"]
    assert value(samples, "client_lag_bytes", client=peer) == client["lag_bytes"]


async def test_many_clients_are_few_series(stream: DataStream) -> None:
    async with over_loopback(stream) as rig:
        peers = []
        async with trio.open_nursery() as nursery:
            for _ in range(exposition.LISTED_CLIENTS + 5):
                context = rig.client()
                peer = await context.__aenter__()
                peers.append(context)
                await peer.ask(model.start(0), OK)
            nursery.cancel_scope.cancel()
        snapshot = await collect(rig.server, limit=10_000)
        assert len(snapshot["clients"]) == exposition.LISTED_CLIENTS + 5
        assert len((await collect(rig.server))["clients"]) == exposition.LISTED_CLIENTS
        series = [
            name
            for name, _ in parsed(b"".join(exposition_parts(snapshot)))
            if name.endswith("client_lag_bytes")
        ]
        assert len(series) == exposition.LISTED_CLIENTS
        for context in peers:
            await context.__aexit__(None, None, None)


async def test_refused_and_ended_by_reason(stream: DataStream) -> None:
    async with over_loopback(stream, max_clients=1) as rig, scraping(rig.server) as port:
        async with rig.client() as one:
            await one.nothing_more()
            async with rig.client():
                while not rig.server.counts.refused:
                    await trio.lowlevel.checkpoint()
        while rig.server.sessions:
            await trio.lowlevel.checkpoint()
        samples = parsed((await ask(port, "/metrics"))[2])
    [(reason, _)] = rig.server.counts.refused.items()
    assert value(samples, "connections_refused_total", reason=reason) == 1
    [(ended, _)] = rig.server.counts.ended.items()
    assert value(samples, "connections_ended_total", reason=ended) == 1


async def test_alive_and_ready(stream: DataStream, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> bool:
        raise OSError(errno.EIO, "from the callback")

    async with over_loopback(stream) as rig, scraping(rig.server) as port:
        assert (await ask(port, "/healthz"))[0] == 200
        assert (await ask(port, "/readyz"))[::2] == (200, b"serving\n")
        with monkeypatch.context() as patched:
            patched.setattr(stream, "refresh_open_file", unreadable)
            while not rig.server.broadcast.trouble:
                await trio.lowlevel.checkpoint()
            code, _, why = await ask(port, "/readyz")
            assert (code, b"from the callback" in why) == (503, True)
            assert (await ask(port, "/healthz"))[0] == 200
        await rig.server.finish(0)
        code, _, why = await ask(port, "/readyz")
        assert (code, b"shutting down" in why) == (503, True)


async def test_not_ready_where_the_file_is_not_what_it_was(tmp_path: Path) -> None:
    path, other = tmp_path / "s.bin", tmp_path / "other.bin"
    with DataStream.create(path, version=1, system_id=1, sync="os") as stream:
        append(stream, *[(7, b"data" * 100)] * 100)
        async with over_loopback(stream) as rig, scraping(rig.server) as port:

            async def ready() -> tuple[int, bytes]:
                return (await ask(port, "/readyz"))[::2]

            assert await ready() == (200, b"serving\n")
            size = path.stat().st_size
            os.truncate(path, 5000)
            code, why = await ready()
            assert (code, b"and the file 5000" in why) == (503, True)
            os.truncate(path, size)
            assert (await ready())[0] == 200
            path.rename(other)
            code, why = await ready()
            assert (code, b"the file was moved away" in why) == (503, True)
            path.write_bytes(other.read_bytes())
            code, why = await ready()
            assert (code, b"another file is at its path now" in why) == (503, True)
            other.replace(path)
            assert (await ready())[0] == 200


async def test_ready_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with DataStream.create("s.bin", version=1, system_id=1, sync="os") as stream:
        async with over_loopback(stream) as rig, scraping(rig.server) as port:
            monkeypatch.chdir("/")
            assert (await ask(port, "/readyz"))[0] == 200


# The endpoint of several processes.


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(listen.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExtraMissing, match=r"datastreamer\[metrics\]"):
        StreamServer(path, host="127.0.0.1", port=0, metrics_port=0)
    assert not path.exists()


@pytest.mark.parametrize("in_process", [True, False])
def test_an_embedded_server(path: Path, in_process: bool) -> None:
    with StreamServer(
        path, host="127.0.0.1", port=0, metrics_port=0, in_process=in_process
    ) as server:
        for _ in range(3):
            append(server.stream, (model.BOOKMARK, b"key"), (1, b"entry"))
        url = f"http://127.0.0.1:{server.metrics_port}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
            samples = parsed(answer.read())
        with urllib.request.urlopen(f"{url}/readyz", timeout=20) as answer:
            assert answer.read() == b"serving\n"
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}/nothing", timeout=20)
    assert value(samples, "committed_operations_total") == 3
    assert value(samples, "committed_entries_total") == 6
    assert value(samples, "sync_seconds_count") >= 3
    assert 0 <= value(samples, "index_lag_entries") <= 6
    assert samples["process_resident_memory_bytes", ()] > 1 << 20


def test_several_workers_are_told_as_one(path: Path) -> None:
    with (
        StreamServer(path, host="127.0.0.1", port=0, workers=2, metrics_port=0) as server,
        ExitStack() as stack,
    ):
        append(server.stream, (1, b"one"), (1, b"two"))
        for _ in range(6):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.settimeout(20)
            client.sendall(model.start(2))
            assert client.recv(100) == OK
        url = f"http://127.0.0.1:{server.metrics_port}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
            samples = parsed(answer.read())
        with urllib.request.urlopen(f"{url}/v1/clients?limit=4", timeout=20) as answer:
            reported = json.loads(answer.read())
        with urllib.request.urlopen(f"{url}/readyz", timeout=20) as answer:
            assert answer.read() == b"serving\n"
    assert value(samples, "committed_operations_total") == 1
    assert value(samples, "head_entries") == 2
    assert value(samples, "connections_accepted_total") == 6
    assert value(samples, "commands_total", command="start") == 6
    assert value(samples, "clients_limit") == Limits().max_clients
    assert value(samples, "clients_lag_entries_gcount") == 6
    assert len({client["id"] for client in reported["clients"]}) == 4
    assert sum(reported["connected"].values()) == 6


def test_no_metrics_unless_asked_for(path: Path) -> None:
    with StreamServer(path, host="127.0.0.1", port=0, in_process=True) as server:
        assert server.metrics_port is None
        assert not server.stream.parts.counters.shared


def test_bounds_of_buckets_are_exact() -> None:
    """What is rounded is another number, and no bound of anything."""
    bounds = {bound for metric in METRICS.values() for bound in metric.bounds}
    assert 1_048_576 in bounds
    assert all(float(exposition._shown(bound)) == bound for bound in bounds)
