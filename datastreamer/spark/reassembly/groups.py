"""Which messages have to be looked at together: the announcements of headers, as a graph.

Owns the one thing that a partition cannot know by itself: to which group a key belongs. A
group is everything that headers join: a payload with its prefixes, and, where two payloads
announce the same prefix, both of them. Looks at headers alone, and takes none for right or
wrong: a group that is too large costs time, one that is too small would be an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql

from datastreamer.reassembly.splitter import PREFIX_SIZE, RECORD_SIZE

_HEADER: Final = b"\x00"
_NESTED: Final = b"\xff"


def node(key: Column) -> Column:
    """What a key is filed under: its first 33 bytes."""
    return sql.substring(key, 1, PREFIX_SIZE)


def wanted(key: Column, subscribe: Sequence[bytes] | None) -> Column:
    """Whether a key, or a prefix, is inside the subscription. Headers always are, and what is
    too short to be a key."""
    if subscribe is None or b"" in subscribe:
        return sql.lit(True)
    inside = key.startswith(sql.lit(_HEADER)) | (sql.length(key) < PREFIX_SIZE)
    for prefix in subscribe:
        inside = inside | key.startswith(sql.lit(prefix[:PREFIX_SIZE]))
    return inside


def announcements(messages: DataFrame, subscribe: Sequence[bytes] | None) -> DataFrame:
    """(node, prefix): which prefixes are announced under a header's key, or under the prefix of
    nested headers. Each pair once."""
    key, value = sql.col("key"), sql.col("value")
    first = sql.substring(key, 1, 1)
    header = (first == sql.lit(_HEADER)) & (sql.length(key) == PREFIX_SIZE)
    header = header | ((first == sql.lit(_NESTED)) & (sql.length(key) >= PREFIX_SIZE))
    size = sql.length(value)
    headers = messages.where(
        header & (size > 0) & (size % RECORD_SIZE == 0) & wanted(key, subscribe)
    )
    record = sql.expr(
        f"transform(sequence(0, length(value) div {RECORD_SIZE} - 1),"
        f" at -> substring(value, int(at * {RECORD_SIZE} + 1), {PREFIX_SIZE}))"
    )
    pairs = headers.select(node(key).alias("node"), sql.explode(record).alias("prefix"))
    # A header that announces such a prefix is none.
    pairs = pairs.where(sql.substring("prefix", 1, 1) != sql.lit(_HEADER))
    return pairs.where(wanted(sql.col("prefix"), subscribe)).distinct()


def groups(messages: DataFrame, subscribe: Sequence[bytes] | None = None) -> DataFrame:
    """(node, home): the group of each node that is not a group of its own name.

    Reads the headers when it is called: how many rounds it takes depends on them. Where no
    prefix is announced from two places and no header is nested, it takes none.
    """
    claims = announcements(messages, subscribe).persist(StorageLevel.MEMORY_AND_DISK)
    shared = (
        claims.groupBy("prefix")
        .agg(sql.count("*").alias("announced"))
        .where((sql.col("announced") > 1) | (sql.substring("prefix", 1, 1) == sql.lit(_NESTED)))
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
    """(node, home) of every node of the edges (a, b) but the roots: the least of the nodes that
    it is connected with.

    Stars are made of the edges until each group is one: each node is joined with the least of
    its neighbours, in turn those above it and those below it (Kiveris and others, 2014), in
    rounds whose number grows as the square of the logarithm of the longest chain.
    """
    edges = edges.where("a <> b").select(
        sql.greatest("a", "b").alias("a"), sql.least("a", "b").alias("b")
    )
    edges = edges.distinct().localCheckpoint()
    before = None
    while True:
        edges = _small_star(_large_star(edges)).distinct().localCheckpoint()
        # The same edges, or others whose 64 bits add up alike.
        after = edges.agg(
            sql.count("*"), sql.sum(sql.xxhash64("a", "b").cast("decimal(38,0)"))
        ).first()
        if after == before:
            return edges.select(sql.col("a").alias("node"), sql.col("b").alias("home"))
        before = after


def _large_star(edges: DataFrame) -> DataFrame:
    """What is above a node is joined with the least of its neighbours and itself."""
    both = edges.union(edges.select("b", "a"))
    least = both.groupBy("a").agg(sql.min("b").alias("m"))
    least = least.select("a", sql.least("a", "m").alias("m"))
    return both.where("b > a").join(least, "a").select(sql.col("b").alias("a"), sql.col("m"))


def _small_star(edges: DataFrame) -> DataFrame:
    """What is below a node, and the node, are joined with the least of them."""
    edges = edges.toDF("a", "b").where("a <> b")
    least = edges.groupBy("a").agg(sql.min("b").alias("m"))
    below = edges.join(least, "a").select(sql.col("b").alias("a"), sql.col("m").alias("b"))
    return below.union(least.select("a", sql.col("m").alias("b"))).where("a <> b")
