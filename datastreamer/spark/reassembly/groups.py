"""Groups messages that must be processed together, from the graph that headers form.

Owns what a partition cannot know by itself: the group of a key. A group is everything that headers
connect: a payload with its prefixes, and all payloads that announce the same prefix. Reads only
headers and validates none: a group that is too large costs time, one that is too small would be
an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql

from datastreamer.reassembly.portions import NESTED
from datastreamer.reassembly.splitter import PREFIX_SIZE, RECORD_SIZE

_HEADER: Final = b"\x00"


def node(key: Column) -> Column:
    """The group key of a message: the first 33 bytes of its key."""
    return sql.substring(key, 1, PREFIX_SIZE)


def wanted(key: Column, subscribe: Sequence[bytes] | None) -> Column:
    """Whether a key or prefix is subscribed to. Headers always are, and keys that are too
    short."""
    if subscribe is None or b"" in subscribe:
        return sql.lit(True)
    inside = key.startswith(sql.lit(_HEADER)) | (sql.length(key) < PREFIX_SIZE)
    for prefix in subscribe:
        inside = inside | key.startswith(sql.lit(prefix[:PREFIX_SIZE]))
    return inside


def announcements(messages: DataFrame, subscribe: Sequence[bytes] | None) -> DataFrame:
    """The distinct pairs (node, prefix): the prefixes that are announced under a header's key or
    under the prefix of nested headers."""
    key, value = sql.col("key"), sql.col("value")
    first = sql.substring(key, 1, 1)
    header = (first == sql.lit(_HEADER)) & (sql.length(key) == PREFIX_SIZE)
    header = header | ((first == sql.lit(NESTED)) & (sql.length(key) >= PREFIX_SIZE))
    size = sql.length(value)
    headers = messages.where(
        header & (size > 0) & (size % RECORD_SIZE == 0) & wanted(key, subscribe)
    )
    record = sql.expr(
        f"transform(sequence(0, length(value) div {RECORD_SIZE} - 1),"
        f" at -> substring(value, int(at * {RECORD_SIZE} + 1), {PREFIX_SIZE}))"
    )
    pairs = headers.select(node(key).alias("node"), sql.explode(record).alias("prefix"))
    # A header that announces such a prefix is malformed.
    pairs = pairs.where(sql.substring("prefix", 1, 1) != sql.lit(_HEADER))
    return pairs.where(wanted(sql.col("prefix"), subscribe)).distinct()


def groups(messages: DataFrame, subscribe: Sequence[bytes] | None = None) -> DataFrame:
    """(node, home): the group of each node whose group does not have its own name.

    Reads the headers when it is called, in a number of rounds that depends on them: in none if
    every prefix is announced once and no header is nested.
    """
    claims = announcements(messages, subscribe).persist(StorageLevel.MEMORY_AND_DISK)
    shared = (
        claims.groupBy("prefix")
        .agg(sql.count("*").alias("announced"))
        .where((sql.col("announced") > 1) | (sql.substring("prefix", 1, 1) == sql.lit(NESTED)))
    )
    links = claims.join(shared.select("prefix"), "prefix")
    if links.isEmpty():
        return claims.select(sql.col("prefix").alias("node"), sql.col("node").alias("home"))
    roots = connected(links.select(sql.col("node").alias("a"), sql.col("prefix").alias("b")))
    direct = claims.join(roots, "node", "left").select(
        sql.col("prefix").alias("node"), sql.coalesce("home", "node").alias("home")
    )
    return direct.union(roots.select("node", "home")).distinct()


def connected(edges: DataFrame) -> DataFrame:
    """(node, home) for every node of the edges (a, b) except the roots; `home` is the smallest
    node that it is connected with.

    Alternates large-star and small-star steps (Kiveris and others, 2014), which join each node
    with its smallest neighbour, until every group is a star. The number of rounds grows as the
    square of the logarithm of the longest chain.
    """
    edges = edges.where("a <> b").select(
        sql.greatest("a", "b").alias("a"), sql.least("a", "b").alias("b")
    )
    edges = edges.distinct().localCheckpoint()
    before = None
    while True:
        edges = _small_star(_large_star(edges)).distinct().localCheckpoint()
        # Equal counts and sums of 64-bit hashes mean the same edges.
        after = edges.agg(
            sql.count("*"), sql.sum(sql.xxhash64("a", "b").cast("decimal(38,0)"))
        ).first()
        if after == before:
            return edges.select(sql.col("a").alias("node"), sql.col("b").alias("home"))
        before = after


def _large_star(edges: DataFrame) -> DataFrame:
    """Join the larger neighbours of each node with the smallest of its neighbours and itself."""
    both = edges.union(edges.select("b", "a"))
    least = both.groupBy("a").agg(sql.min("b").alias("m"))
    least = least.select("a", sql.least("a", "m").alias("m"))
    return both.where("b > a").join(least, "a").select(sql.col("b").alias("a"), sql.col("m"))


def _small_star(edges: DataFrame) -> DataFrame:
    """Join the smaller neighbours of each node, and the node, with the smallest of them."""
    edges = edges.toDF("a", "b").where("a <> b")
    least = edges.groupBy("a").agg(sql.min("b").alias("m"))
    below = edges.join(least, "a").select(sql.col("b").alias("a"), sql.col("m").alias("b"))
    return below.union(least.select("a", sql.col("m").alias("b"))).where("a <> b")
