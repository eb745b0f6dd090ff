"""Queries and charts of the tables that `ingest` writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession

from datastreamer.errors import ExtraMissing
from datastreamer.spark.pipeline.manifest import complete_ranges
from datastreamer.spark.pipeline.tables import TABLES, readable, tables_in


class Query(NamedTuple):
    """A query, with the title of its result."""

    title: str
    sql: str


QUERIES: Final = {
    "transactions_per_block": Query(
        "Transactions per block, by day",
        """
        select day, count(*) as blocks, sum(transactions) as transactions,
               round(avg(transactions), 2) as average, max(transactions) as most
        from (select b.day, b.number, count(t.entry_number) as transactions
              from blocks b left join transactions t on t.l2block_number = b.number
              group by b.day, b.number)
        group by day order by day
        """,
    ),
    "gas_by_sender": Query(
        "The ten senders with the highest gas limits",
        """
        select if(sender is null, 'none', concat('0x', lower(hex(sender)))) as sender,
               count(*) as transactions, sum(gas) as gas,
               round(100 * sum(gas) / sum(sum(gas)) over (), 1) as percent
        from transactions group by sender order by gas desc nulls last, sender limit 10
        """,
    ),
    "block_time": Query(
        "Seconds between blocks, by day",
        """
        select day, count(*) as blocks, round(avg(seconds), 2) as average,
               percentile(seconds, 0.5) as median, max(seconds) as most
        from (select day, number, timestamp - lag(timestamp) over (order by number) as seconds
              from blocks)
        where seconds is not null group by day order by day
        """,
    ),
    "open_batches": Query(
        "Batches without an end",
        """
        select b.number, b.entry_number from batches b
        left anti join batch_ends e on e.number = b.number order by b.number
        """,
    ),
}


def open_tables(spark: SparkSession, out: str | os.PathLike[str]) -> dict[str, DataFrame]:
    """The tables in a folder, also registered as temporary views.

    They have columns for people beside the raw ones: `time`, `NAME_hex`, `NAME_wei`. Raises
    `FileMissing` if there is none. Incomplete ranges are left out.
    """
    folder = Path(out)
    done = [entries.name for entries in complete_ranges(folder)]
    stored = tables_in(spark, folder)
    tables = {}
    for name in TABLES:
        table = stored.read(name)
        tables[name] = readable(table.where(table["range"].isin(done)))
        tables[name].createOrReplaceTempView(name)
    return tables


def draw(spark: SparkSession, folder: str | os.PathLike[str]) -> list[Path]:
    """Draw charts (PNG) of the tables that `open_tables` registered, into a folder.

    Raises `ExtraMissing` without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ExtraMissing("charts need a package that is not installed", "charts") from None
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    # At most 400 points, however many blocks there are.
    blocks = _columns(
        spark.sql(
            """
            select min(time) as time, avg(transactions) as transactions, avg(seconds) as seconds
            from (select ntile(400) over (order by number) as bucket, *
                  from (select b.number, b.time, count(t.entry_number) as transactions,
                               b.timestamp - lag(b.timestamp) over (order by b.number) as seconds
                        from blocks b left join transactions t on t.l2block_number = b.number
                        group by b.number, b.timestamp, b.time))
            where time is not null group by bucket order by bucket
            """
        )
    )
    senders = _columns(spark.sql(QUERIES["gas_by_sender"].sql))

    over_time = Figure(figsize=(10, 6), layout="constrained")
    charts = over_time.subplots(2, 1, sharex=True)
    for chart, name, title in zip(
        charts,
        ("transactions", "seconds"),
        ("Transactions per block", "Seconds since the previous block"),
        strict=True,
    ):
        chart.plot(blocks["time"], blocks[name])
        chart.set_title(title)
        chart.set_ylabel(name)
        # Linear up to 1, then logarithmic: a burst does not flatten the rest.
        chart.set_yscale("symlog")
    charts[-1].set_xlabel("time of the block (UTC)")
    over_time.autofmt_xdate()
    by_sender = Figure(figsize=(10, 4), layout="constrained")
    bars = by_sender.subplots()
    gas = [sent or 0 for sent in senders["gas"]]
    bars.barh([name[:12] for name in senders["sender"]][::-1], gas[::-1])
    bars.set_title(QUERIES["gas_by_sender"].title)
    bars.set_xlabel("gas limit of their transactions")

    drawn = []
    for name, figure in (("blocks.png", over_time), ("senders.png", by_sender)):
        figure.savefig(target / name)
        drawn.append(target / name)
    return drawn


def _columns(rows: DataFrame) -> dict[str, list[Any]]:
    found = [row.asDict() for row in rows.collect()]
    return {name: [row[name] for row in found] for name in rows.columns}
