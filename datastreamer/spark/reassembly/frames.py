"""Reassembles payloads from frames of messages, in batch and streaming queries.

Owns the columns of a frame of messages, and how each group of messages reaches one `Reassembler`
in one order. The core, `datastreamer.reassembly`, owns the meaning of messages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from importlib.util import find_spec
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.types import BinaryType, LongType, StringType

from datastreamer.errors import ExtraMissing, UsageError
from datastreamer.format import TYPE_BOOKMARK, U32_MAX
from datastreamer.reassembly import Reassembler
from datastreamer.reassembly.portions import NESTED
from datastreamer.reassembly.portions import wanted as clauses_of
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.spark.reassembly.event_rows import (
    EVENT_SCHEMA,
    Reassembled,
    batches_of,
    row_of,
    views,
    without_key,
)
from datastreamer.spark.reassembly.groups import groups, node, wanted
from datastreamer.spark.reassembly.state import STATE_SETTINGS, LaneProcessor, PandasLaneProcessor
from datastreamer.spark.versions import VERSION
from datastreamer.transport.address import SERVERS

BUDGET: Final = 1 << 30
_COLUMNS: Final = (
    ("key", BinaryType()),
    ("value", BinaryType()),
    ("source", StringType()),
    ("position", LongType()),
)
_AFTER_ALL: Final = 1.0


def messages(
    entries: DataFrame, source: str | Column | None = None, type: int = MESSAGE_TYPE
) -> DataFrame:
    """The messages in a frame of entries from `spark.read` or `spark.readStream`.

    The result has the columns `key`, `value`, `source` and `position` that `reassemble` expects;
    combine several sources with `union`. `source` names the origin, by default the column
    `system_id` if there is one; `position` is the entry number. `key` is null for an entry that
    does not hold its key.
    """
    if "data" not in entries.columns or "number" not in entries.columns:
        raise UsageError(
            "messages are read from the table entries with the columns number, type and data, not "
            f"from a frame with the columns {', '.join(entries.columns)}"
        )
    if source is None:
        system = "system_id" in entries.columns
        source = sql.col("system_id").cast("string") if system else sql.lit("")
    elif isinstance(source, str):
        source = sql.lit(source)
    data, length = sql.col("data"), sql.length("data")
    size = sql.when(
        length >= 2, sql.conv(sql.hex(sql.substring(data, 1, 2)), 16, 10).cast("int")
    ).otherwise(sql.lit(U32_MAX >> 1))
    holds = size <= length - 2
    return entries.where(sql.col("type") == type).select(
        sql.when(holds, data.substr(sql.lit(3), size)).alias("key"),
        sql.when(holds, data.substr(size + 3, length)).otherwise(data).alias("value"),
        source.alias("source"),
        sql.col("number").alias("position"),
    )


def read_messages(
    spark: SparkSession,
    sources: Mapping[str, str | os.PathLike[str]],
    subscribe: Iterable[bytes] | None = None,
    stream: bool = False,
    *,
    type: int = MESSAGE_TYPE,
    **options: str | float | bool,
) -> DataFrame:
    """The messages of all sources, for `reassemble`, and with `stream` for `reassemble_stream`.

    `sources` has paths and servers (``tcp://HOST:PORT``) by the names in the column `source`. With
    `subscribe`, servers send only headers and the messages of these portions, and others are left
    out of files. `options` are those of `spark.read`, for each source. Raises `UsageError`.
    """
    if not sources or not isinstance(sources, Mapping):
        raise UsageError('name one source at least, such as {"a": "a.bin"}')
    given = {"types", "prefixes", "server", "path"} & {*options}
    if given or type == TYPE_BOOKMARK:
        raise UsageError("the sources, `subscribe` and `type` say what is read, and no option does")
    subscribed = _subscribed(subscribe)
    clauses = clauses_of((b"",) if subscribed is None else subscribed, type)
    if all(clause.prefix for clause in clauses):
        prefixes = [f"{clause.offset}:0x{clause.prefix.hex()}" for clause in clauses]
        options["prefixes"] = ",".join(prefixes)
    frames = []
    for name, place in sources.items():
        where = "server" if str(place).startswith(SERVERS) else "path"
        reader = (spark.readStream if stream else spark.read).format("datastream")
        entries = reader.options(**options, types=type, **{where: os.fspath(place)}).load()
        frames.append(messages(entries, name, type))
    return reduce(lambda one, other: one.union(other), frames)


def reassemble(
    messages: DataFrame,
    subscribe: Iterable[bytes] | None = None,
    *,
    order: Sequence[str] = ("position", "source"),
    budget: int = BUDGET,
) -> Reassembled:
    """The payloads of all messages, each once, and the events.

    The result is that of one `Reassembler` with unlimited memory that receives the messages in
    the order of the columns `order`, then of key and value. `messages` has `key` and `value`, and
    optionally `source` and `position`. What is incomplete at the end is reported as `dropped`
    with the reason "end".

    Reads all headers when it is called, and has Spark cache what they announce, about 70 bytes a
    prefix; queries on the result do the rest. One task assembles a payload in memory: `budget`
    bounds the bytes in flight there. Raises `UsageError`.
    """
    if messages.isStreaming:
        raise UsageError("these messages have no end: use `reassemble_stream`")
    _check_budget(budget)
    # mapInArrow refuses to run without pandas, although it does not use it here.
    _need("pandas", "pass groups to Python")
    subscribed = _subscribed(subscribe)
    found = _shaped(messages, order)
    homes = groups(found, subscribed)
    own = sql.coalesce(node(sql.col("key")), sql.substring("value", 1, 33))
    found = found.where(sql.col("key").isNull() | wanted(sql.col("key"), subscribed))
    found = found.withColumn("node", own).join(homes, "node", "left")
    found = found.withColumn("home", sql.coalesce("home", "node")).drop("node")
    found = found.repartition("home").sortWithinPartitions("home", *order, "key", "value")

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        return batches_of(_run(batches, subscribed, budget))

    return views(found.mapInArrow(run, EVENT_SCHEMA))


def reassemble_stream(
    messages: DataFrame,
    subscribe: Iterable[bytes] | None = None,
    *,
    reorg_threshold: int = 1000,
    max_age: float | None = 600.0,
    budget: int = BUDGET >> 2,
    lanes: Column | None = None,
    order: Sequence[str] = ("position", "source"),
) -> Reassembled:
    """The payloads of messages that keep arriving, each once, and the events, as they occur.

    Spark keeps the state in the query's checkpoint: what is in flight, and the last
    `reorg_threshold` or more payloads that a lane delivered. `max_age` is in seconds of the
    batches' times, and is checked when something arrives in the lane; None: nothing expires, as
    suits recordings. `budget` bounds the bytes of a lane in flight, and separately those of the
    hashes of delivered messages, which late messages are compared with. Within a batch, messages
    are processed in the order of the columns `order`.

    `lanes` is an expression that separates the messages: it must be equal for all messages of a
    payload. Lanes run in parallel; without it there is one lane.

    Needs RocksDB as the state store (`STATE_SETTINGS`). Raises `UsageError`.
    """
    if not messages.isStreaming:
        raise UsageError("these messages have an end: use `reassemble`")
    if reorg_threshold < 0:
        raise UsageError(f"reorg_threshold must be at least 0, not {reorg_threshold}")
    if max_age is not None and not max_age > 0:
        raise UsageError(f"max_age must be more than 0 seconds, or None, not {max_age}")
    _check_budget(budget)
    _need_state(messages.sparkSession)
    subscribed = _subscribed(subscribe)
    found = _shaped(messages, order)
    found = found.where(sql.col("key").isNull() | wanted(sql.col("key"), subscribed))
    # The batch's own time, which is the same if the batch is repeated.
    now = sql.lit(0.0) if max_age is None else sql.unix_millis(sql.current_timestamp()) / 1000
    found = found.withColumn("lane", sql.lit(0) if lanes is None else lanes)
    found = found.withColumn("now", now.cast("double"))
    processor: LaneProcessor
    given = (subscribed, tuple(order), reorg_threshold, max_age, budget)
    if VERSION < (4, 1):
        message = sql.struct(*(name for name in found.columns if name != "lane")).alias("message")
        lanes_of = found.select("lane", message).groupBy("lane")
        transform, processor = lanes_of.transformWithStateInPandas, PandasLaneProcessor(*given)
    else:
        transform, processor = found.groupBy("lane").transformWithState, LaneProcessor(*given)
    return views(transform(processor, EVENT_SCHEMA, "Append", "None"))


def _check_budget(budget: int) -> None:
    if budget <= 0:
        raise UsageError(f"budget must be at least 1 byte, not {budget}")


def _need(package: str, doing: str) -> None:
    try:
        there = find_spec(package) is not None
    except ModuleNotFoundError:  # of the parent package
        there = False
    if not there:
        raise ExtraMissing(f"Spark needs {package} to {doing}", "spark-reassembly")


def _need_state(spark: SparkSession) -> None:
    _need("pandas", "pass groups to Python")
    _need("google.protobuf", "keep state")
    for setting, value in STATE_SETTINGS.items():
        if spark.conf.get(setting, None) != value:
            raise UsageError(
                "Spark keeps the state of Python only in RocksDB: make the session with "
                f"session(settings=datastreamer.spark.STATE_SETTINGS), or set {setting} to {value}"
            )


def _subscribed(subscribe: Iterable[bytes] | None) -> tuple[bytes, ...] | None:
    """The prefixes, with that of nested headers."""
    if subscribe is None:
        return None
    found = (*subscribe, NESTED)
    for prefix in found:
        if not isinstance(prefix, bytes):
            raise UsageError(f"a subscription must be bytes, not {prefix!r}")
    return found


def _shaped(messages: DataFrame, order: Sequence[str]) -> DataFrame:
    """The columns of messages and those that order them, checked and cast to their types."""
    there = {field.name: field.dataType for field in messages.schema}
    for name, wanted_type in _COLUMNS:
        if name not in there and name in ("key", "value"):
            raise UsageError(
                "messages need the columns key and value, and may have source and position: there "
                f"is no {name} among {', '.join(there)}"
            )
        if name in ("key", "value") and there[name] != wanted_type:
            raise UsageError(f"the column {name} is {there[name].simpleString()}, not binary")
    for name in order:
        if name not in there and name not in dict(_COLUMNS):
            raise UsageError(f"there is no column {name} to order messages by")
    columns = []
    for name, wanted_type in _COLUMNS:
        found = sql.col(name) if name in there else sql.lit(None)
        if name == "value":
            found = sql.coalesce(found, sql.lit(b""))  # a Kafka message may have no value
        columns.append(found.cast(wanted_type).alias(name))
    others = [sql.col(name) for name in order if name not in dict(_COLUMNS)]
    return messages.select(*columns, *others)


def _run(
    batches: Iterator[Any], subscribe: Sequence[bytes] | None, budget: int
) -> Iterator[tuple[Any, ...]]:
    """The rows of the events of a task's messages, which arrive group by group, each in order."""
    home: bytes | None = None
    core: Reassembler | None = None
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in _NAMES]
        for own, key, value, source, position in zip(*columns, strict=True):
            if core is None or own != home:
                yield from _end(core)
                home = own
                # Never forget a payload: the group holds all of its messages.
                core = Reassembler(subscribe, reorg_threshold=U32_MAX, budget=budget, max_age=0.5)
            if key is None:
                yield row_of(without_key(value, source, position))
                continue
            for event in core.receive(key, value, source or "", position):
                yield row_of(event)
    yield from _end(core)


_NAMES: Final = ("home", "key", "value", "source", "position")


def _end(core: Reassembler | None) -> Iterator[tuple[Any, ...]]:
    """Report what is incomplete at the end of a group."""
    if core is not None:
        for event in core.expire(_AFTER_ALL):
            yield row_of(event, ended=True)
