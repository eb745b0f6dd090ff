"""Reassembly in Spark: of all there is, and batch by batch, beside the core."""

from __future__ import annotations

import random
import runpy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from datastreamer import DataStream, StreamServer
from datastreamer._codec import Entry
from datastreamer.errors import ExtraMissing, UsageError
from datastreamer.reassembly import Splitter, pack_message, pack_records
from datastreamer.spark import messages, read_messages, reassemble, reassemble_stream
from datastreamer.spark.reassembly.groups import connected
from datastreamer.spark.versions import HAS_LIMITS
from tests.network.stub import Selecting, Stub, StubServer, handler
from tests.reassembly.generated import name
from tests.spark.reassembly.event_rows import Message, core_events, examples, in_order, plain
from tests.spark.settings import ROOT


def frame(spark: Any, rows: list[Message]) -> Any:
    types = [pa.binary(), pa.binary(), pa.string(), pa.int64()]
    columns = list(zip(*rows, strict=True)) or [[], [], [], []]
    arrays = [pa.array(list(column), of) for column, of in zip(columns, types, strict=True)]
    return spark.createDataFrame(pa.table(arrays, ["key", "value", "source", "position"]))


@pytest.mark.slow
@pytest.mark.parametrize("subscribe", [None, [b"\x01"]], ids=["everything", "a part"])
def test_the_same_as_the_core(spark: Any, subscribe: Any) -> None:
    made = examples(60)
    reported = reassemble(frame(spark, made).repartition(3), subscribe).rows.collect()
    # That of nested headers is added.
    due = subscribe and [*subscribe, b"\xff"]
    assert plain(reported) == plain(core_events(in_order(made), due))
    assert {row.event for row in reported} == {"complete", "conflict", "malformed", "dropped"}
    assert {row.what for row in reported} >= {"value", "prefix", "count", "end"}


def test_groups_are_joined_over_long_chains(spark: Any) -> None:
    # 0-1-2-...-40, 100-101, and a circle.
    edges = [(at, at + 1) for at in range(40)]
    edges += [(101, 100), (200, 201), (201, 202), (202, 200)]
    random.Random(1).shuffle(edges)
    made = spark.createDataFrame(
        [(b"%03d" % a, b"%03d" % b) for a, b in edges], "a binary, b binary"
    )
    found = {int(row.node): int(row.home) for row in connected(made).collect()}
    assert found == dict.fromkeys(range(1, 41), 0) | {101: 100, 201: 200, 202: 200}


def payload(number: int) -> tuple[bytes, dict[bytes, Any]]:
    """A payload of some parts, whose headers are nested."""
    own = b"%032d" % number
    parts = [(b"%d" % at, b"value %d" % at * (number % 7)) for at in range(number % 20)]
    return own, {name(1, own): parts, name(2, own): b"blob" * 100}


def produced(seed: int, count: int) -> list[tuple[bytes, bytes]]:
    """The messages of one producer, in an order of its own; a third of them, another one for each
    of three producers, is missing."""
    choose = random.Random(seed)
    splitter = Splitter(200)
    made = [message for at in range(count) for message in splitter.split(*payload(at))]
    choose.shuffle(made)
    return [message for message in made if sum(message[0]) % 3 != seed % 3]


def write(path: Path, produced: list[tuple[bytes, bytes]]) -> None:
    with (
        DataStream.open_or_create(path, version=1, system_id=1, sync="os") as stream,
        stream.atomic_op() as op,
    ):
        op.add_bookmark(b"not a message")
        op.add_entry(9, b"neither is this")
        op.add_entries(0x10, [pack_message(*message) for message in produced])


def test_over_files_and_a_server(spark: Any, tmp_path: Path) -> None:
    for seed in range(3):
        made = produced(seed, 40)
        if seed == 1:
            key = next(key for key, _ in made if key[0] == 1)
            made.append((key, b"a lie, which comes late"))
        write(tmp_path / f"{seed}.bin", made)
    with StreamServer(tmp_path / "2.bin", host="127.0.0.1", port=0, in_process=True) as server:
        frames = []
        for seed in range(3):
            place = ("path", str(tmp_path / f"{seed}.bin"))
            if seed == 2:
                place = ("server", f"127.0.0.1:{server.port}")
            entries = spark.read.format("datastream").option(*place).load()
            frames.append(messages(entries, f"producer {seed}"))
        found = reassemble(frames[0].union(frames[1]).union(frames[2]))
        payloads = {bytes(row.id): row for row in found.payloads.collect()}
        events = found.events.collect()
    assert len(payloads) == 40
    for number in range(40):
        own, parts = payload(number)
        whole = [
            message for message in Splitter(200).split(own, parts) if message[0][0] not in (0, 255)
        ]
        assert [(bytes(k), bytes(v)) for k, v in payloads[own].parts] == sorted(whole)
    [conflict] = events
    assert (conflict.event, conflict.what, conflict.source) == ("conflict", "value", "producer 1")


def liars(folder: Path) -> dict[str, str]:
    """Streams of three producers with the same messages in other orders, some wrong or missing."""
    made = [(key, value) for key, value, _, _ in examples(60) if len(key) >= 33]
    places = {}
    for seed in range(3):
        choose = random.Random(seed)
        mine = [message for message in made if choose.random() < 0.9]
        mine += [(key, value + b"?") for key, value in mine if choose.random() < 0.02]
        choose.shuffle(mine)
        write(folder / f"{seed}.bin", mine)
        places[f"producer {seed}"] = str(folder / f"{seed}.bin")
    return places


@pytest.mark.slow
@pytest.mark.parametrize("subscribe", [[b"\x01"], []])
def test_portions_of_files_and_a_server(spark: Any, tmp_path: Path, subscribe: Any) -> None:
    """What is reassembled of the portions that were read is what a full read gives."""
    places = liars(tmp_path)
    with StreamServer(tmp_path / "2.bin", host="127.0.0.1", port=0, in_process=True) as server:
        whole = read_messages(spark, places)
        places["producer 2"] = f"tcp://127.0.0.1:{server.port}"
        places["producer 1"] = Path(places["producer 1"])
        read = read_messages(spark, places, subscribe)
        expected = reassemble(whole, subscribe).rows.collect()
        assert plain(reassemble(read, subscribe).rows.collect()) == plain(expected)
        assert len({row.event for row in expected}) > 2
        counts = [
            [row["count"] for row in frame.groupBy("source").count().orderBy("source").collect()]
            for frame in (read, whole, whole.where(portions(subscribe)))
        ]
    assert counts[0] == counts[2] != counts[1]


def portions(subscribe: list[bytes]) -> str:
    """The condition of headers and keys that are subscribed to, in SQL."""
    prefixes = (b"\0", b"\xff", *subscribe)
    return " OR ".join(f"startswith(key, X'{prefix.hex()}')" for prefix in prefixes)


def test_portions_of_an_old_server(spark: Any) -> None:
    """It is asked for nothing that it does not know with `batchReads` false."""
    made = [pack_message(*message) for message in produced(1, 5)]
    entries = [Entry(n, 0x10, data) for n, data in enumerate(made)]
    old = [Stub(entries, extensions="refused") for _ in range(8)]
    new = [Selecting(entries) for _ in range(8)]
    counts = []
    for stubs in (old, new):
        with StubServer(*map(handler, stubs)) as server:
            options = {"batchReads": stubs is old}
            places = {"it": f"tcp://127.0.0.1:{server.port}"}
            found = read_messages(spark, places, [b"\x01"], **options).collect()
            counts.append(sorted((bytes(row.key), row.position, row.source) for row in found))
    assert counts[0] == counts[1]
    due = [key for key, _ in produced(1, 5) if key[0] in (0, 1, 255)]
    assert [key for key, _, _ in counts[0]] == sorted(due)


@pytest.mark.slow
def test_portions_of_streams(stateful: Any, tmp_path: Path) -> None:
    """Batch by batch, over a restart."""
    sink, subscribe = Sink(), [b"\x01"]
    for half in range(2):
        for seed in range(2):
            write(tmp_path / f"{seed}.bin", produced(seed, 20)[half::2])
        with StreamServer(tmp_path / "1.bin", host="127.0.0.1", port=0, in_process=True) as server:
            places = {"a": tmp_path / "0.bin", "b": f"tcp://127.0.0.1:{server.port}"}
            limits = {"maxEntriesPerTrigger": 50} if HAS_LIMITS else {}
            found = read_messages(stateful, places, subscribe, stream=True, **limits)
            sink.run(reassemble_stream(found, subscribe).rows, tmp_path / "checkpoint")
    assert {row.event for row in sink.rows} == {"complete"}
    found = {bytes(row.id): row.parts for row in sink.rows}
    assert len(found) == len(sink.rows) == 20
    for number in range(20):
        own, parts = payload(number)
        whole = [m for m in Splitter(200).split(own, parts) if m[0][0] == 1]
        assert [(bytes(k), bytes(v)) for k, v in found[own]] == sorted(whole)
    assert sink.batches > (2 if HAS_LIMITS else 1)


def test_the_example(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [str(tmp_path / f"{seed}.bin") for seed in range(2)]
    for seed, place in enumerate(places):
        write(Path(place), produced(seed, 9))
    run = runpy.run_path(str(ROOT / "examples" / "spark_reassembly.py"))["run"]
    run(spark, str(tmp_path / "out"), places)
    assert capsys.readouterr().out == "9 payloads\n"
    found = spark.read.parquet(str(tmp_path / "out" / "payloads")).select("id").collect()
    assert sorted(bytes(row.id) for row in found) == [b"%032d" % at for at in range(9)]


def test_what_is_no_message(spark: Any, tmp_path: Path) -> None:
    with (
        DataStream.create(tmp_path / "s.bin", version=1, system_id=7) as stream,
        stream.atomic_op() as op,
    ):
        op.add_entry(0x10, b"")
        op.add_entry(0x10, b"\x00")
        op.add_entry(0x10, b"\x00\x09key")
        op.add_entry(0x10, pack_message(b"short", b"value"))
        op.add_entry(0x10, pack_message(name(0, b"p"), pack_records([])))
        op.add_entry(0x11, pack_message(name(0, b"q"), pack_records([])))
    entries = spark.read.format("datastream").option("systemId", "true")
    found = reassemble(messages(entries.load(str(tmp_path / "s.bin"))))
    reported = (
        found.events.orderBy("position").select("what", "key", "source", "position").collect()
    )
    assert [tuple(row) for row in reported] == [
        ("an entry of 0 bytes does not hold its key", b"", "7", 0),
        ("an entry of 1 bytes does not hold its key", b"", "7", 1),
        ("an entry of 5 bytes does not hold its key", b"key", "7", 2),
        ("a key of 5 bytes, less than 33", b"short", "7", 3),
    ]
    assert [bytes(row.id) for row in found.payloads.collect()] == [name(0, b"p")[1:]]


class Sink:
    """The output of a streaming query, batch by batch."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.batches = 0

    def receive(self, reported: Any, batch: int) -> None:
        rows = reported.collect()
        self.rows += rows
        self.batches += bool(rows)

    def run(self, reported: Any, checkpoint: Path) -> None:
        """Read what there is, and end."""
        query = (
            reported.writeStream.foreachBatch(self.receive)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()


@pytest.mark.slow
def test_batch_by_batch_over_restarts(stateful: Any, tmp_path: Path) -> None:
    rows = [(key, value) for key, value, _, _ in examples(60)]
    cuts = [0, len(rows) // 3, 2 * len(rows) // 3, len(rows)]
    sink = Sink()
    for start, stop in pairwise(cuts):
        with (
            DataStream.open_or_create(tmp_path / "s.bin", version=1, system_id=1) as stream,
            stream.atomic_op() as op,
        ):
            op.add_entries(0x10, [pack_message(*row) for row in rows[start:stop]])
        # Each time another query, which continues from the checkpoint.
        entries = stateful.readStream.format("datastream")
        entries = entries.option("maxEntriesPerTrigger", len(rows) // 5)
        found = messages(entries.load(str(tmp_path / "s.bin")), "s")
        sink.run(reassemble_stream(found, max_age=None).rows, tmp_path / "checkpoint")
    assert sink.batches > 3
    expected = core_events([(*row, "s", at) for at, row in enumerate(rows)])
    unfinished = [row for row in expected if row[0] == "dropped"]
    assert unfinished
    assert plain([*sink.rows, *unfinished]) == plain(expected)


def test_what_is_too_old_is_dropped(stateful: Any, tmp_path: Path) -> None:
    sink = Sink()
    # The second batch is later than the first, by whatever it takes Spark to come to it.
    for number in (5, 6):
        write(tmp_path / "s.bin", Splitter(200).split(*payload(number))[:-1])
        entries = stateful.readStream.format("datastream").load(str(tmp_path / "s.bin"))
        reported = reassemble_stream(messages(entries), max_age=0.001).rows
        sink.run(reported, tmp_path / "checkpoint")
    assert [(row.event, row.what, row.missing, bytes(row.id)) for row in sink.rows] == [
        ("dropped", "age", 1, b"%032d" % 5)
    ]


@pytest.mark.slow
def test_late_ones_are_swallowed_lane_by_lane(stateful: Any, tmp_path: Path) -> None:
    from pyspark.sql import functions as sql

    sink = Sink()
    # All keys of a payload have its id behind the first byte.
    lane = sql.pmod(sql.hash(sql.substring("key", 2, 32)), sql.lit(3))
    for at in range(3):
        write(tmp_path / "s.bin", produced(at, 12))
        entries = stateful.readStream.format("datastream").load(str(tmp_path / "s.bin"))
        reported = reassemble_stream(messages(entries, "s"), max_age=3600, lanes=lane).rows
        sink.run(reported, tmp_path / "checkpoint")
    assert {row.event for row in sink.rows} == {"complete"}
    assert sorted(bytes(row.id) for row in sink.rows) == [b"%032d" % at for at in range(12)]


def test_a_state_store_that_keeps_no_state_of_ours(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "s.bin", [])
    entries = spark.readStream.format("datastream").load(str(tmp_path / "s.bin"))
    with pytest.raises(UsageError, match="STATE_SETTINGS"):
        reassemble_stream(messages(entries))


def test_without_a_package(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "s.bin", [])
    entries = spark.readStream.format("datastream").load(str(tmp_path / "s.bin"))
    with monkeypatch.context() as hidden:
        hidden.setitem(sys.modules, "google.protobuf", None)
        with pytest.raises(ExtraMissing, match=r"keep state: install it .*spark-reassembly"):
            reassemble_stream(messages(entries))
    rows = frame(spark, [])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ExtraMissing, match=r"to Python: install it .*spark-reassembly"):
        reassemble(rows)


def test_mistakes(spark: Any, tmp_path: Path) -> None:
    rows = frame(spark, [])
    with pytest.raises(UsageError, match="there is no column height to order messages by"):
        reassemble(rows, order=["height"])
    with pytest.raises(UsageError, match="budget must be at least 1 byte, not 0"):
        reassemble(rows, budget=0)
    with pytest.raises(UsageError, match="there is no value among key"):
        reassemble(rows.select("key"))
    with pytest.raises(UsageError, match="the column key is string, not binary"):
        reassemble(rows.withColumn("key", rows.key.cast("string")))
    with pytest.raises(UsageError, match="a subscription must be bytes, not '0x01'"):
        reassemble(rows, ["0x01"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="these messages have an end"):
        reassemble_stream(rows)
    with pytest.raises(UsageError, match="messages are read from the table entries"):
        messages(rows)
    with pytest.raises(UsageError, match="name one source at least"):
        read_messages(spark, {})
    with pytest.raises(UsageError, match="a subscription must be bytes, not 1"):
        read_messages(spark, {"a": "a.bin"}, b"\x01")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="name one source"):
        read_messages(spark, ["a.bin"])  # type: ignore[arg-type]
    for wrong in ({"types": 2}, {"prefixes": "0x01"}, {"type": 0xB0}):
        with pytest.raises(UsageError, match="no option does"):
            read_messages(spark, {"a": "a.bin"}, **wrong)  # type: ignore[arg-type]
    write(tmp_path / "s.bin", [])
    entries = spark.readStream.format("datastream").load(str(tmp_path / "s.bin"))
    with pytest.raises(UsageError, match="these messages have no end"):
        reassemble(messages(entries))
    with pytest.raises(UsageError, match="budget must be at least 1 byte, not -1"):
        reassemble_stream(messages(entries), budget=-1)
    with pytest.raises(UsageError, match="reorg_threshold must be at least 0, not -1"):
        reassemble_stream(messages(entries), reorg_threshold=-1)
    with pytest.raises(UsageError, match="max_age must be more than 0 seconds, or None, not 0"):
        reassemble_stream(messages(entries), max_age=0)
