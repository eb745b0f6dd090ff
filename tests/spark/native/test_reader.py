"""What the reader in Java reads, and what it leaves out."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import xxhash
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from datastreamer import DataStream
from datastreamer.errors import UsageError
from datastreamer.format import page_start
from datastreamer.spark import DatastreamSource, native_jar
from datastreamer.spark.failures import reason
from datastreamer.zkevm import encode, events
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of
from tests.spark.conftest import Make
from tests.spark.native.comparing import assert_equal, frame, python_parts, rows_of
from tests.spark.native.fuzz import write_stream
from tests.spark.read.reading import Query


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stream") / "stream.bin"
    write_stream(made, random.Random(2), 6)
    return made


def parts(found: Any) -> int:
    return int(found.rdd.getNumPartitions())


def test_hashes_are_those_of_xxhash(native: Any) -> None:
    hashes = native._jvm.datastreamer.spark.Xxh3
    chance = random.Random(3)
    for size in (*range(260), 511, 512, 1023, 1024, 1025, 1088, 4097, 100_000):
        data = chance.randbytes(size + 3)
        part = data[3:]
        wide = hashes.hash128(data, 3, size)
        found = (wide.high() % 2**64, wide.low() % 2**64)
        assert found == divmod(xxhash.xxh3_128_intdigest(part), 2**64)


def test_vectors_hash_as_well(native: Any) -> None:
    """The sums over whole blocks of 1,024 bytes."""
    chance = random.Random(4)
    for blocks in (1, 2, 31, 200):
        try:
            gain = native._jvm.datastreamer.spark.FasterBlocks.gain(chance.randbytes(1024 * blocks))
        except Py4JJavaError as error:
            if "vectors of 512 bits" in str(error):
                pytest.skip("this machine has no vectors of 512 bits")
            raise
        assert gain > 0


@pytest.mark.parametrize("piece", [128 << 10, 1 << 20])
def test_hashes_stay_right_when_the_compiler_has_optimised_them(
    native: Any, tmp_path: Path, piece: int
) -> None:
    """C2 of Java 17 compiles the vectors wrongly here in most runs if it may inline them."""
    jar, source = native_jar(), Path(__file__).with_name("Hashes.java")
    subprocess.run(["javac", "-cp", str(jar), "-d", tmp_path, source], check=True)
    words = ["java", "--add-modules=jdk.incubator.vector", "-cp", f"{tmp_path}:{jar}"]
    found = subprocess.run(
        [*words, "datastreamer.spark.Hashes", str(piece)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"JDK_JAVA_OPTIONS": ""},  # those of the tests are without C2
    )
    assert found.stdout == "0\n"


def test_it_is_chosen_if_it_is_there(native: Any, path: Path) -> None:
    def plan(**options: Any) -> str:
        found = native.read.format("datastream").options(**options).load(str(path))
        return str(found._jdf.queryExecution().executedPlan())

    assert "datastream (native)" in plan()
    assert "datastream (native)" in plan(reader="AUTO")
    assert "datastream (native)" not in plan(reader="python")


def test_what_it_does_not_read(native: Any, path: Path) -> None:
    with pytest.raises(PySparkException, match="option reader: 'java' is not one of auto, native"):
        native.read.format("datastream").option("reader", "java").load(str(path))
    source = DatastreamSource({"path": str(path), "reader": "native"})
    with pytest.raises(UsageError, match="add the jar that"):
        source.reader(source.schema())
    with pytest.raises(UsageError, match="add the jar that"):
        source.streamReader(source.schema()).initialOffset()


def test_filters_are_those_of_one_scan(native: Any, path: Path) -> None:
    found = frame(native, path=str(path))
    total = len(Query(path=path).rows())
    few = found.where("number < 10")
    assert few.union(found).count() == total + 10
    assert found.join(few, "number", "left_anti").count() == total - 10
    found.createOrReplaceTempView("a_stream")
    query = "SELECT (SELECT count(*) FROM a_stream WHERE number >= 7 AND number < 9), count(*)"
    assert native.sql(f"{query} FROM a_stream").collect() == [(2, total)]
    assert found.where("number < 10 OR number IS NULL").count() == 10
    assert found.where("number <=> 5").count() == found.where("number IN (5, -3)").count() == 1
    assert found.where(f"number > {2**63 - 1} OR number < {-(2**63)}").count() == 0


@pytest.mark.parametrize(
    "table, condition",
    [
        ("entries", "number >= 500 AND number < 510"),
        ("entries", "number IN (3, 500)"),
        ("blocks", "number BETWEEN 60 AND 75"),
        ("blocks", "batch_number = 30"),
        ("transactions", "l2block_number > 100"),
        ("block_ends", "number <= 3 AND entry_number > 4"),
        ("blocks", "number = 1000000"),
        ("blocks", "number = -1"),
    ],
)
def test_filters_narrow_what_is_read(native: Any, path: Path, table: str, condition: str) -> None:
    options = {"path": str(path), "table": table, "partitionBytes": "1m"}
    everything = frame(native, **options)
    narrowed = everything.where(condition)
    kept = everything.cache().where(condition)
    try:
        assert rows_of(kept) == rows_of(frame(native, **options).where(condition))
    finally:
        everything.unpersist()
    assert parts(narrowed) <= parts(frame(native, **options))


def test_a_range_of_entries_reads_few_pages(native: Any, path: Path) -> None:
    found = frame(native, path=str(path), table="blocks", partitionBytes="1m")
    assert parts(found) > 4
    assert parts(found.where("entry_number BETWEEN 160 AND 161")) == 1


def test_a_filter_finds_blocks_in_any_order(native: Any, make: Make) -> None:
    """Also if bookmarks name other blocks than those after them."""
    numbers = [*range(1, 30), 17, 3, 40, 17]
    entries = []
    for number in numbers:
        entries.append((0xB0, key_of(3, BookmarkName("block", number + 3))))
        entries.append(encode(events.L2Block(number, 1), version=3))
        entries.append((9, bytes(100_000)))
    found = frame(native, path=str(make(entries, version=3)), table="blocks")
    for number in (3, 17, 29, 40):
        assert found.where(f"number = {number}").count() == numbers.count(number)


def test_counts_and_limits(native: Any, path: Path) -> None:
    total = len(Query(path=path).rows())
    found = frame(native, path=str(path), partitionBytes="1m")
    assert found.count() == total
    planned = found.groupBy().count()._jdf.queryExecution().executedPlan().toString()
    assert "LocalTableScan" in planned
    tolerant = frame(native, path=str(path), mode="PERMISSIVE")
    assert tolerant.count() == total
    assert frame(native, path=str(path), startingOffset="5", endingOffset="25").count() == 20
    assert found.where("type = 9").count() == len(
        [row for row in Query(path=path).rows() if row["type"] == 9]
    )
    assert [row.number for row in found.limit(7).collect()] == list(range(7))
    assert found.limit(total + 1).count() == total
    assert frame(native, path=str(path), table="blocks").count() == len(
        Query(path=path, table="blocks").rows()
    )


def test_columns_in_any_order(native: Any, path: Path) -> None:
    expected = [(row["data"], row["number"]) for row in Query(path=path).rows()[:100]]
    found = frame(native, path=str(path)).select("data", "number").limit(100).collect()
    assert [(bytes(data), number) for data, number in found] == expected
    read = native.read.format("datastream").schema("type BIGINT, number BIGINT")
    assert read.load(str(path)).columns == ["type", "number"]
    with pytest.raises(PySparkException, match="the column number is bigint, not int"):
        native.read.format("datastream").schema("number INT").load(str(path)).count()


def test_a_frame_reads_the_same_entries_in_every_query(native: Any, tmp_path: Path) -> None:
    path = tmp_path / "growing.bin"
    with DataStream.create(path, version=3, sync="os") as stream:
        for number in range(10):
            with stream.atomic_op() as op:
                op.add_entry(9, bytes([number]))
        found = frame(native, path=str(path))
        assert found.count() == 10
        with stream.atomic_op() as op:
            op.add_entry(9, b"later")
        assert found.count() == len(found.collect()) == found.union(found).count() // 2 == 10
        assert frame(native, path=str(path)).count() == 11
        stream.truncate(4)
        for number in range(20):
            with stream.atomic_op() as op:
                op.add_entry(9, bytes([number]))
    # It has more entries than before: only the epoch shows the change.
    for query in (found.collect, found.count):
        with pytest.raises(PySparkException) as raised:
            query()
        assert "the stream was truncated or changed since this query was planned" in reason(
            raised.value
        )


def test_python_reads_a_part_from_the_first_doubtful_page_on(
    native: Any, path: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "damaged.bin"
    content = bytearray(path.read_bytes())
    content[page_start(3) + 9 + 7] ^= 1
    copy.write_bytes(content)
    options = {"path": str(copy), "mode": "PERMISSIVE", "partitionBytes": "2m"}
    found = frame(native, **options)
    # Also the part before: the start of the next page confirms its last entry.
    assert python_parts(found) == 2 < parts(found)
    assert python_parts(frame(native, path=str(path))) == 0
    assert rows_of(found) == Query(**options).rows()
    assert [row.number for row in found.limit(5).collect()] == list(range(5))


def test_small_files_share_a_task(native: Any, make: Make, tmp_path: Path) -> None:
    for at in range(40):
        make([(9, bytes([at]))] * 3, name=f"{at:02}.bin")
    found = frame(native, path=str(tmp_path))
    # Two cores: two tasks, with the files in their order.
    assert parts(found) == 2
    assert [row.data[0] for row in found.collect()] == [at for at in range(40) for _ in range(3)]
    assert parts(frame(native, path=str(tmp_path), partitionBytes="1m")) == 40


def test_all_cores_have_the_same_work(native: Any, make: Make) -> None:
    path = make([(9, bytes(500_000))] * 100)
    found = frame(native, path=str(path))
    # Two cores: two parts of 25 MB, although one part may have 128 MiB.
    sizes = [len(rows) for rows in found.rdd.glom().collect()]
    assert len(sizes) == 2
    assert max(sizes) - min(sizes) <= 2
    # As for a count of the same plan; and a part has no more than it may have.
    assert found.count() == 100
    assert parts(frame(native, path=str(path), partitionBytes="16m")) == 4
    assert parts(frame(native, path=str(path), partitionBytes="4m")) == 12


def test_decimals_of_all_sizes(native: Any, make: Make) -> None:
    """Enough of each size for the reader to learn where its digits are, and one too large."""
    numbers = [(1 << 64) - 1 >> bits for bits in range(0, 64, 3) for _ in range(20)]
    amounts = [(1 << 120) - 1 >> bits for bits in range(0, 121, 6) for _ in range(20)]
    pairs = list(itertools.zip_longest(numbers, amounts, fillvalue=0))

    def block(limit: int, fee: int) -> tuple[int, bytes]:
        wei = fee.to_bytes((fee.bit_length() + 7) // 8, "big")
        made = events.L2Block(7, hash=bytes(32), block_gas_limit=limit, base_fee=wei)
        return encode(made, version=3)

    path = make([block(*pair) for pair in pairs], version=3)
    found = frame(native, path=str(path), table="blocks").select("block_gas_limit", "base_fee")
    assert [tuple(map(int, row)) for row in found.collect()] == pairs
    assert python_parts(found) == 0
    path = make([block(1, fee) for fee in (5, 10**38 - 1, 10**38, 6)], version=3, name="large.bin")
    for mode in ("PERMISSIVE", "DROPMALFORMED", "FAILFAST"):
        assert_equal(native, [path], table="blocks", mode=mode)


def test_numbers_of_all_sizes(native: Any, make: Make) -> None:
    """Enough of each size one after the other that the reader learns where its digits are."""
    numbers = [
        number
        for bits in range(64)
        for edge in (1 << bits, (1 << bits) - 1)
        for number in [edge] * 20
        if number < 1 << 63
    ]
    entries = [
        encode(events.L2Block(number, number % 251, timestamp=7, hash=bytes(32)), version=3)
        for number in numbers
    ]
    path = make(entries, version=3)
    assert_equal(native, [path], table="blocks")
    found = frame(native, path=str(path), table="blocks").select("number", "batch_number")
    assert [tuple(row) for row in found.collect()] == [(it, it % 251) for it in numbers]


def test_events_of_changing_shapes(native: Any, make: Make) -> None:
    """Runs of one to 200 events that differ in what is there and in how long it is."""
    chance = random.Random(7)
    shapes = [
        (debug, hashes, size, bits)
        for debug in (None, "", "a text")
        for hashes in (0, 20, 32, 70_000)
        for size in (0, 1, 9, 15)
        for bits in (3, 33, 63)
    ]
    entries = []
    for number in range(120):
        debug, hashes, size, bits = chance.choice(shapes[:12] if number % 2 else shapes)
        run = chance.choice((1, 2, 63, 64, 65, 200)) if hashes < 70_000 else 2
        for index in range(run):
            block = events.L2Block(
                ((1 << bits) - 1 - index) % (1 << bits),
                number,
                hash=chance.randbytes(hashes),
                l1_infotree_index=(1 << min(bits, 32)) - 1,
                block_gas_limit=(1 << bits) - 1,
                debug=debug,
                base_fee=bytes([1]) * size,
            )
            entries.append(encode(block, version=3))
    path = make(entries, version=3)
    assert_equal(native, [path], table="blocks")
    found = frame(native, path=str(path), table="blocks")
    assert python_parts(found) == 0
    rows = found.collect()
    assert found.orderBy("entry_number").collect() == rows
    assert found.union(found).collect() == rows + rows
    assert found.join(found, "entry_number").count() == len(rows)
    assert found.repartition(3).sortWithinPartitions("number").distinct().count() == len(rows)
