"""Payloads out of messages, in Spark: of what there is, and of what comes.

Owns what a frame of messages is, and how these are brought before a `Reassembler`, each
group in one place and in one order. What a message means is the core's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.types import BinaryType, LongType, StringType

from datastreamer.errors import ExtraMissing, UsageError
from datastreamer.format import U32_MAX
from datastreamer.reassembly import Reassembler
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.spark.reassembly.event_rows import (
    TOLD,
    Reassembled,
    batches_of,
    row_of,
    views,
    without_key,
)
from datastreamer.spark.reassembly.groups import groups, node, wanted
from datastreamer.spark.reassembly.state import STATE_SETTINGS, Lanes

BUDGET: Final = 1 << 30
_COLUMNS: Final = (
    ("key", BinaryType()),
    ("value", BinaryType()),
    ("source", StringType()),
    ("position", LongType()),
)
_AT_THE_END: Final = 1.0


def messages(
    entries: DataFrame, source: str | Column | None = None, type: int = MESSAGE_TYPE
) -> DataFrame:
    """The messages in a frame of entries, as `spark.read` or `spark.readStream` gives it.

    A frame with the columns `key`, `value`, `source` and `position`, which is what `reassemble`
    takes; frames of several sources are put together with `union`. `source` names where they
    come from, by default the column `system_id` where there is one; `position` is the entry's
    number. Of an entry that does not hold its key `key` is null.
    """
    if "data" not in entries.columns or "number" not in entries.columns:
        raise UsageError(
            "messages are in the table entries, with its columns number, type and data: not in a "
            f"frame of {', '.join(entries.columns)}"
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


def reassemble(
    messages: DataFrame,
    subscribe: Iterable[bytes] | None = None,
    *,
    order: Sequence[str] = ("position", "source"),
    budget: int = BUDGET,
) -> Reassembled:
    """The payloads of all messages there are, each once, and the events.

    The result is that of one `Reassembler` of unlimited memory to which the messages were
    given in the order of the columns `order`, and of those that are alike there, of key and
    value. `messages` has `key` and `value`, and `source` and `position` where there are any.
    What is unfinished in the end is a `dropped` of "end".

    Looks at all headers when it is called, and has Spark cache what they announce, some 70
    bytes a prefix; the rest is done by the queries on the result. A payload is put together in
    one task, in memory: `budget` bounds what is in flight there. Raises `UsageError`.
    """
    if messages.isStreaming:
        raise UsageError("these messages have no end: `reassemble_stream` takes them")
    _check_budget(budget)
    # Nothing of it is used, but without it Spark hands nothing over.
    _need("pandas", "hand groups to Python")
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

    return views(found.mapInArrow(run, TOLD))


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
    """The payloads of messages that keep coming, each once, and the events, as they come.

    State is kept by Spark in the query's checkpoint: what is in flight, and the payloads that
    were given out, at least the last `reorg_threshold` of a lane. `max_age` is in seconds of
    the batches' times, and told of when something comes to the lane; None: nothing ages, as is
    right for recordings. `budget` bounds the bytes of a lane in flight, and again those that it
    keeps to tell whether what comes late says the same. Within a batch messages are taken
    in the order of `order`.

    `lanes` says which messages can have to do with each other: an expression that is the same
    for everything of a payload. Lanes run beside each other; without it there is one.

    Needs RocksDB as the state store (`STATE_SETTINGS`). Raises `UsageError`.
    """
    if not messages.isStreaming:
        raise UsageError("these messages have an end: `reassemble` takes them")
    if reorg_threshold < 0:
        raise UsageError(f"reorg_threshold is at least 0, not {reorg_threshold}")
    if max_age is not None and not max_age > 0:
        raise UsageError(f"max_age is more than 0 seconds, or None, not {max_age}")
    _check_budget(budget)
    _need_state(messages.sparkSession)
    subscribed = _subscribed(subscribe)
    found = _shaped(messages, order)
    found = found.where(sql.col("key").isNull() | wanted(sql.col("key"), subscribed))
    # The batch's own time: the same where a batch is done again. Without an age there is none.
    now = sql.lit(0.0) if max_age is None else sql.unix_millis(sql.current_timestamp()) / 1000
    found = found.withColumn("lane", sql.lit(0) if lanes is None else lanes)
    found = found.withColumn("now", now.cast("double"))
    processor = Lanes(subscribed, tuple(order), reorg_threshold, max_age, budget)
    told = found.groupBy("lane").transformWithState(processor, TOLD, "Append", "None")
    return views(told)


def _check_budget(budget: int) -> None:
    if budget <= 0:
        raise UsageError(f"budget is at least a byte, not {budget}")


def _need(package: str, doing: str) -> None:
    try:
        there = find_spec(package) is not None
    except ModuleNotFoundError:  # of what it is in
        there = False
    if not there:
        raise ExtraMissing(f"Spark needs {package} to {doing}", "spark-reassembly")


def _need_state(spark: SparkSession) -> None:
    _need("pandas", "hand groups to Python")
    _need("google.protobuf", "keep state")
    for setting, value in STATE_SETTINGS.items():
        if spark.conf.get(setting, None) != value:
            raise UsageError(
                f"Spark keeps the state of Python in RocksDB alone: make the session with "
                f"session(settings=datastreamer.spark.STATE_SETTINGS), or set {setting} to {value}"
            )


def _subscribed(subscribe: Iterable[bytes] | None) -> tuple[bytes, ...] | None:
    if subscribe is None:
        return None
    found = tuple(subscribe)
    for prefix in found:
        if not isinstance(prefix, bytes):
            raise UsageError(f"a subscription is bytes, not {prefix!r}")
    return found


def _shaped(messages: DataFrame, order: Sequence[str]) -> DataFrame:
    """The columns of messages and those that order them, of the types that they have to have."""
    there = {field.name: field.dataType for field in messages.schema}
    for name, wanted_type in _COLUMNS:
        if name not in there and name in ("key", "value"):
            raise UsageError(
                f"messages have columns key and value, and may have source and position: there "
                f"is no {name} in {', '.join(there)}"
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
            found = sql.coalesce(found, sql.lit(b""))  # Kafka has messages without one
        columns.append(found.cast(wanted_type).alias(name))
    others = [sql.col(name) for name in order if name not in dict(_COLUMNS)]
    return messages.select(*columns, *others)


def _run(
    batches: Iterator[Any], subscribe: Sequence[bytes] | None, budget: int
) -> Iterator[tuple[Any, ...]]:
    """What a task has to tell of its messages, which come group by group, each in order."""
    home: bytes | None = None
    core: Reassembler | None = None
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in _NAMES]
        for own, key, value, source, position in zip(*columns, strict=True):
            if core is None or own != home:
                yield from _end(core)
                home = own
                # In here nothing is forgotten: it is all of the payload that there is.
                core = Reassembler(subscribe, reorg_threshold=U32_MAX, budget=budget, max_age=0.5)
            if key is None:
                yield row_of(without_key(value, source, position))
                continue
            for event in core.receive(key, value, source or "", position):
                yield row_of(event)
    yield from _end(core)


_NAMES: Final = ("home", "key", "value", "source", "position")


def _end(core: Reassembler | None) -> Iterator[tuple[Any, ...]]:
    """Nothing more comes: what is unfinished is told of."""
    if core is not None:
        for event in core.expire(_AT_THE_END):
            yield row_of(event, ended=True)
