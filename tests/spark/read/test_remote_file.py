"""Files on object storage, by `pyarrow.fs`: read from a server that speaks S3, on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from datastreamer import DataStream, arrow
from datastreamer.errors import DamagedPage, FileMissing, NotAStream, StreamFileError, UsageError
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.spark.read.remote_file import AHEAD, RemoteFile
from tests.spark.read.reading import Query
from tests.spark.read.test_reading import write_chain

pytest.importorskip("moto", reason="moto is not installed: pip install '.[dev]'")
pytest.importorskip("flask_cors", reason="flask-cors is not installed: pip install '.[dev]'")

import boto3
from moto.server import ThreadedMotoServer

KEY, SECRET = "key", "secret"


class Bucket(NamedTuple):
    """A bucket and how it is reached."""

    name: str
    client: Any
    query: str

    def put(self, key: str, path: Path) -> str:
        """Store a file; its URI."""
        self.client.put_object(Bucket=self.name, Key=key, Body=path.read_bytes())
        return self.uri(key)

    def uri(self, key: str) -> str:
        return f"s3://{KEY}:{SECRET}@{self.name}/{key}{self.query}"


@pytest.fixture(scope="module")
def storage() -> Iterator[str]:
    # It reports each request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(storage: str, request: pytest.FixtureRequest) -> Bucket:
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{storage}",
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
    )
    name = f"bucket-{abs(hash(request.node.name))}"
    client.create_bucket(Bucket=name)
    query = f"?endpoint_override={storage}&scheme=http&region=us-east-1"
    return Bucket(name, client, query)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chain") / "chain.bin"
    write_chain(path, 30)
    return path


class Requests:
    """What was asked for: the sizes, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        fetch = RemoteFile._fetch

        def counting(file: RemoteFile, size: int, offset: int) -> bytes:
            data = fetch(file, size, offset)
            self.sizes.append(len(data))
            return data

        monkeypatch.setattr(RemoteFile, "_fetch", counting)

    def bytes(self) -> int:
        """How many bytes since the last time."""
        total = sum(self.sizes)
        self.sizes.clear()
        return total


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


@pytest.mark.parametrize("table", ["entries", "transactions"])
def test_an_object_is_read_as_the_file_is(
    bucket: Bucket, chain: Path, requests: Requests, table: str
) -> None:
    query = Query(path=bucket.put("a/chain.bin", chain), table=table, partitionBytes="16m")
    planned = requests.bytes()
    assert len(query.parts) == 2
    assert planned < 2 * PAGE_SIZE
    assert query.rows() == arrow.ArrowStream(chain, table).reader().read_all().to_pylist()
    # Few and large requests: a part's pages, and the one behind them that its end is held against.
    assert max(requests.sizes) == AHEAD
    assert len(requests.sizes) <= 14
    assert requests.bytes() < 33 * PAGE_SIZE


@pytest.mark.parametrize("page", [0, 7, 29])
def test_a_flipped_bit_is_noticed(
    bucket: Bucket, chain: Path, tmp_path: Path, page: int, requests: Requests
) -> None:
    path = tmp_path / "chain.bin"
    content = bytearray(chain.read_bytes())
    content[page_start(page) + 5000] ^= 1
    path.write_bytes(content)
    uri = bucket.put("chain.bin", path)
    if page < 29:
        # Without the records beside it, only the last page has a checksum.
        assert len(Query(path=uri).rows()) == 851
    bucket.put("chain.bin.sums", chain.with_name("chain.bin.sums"))
    requests.sizes.clear()
    with pytest.raises(DamagedPage, match=rf"page {page} \(entr.*do not match") as failed:
        Query(path=uri).rows()
    assert failed.value.path.endswith("/chain.bin")
    # The header of the records, and those of the part.
    assert 72 in requests.sizes
    assert len(Query(path=uri, verify=False).rows()) == 851


def test_offsets_ask_for_less(bucket: Bucket, chain: Path, requests: Requests) -> None:
    uri = bucket.put("chain.bin", chain)
    rows = arrow.ArrowStream(chain).reader().read_all().to_pylist()
    few = Query(path=uri, startingOffset=100, endingOffset=103)
    assert few.rows() == rows[100:103]
    assert requests.bytes() < 5 * PAGE_SIZE
    options = {"startingOffset": "block:50", "endingOffset": "block:51"}
    assert [row["number"] for row in Query(path=uri, table="blocks", **options).rows()] == [50]
    assert requests.bytes() < 9 * PAGE_SIZE


def test_prefixes_and_globs(bucket: Bucket, tmp_path: Path) -> None:
    for system_id in (3, 4):
        write_chain(tmp_path / f"{system_id}.bin", 1, system_id)
        bucket.put(f"in/{system_id}.bin", tmp_path / f"{system_id}.bin")
    (tmp_path / "notes").write_text("no stream")
    bucket.put("in/notes.txt", tmp_path / "notes")
    bucket.put("in/_hidden.bin", tmp_path / "3.bin")
    bucket.put("in/deep/5.bin", tmp_path / "3.bin")
    one = arrow.ArrowStream(tmp_path / "3.bin").reader().read_all().num_rows
    for path in ("in", "in/", "in/[34].bin", "*/[0-9].bin"):
        ids = Query(path=bucket.uri(path)).table().column("system_id").to_pylist()
        assert ids == [3] * one + [4] * one
    assert Query(path=bucket.uri("in/*/*.bin")).table().num_rows == one
    bucket.put("in/_old/6.bin", tmp_path / "3.bin")
    for path in ("in", "in/"):
        deep = Query(path=bucket.uri(path), recursiveFileLookup="true")
        assert deep.table().num_rows == 3 * one
    assert "system_id" not in Query(path=bucket.uri("in/3.bin")).schema.names
    hadoops = bucket.uri("in/3.bin").replace("s3://", "s3a://")
    assert Query(path=hadoops).table().num_rows == one
    with pytest.raises(NotAStream, match=r"notes\.txt"):
        Query(path=bucket.uri("in/*.txt"))


def test_what_is_not_there(bucket: Bucket) -> None:
    for key, what in (("no.bin", "no such file"), ("no*.bin", "it holds no stream file")):
        with pytest.raises(FileMissing, match=what) as caught:
            Query(path=bucket.uri(key))
        assert SECRET not in str(caught.value)
        assert str(caught.value).startswith(f"s3://{bucket.name}/no")
    with pytest.raises(UsageError):
        Query(path="s3://bucket/a.bin?no_such_parameter=1")


@pytest.mark.parametrize("keys", ["me:a/secret", "me:a@secret", "me:a secret", "me:secret"])
def test_keys_in_what_is_no_uri_are_not_shown(keys: str) -> None:
    with pytest.raises(UsageError, match=r"^s3a://b/x y\.bin: Cannot parse URI: ") as caught:
        Query(path=f"s3a://{keys}@b/x y.bin?region=secret")
    assert "secret" not in str(caught.value)


def test_a_port_is_no_secret() -> None:
    with pytest.raises(UsageError, match=r"^hdfs://host:1/x@ y\.bin: "):
        Query(path="hdfs://host:1/x@ y.bin")


def test_an_object_that_is_replaced_by_another_stream(
    bucket: Bucket, chain: Path, tmp_path: Path
) -> None:
    query = Query(path=bucket.put("chain.bin", chain))
    write_chain(tmp_path / "other.bin", 30)
    bucket.put("chain.bin", tmp_path / "other.bin")
    with pytest.raises(StreamFileError, match="truncated or changed since this query was planned"):
        query.rows()


def test_an_object_that_has_grown(bucket: Bucket, tmp_path: Path) -> None:
    path = tmp_path / "grows.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        for data in (b"a", b"b"):
            with stream.atomic_op() as op:
                op.add_entries(1, [data * 100_000] * 15)
            stream.sync()
            uri = bucket.put("grows.bin", path)
            if data == b"a":
                query = Query(path=uri)
    assert query.table().column("data").to_pylist() == [b"a" * 100_000] * 15
    assert Query(path=uri).table().num_rows == 30


def test_spark_reads_objects(spark: Any, bucket: Bucket, chain: Path) -> None:
    uri = bucket.put("chain.bin", chain)
    reader: Callable[..., Any] = spark.read.format("datastream").options
    frame = reader(table="transactions", partitionBytes="8m").load(uri)
    assert frame.rdd.getNumPartitions() == 4
    assert frame.count() == arrow.ArrowStream(chain, "transactions").reader().read_all().num_rows
