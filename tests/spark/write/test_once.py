"""`df.writeStream.format("datastream")`: every row of a query is in the stream once, whatever is
repeated; and the same for `df.write` with an application and a version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from datastreamer import DataStream, Publishing, StreamServer
from datastreamer.errors import ConnectFailed, DatastreamerError, PeerError, UsageError
from datastreamer.reassembly import Splitter, pack_message
from datastreamer.spark import messages, reassemble
from datastreamer.spark.options import read_options
from datastreamer.spark.read.servers import Failover
from datastreamer.spark.write.rows import PACKED
from datastreamer.spark.write.target import Fences, append, file_output, server_output
from datastreamer.zkevm.bookmark_keys import name_of_key
from datastreamer.zkevm.proto.datastream_pb2 import BookMark
from tests.ports import free_port

TOKEN = "of-the-sink-and-32-bytes-long-or-more"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A stream without entries."""
    path = tmp_path / "stream" / "written.bin"
    path.parent.mkdir()
    DataStream.create(path, version=3, system_id=7).close()
    return path


def write_token(folder: Path) -> Path:
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    return token_file


def serve(path: Path, tmp_path: Path, port: int = 0) -> StreamServer:
    """It serves a stream, and takes operations."""
    publishing = Publishing(token_file=write_token(tmp_path))
    return StreamServer(path, host="127.0.0.1", port=port, in_process=True, publishing=publishing)


@pytest.fixture
def server(path: Path, tmp_path: Path) -> Iterator[StreamServer]:
    with serve(path, tmp_path) as server:
        yield server


@pytest.fixture(params=["file", "server"])
def target(path: Path, tmp_path: Path, request: Any) -> dict[str, str]:
    """The options of a sink: a file, or a server whose stream this is."""
    if request.param == "file":
        return {"path": str(path)}
    server = request.getfixturevalue("server")
    return {"server": f"127.0.0.1:{server.port}", "tokenFile": str(tmp_path / "token")}


def output(target: dict[str, str]) -> Any:
    return file_output(target["path"]) if "path" in target else server_output(read_options(target))


def entries(path: Path) -> list[tuple[int, bytes]]:
    """All but fences."""
    with DataStream.open(path, read_only=True) as stream:
        return [
            (entry.type, bytes(entry.data))
            for batch in stream.batches(0)
            for entry in batch
            if not (entry.is_bookmark and entry.data[:2] == b"\x7a\x0e")
        ]


def rows(*rows: tuple[int | None, bytes | None, int, bytes]) -> Iterator[Any]:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(values, it.type) for values, it in zip(columns, PACKED, strict=True)]
    yield pa.RecordBatch.from_arrays(arrays, schema=PACKED)


def test_an_operation_is_appended_once(target: dict[str, str], path: Path) -> None:
    for batch in (0, 0, 1, 1, 0):
        with output(target) as opened:
            append(opened, rows((None, b"key", 2, b"%d" % batch)), Fences("a query", batch))
    assert entries(path) == [(0xB0, b"key"), (2, b"0"), (0xB0, b"key"), (2, b"1")]


def test_an_operation_of_bookmarks_alone_is_appended_once(
    target: dict[str, str], path: Path
) -> None:
    for _ in range(2):
        with output(target) as opened:
            append(opened, rows((None, None, 0xB0, b"key")), Fences("a query", 0))
    assert entries(path) == [(0xB0, b"key")]


def test_rows_of_one_operation_are_together(target: dict[str, str], path: Path) -> None:
    made = rows((5, None, 1, b"c"), (-1, None, 1, b"a"), (5, b"d", 2, b"d"), (0, None, 1, b"b"))
    with output(target) as opened:
        append(opened, made, None)
    assert entries(path) == [(1, b"a"), (1, b"b"), (1, b"c"), (0xB0, b"d"), (2, b"d")]


def test_a_batch_that_stops_between_operations_is_continued(
    target: dict[str, str], path: Path
) -> None:
    made = [(number, None, 1, b"%d" % number) for number in range(6)]
    begun = [made[0], made[1], (2, None, 1, b"x" * (2 << 20))]
    with pytest.raises(DatastreamerError), output(target) as opened:
        append(opened, rows(*begun), Fences("a query", 3))
    # The others may come in another order.
    for _ in range(2):
        with output(target) as opened:
            append(opened, rows(*made[3:], *made[:3]), Fences("a query", 3))
    assert entries(path) == [(1, b"%d" % number) for number in range(6)]


def test_a_batch_that_was_truncated_is_appended_again(path: Path) -> None:
    def write() -> None:
        with file_output(str(path)) as opened:
            append(opened, rows((None, None, 1, b"row")), Fences("a query", 0))

    write()
    with DataStream.open(path) as stream:
        stream.truncate(0)
    write()
    write()
    assert entries(path) == [(1, b"row")]


def test_a_fence_is_a_bookmark_without_a_type() -> None:
    keys = {
        Fences(query, batch).key(operation)
        for query in ("a", "b")
        for batch in (0, 1)
        for operation in (0, 1)
    }
    assert len(keys) == 8
    assert {len(key) for key in keys} == {16}
    key = keys.pop()
    assert name_of_key(3, key) is None
    decoded = BookMark.FromString(key)
    assert (decoded.type, decoded.value) == (0, 0)


def test_a_publisher_that_holds_the_lease_is_waited_for(
    server: StreamServer, tmp_path: Path
) -> None:
    from datastreamer import BlockingPublisher
    from datastreamer.errors import SourceBusy

    target = {"server": f"127.0.0.1:{server.port}", "tokenFile": str(tmp_path / "token")}
    with BlockingPublisher("127.0.0.1", server.port, token=TOKEN) as publisher:
        options = read_options({**target, "retryFor": "0.5"})
        with pytest.raises(SourceBusy), server_output(options):
            pass
        with publisher.atomic_op() as op:
            op.add_entry(1, b"other")
    with output(target) as opened:
        append(opened, rows((None, None, 1, b"row")), None)
    assert [entry.type for batch in server.stream.batches(0) for entry in batch] == [1, 1]


def test_a_server_that_is_not_there_yet_is_waited_for(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, failed = free_port(), Failover.failed
    with ExitStack() as opened:

        def start(failover: Failover, error: PeerError) -> None:
            assert isinstance(error, ConnectFailed)
            monkeypatch.undo()
            opened.enter_context(serve(path, tmp_path, port))
            failed(failover, error)

        monkeypatch.setattr(Failover, "failed", start)
        write_token(tmp_path)
        target = {"server": f"127.0.0.1:{port}", "tokenFile": str(tmp_path / "token")}
        with output(target) as to:
            append(to, rows((None, None, 1, b"row")), None)
    assert entries(path) == [(1, b"row")]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"txnAppId": "loader"}, "the options txnAppId and txnVersion belong together"),
        ({"txnAppId": "loader", "txnVersion": "x"}, "option txnVersion: 'x' is not a number"),
    ],
)
def test_options_of_a_transaction(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_options({"path": "stream.bin", **options})


# In Spark.


def start(frame: Any, folder: Path, target: dict[str, str]) -> None:
    """Run a query up to the end of its stream."""
    query = frame.writeStream.format("datastream").options(**target)
    query = query.option("checkpointLocation", str(folder / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()


def test_the_batches_of_a_query(
    spark: Any, target: dict[str, str], path: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source.bin"
    with DataStream.create(source, version=2) as stream:

        def add(first: int, stop: int) -> None:
            with stream.atomic_op() as op:
                op.add_entries(1, [b"%d" % number for number in range(first, stop)])

        add(0, 500)
        frame = spark.readStream.format("datastream").option("maxEntriesPerTrigger", 200)
        frame = frame.load(str(source)).selectExpr(
            "type", "data", "case when number % 100 = 0 then data end as bookmark"
        )
        start(frame, tmp_path, target)
        # As if the driver had been killed before it said that the last batch was done.
        for name in ("2", ".2.crc"):
            (tmp_path / "checkpoint" / "commits" / name).unlink(missing_ok=True)
        add(500, 700)
        start(frame, tmp_path, target)
    wanted = []
    for number in range(700):
        wanted += [(0xB0, b"%d" % number)] if number % 100 == 0 else []
        wanted.append((1, b"%d" % number))
    assert entries(path) == wanted


def test_a_write_with_a_version(spark: Any, target: dict[str, str], path: Path) -> None:
    for version in (1, 1, 2):
        frame = spark.range(3, numPartitions=2).selectExpr(
            "1 as type", f"binary(concat({version}, ' ', id)) as data"
        )
        writer = frame.write.format("datastream").mode("append").options(**target)
        writer.options(txnAppId="loader", txnVersion=str(version)).save()
    assert entries(path) == [(1, b"%d %d" % (version, at)) for version in (1, 2) for at in range(3)]


def test_payloads_become_messages(spark: Any, path: Path, tmp_path: Path) -> None:
    """Those that were reassembled, as they were, and one with a value of several messages."""
    prefix, own = b"\x01" + bytes(32), bytes(range(32))
    parts = {prefix: [(b"", b"alone"), (b"x", b"two")], b"\x02" + own: [(b"", b"one")]}
    made = [pack_message(*message) for message in Splitter().split(own, parts)]
    source = tmp_path / "source.bin"
    with DataStream.create(source, version=2) as stream, stream.atomic_op() as op:
        op.add_entries(0x10, made)
    frame = spark.read.format("datastream").load(str(source))
    found = reassemble(messages(frame, "source")).payloads
    found.write.format("datastream").mode("append").save(str(path))
    assert entries(path) == [(0xB0, own[:16]), *((0x10, message) for message in made)]

    large = spark.sql(
        f"select X'{own.hex()}' as id, array(named_struct('key', X'{prefix.hex()}', 'value', "
        "binary(repeat('x', 1500000)))) as parts"
    )
    large.write.format("datastream").mode("append").save(str(path))
    assert sum(len(data) for _, data in entries(path)) > 1_500_000
    bad = spark.sql("select X'00' as id, array(named_struct('key', X'', 'value', X'')) as parts")
    writer = bad.write.format("datastream").mode("append")
    with pytest.raises(
        Exception, match=r"row 0 of partition 0 is not a payload: .*32 bytes, not 1"
    ):
        writer.save(str(path))
