"""Queries and charts of the tables that `ingest` writes."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession

from datastreamer.errors import ExtraMissing
from datastreamer.spark.pipeline.folder import folder_of
from datastreamer.spark.pipeline.manifest import complete
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
              from blocks b left join transactions t on t.block_entry = b.entry_number
              group by b.day, b.number, b.entry_number)
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
        from block_seconds where seconds is not null group by day order by day
        """,
    ),
    "open_batches": Query(
        "Batches without an end",
        """
        select b.number, b.entry_number
        from (select number, entry_number,
                     lead(entry_number) over (partition by number order by entry_number) as again
              from batches) b
        left anti join batch_ends e on e.number = b.number and e.entry_number > b.entry_number
                                   and (b.again is null or e.entry_number < b.again)
        order by b.number, b.entry_number
        """,
    ),
}


# The seconds since the block before, if that has the number before. A window over all blocks would
# sort them in one task, so each million of entries is one, and the last block of those before is
# joined.
_BLOCK_SECONDS: Final = """
    with placed as (select *, entry_number div 1000000 as part from blocks),
    before as (
        select part, lag(last) over (order by part) as last
        from (select part, max_by(struct(number, timestamp), entry_number) as last
              from placed group by part)
    ),
    pairs as (
        select p.*, coalesce(
                   lag(struct(p.number, p.timestamp)) over (
                       partition by p.part order by p.entry_number),
                   b.last) as previous
        from placed p join before b on b.part = p.part
    )
    select entry_number, number, day, time, timestamp,
           if(number = previous.number + 1, timestamp - previous.timestamp, null) as seconds
    from pairs
"""


# At most 400 points, one for each span of time.
_POINTS: Final = """
    select min(timestamp) as time, avg(transactions) as transactions, avg(seconds) as seconds
    from (select b.timestamp, b.seconds, coalesce(t.transactions, 0) as transactions,
                 (b.timestamp - first) * 400 div (last - first + 1) as span
          from block_seconds b
          left join (select block_entry, count(*) as transactions from transactions
                     group by block_entry) t on t.block_entry = b.entry_number
          cross join (select min(timestamp) as first, max(timestamp) as last
                      from block_seconds where time is not null)
          where b.time is not null)
    group by span order by span
"""

_BURST: Final = 20
_TICKS: Final = 6
_COUNTS: Final = [digit * 10**power for power in range(19) for digit in (1, 2, 5)]
_SECONDS: Final = [
    *(size * unit for unit in (1, 60) for size in (1, 2, 5, 10, 30)),
    *(size * 3_600 for size in (1, 3, 6, 12)),
    *(86_400 * size for size in _COUNTS),
]


def open_tables(spark: SparkSession, out: str | os.PathLike[str]) -> dict[str, DataFrame]:
    """The tables in a folder, also registered as temporary views, with one more for `QUERIES`.

    They have columns for people beside the raw ones: `time`, `NAME_hex`, `NAME_wei`. All are of
    one moment: what is incomplete or was removed is left out. Raises `FileMissing` if there is
    none.
    """
    folder = folder_of(out, spark)
    found = complete(folder)
    columns = {name: found.schema(name) for name in TABLES}
    stored = tables_in(spark, folder, found.format, columns)
    tables = {name: readable(stored.read(name, found.names)) for name in TABLES}
    for name, table in tables.items():
        table.createOrReplaceTempView(name)
    spark.sql(_BLOCK_SECONDS).createOrReplaceTempView("block_seconds")
    return tables


def draw(spark: SparkSession, folder: str | os.PathLike[str]) -> list[Path]:
    """Draw charts (PNG) of the tables that `open_tables` registered, into a folder.

    Raises `ExtraMissing` without matplotlib.
    """
    try:
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError:
        raise ExtraMissing("charts need a package that is not installed", "charts") from None
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    blocks = _columns(spark.sql(_POINTS))
    senders = _columns(spark.sql(QUERIES["gas_by_sender"].sql))

    over_time = Figure(figsize=(10, 6), layout="constrained")
    charts = over_time.subplots(2, 1, sharex=True)
    times = [datetime.fromtimestamp(time, UTC) for time in blocks["time"]]
    for chart, name, title in zip(
        charts,
        ("transactions", "seconds"),
        ("Transactions per block", "Time since the block before"),
        strict=True,
    ):
        chart.plot(times, blocks[name])
        chart.set_title(title)
        values = [value for value in blocks[name] if value is not None]
        scale(chart, values, seconds=name == "seconds")
        chart.grid(alpha=0.3)
    dates: Any = AutoDateLocator
    written: Any = ConciseDateFormatter
    charts[-1].xaxis.set_major_locator(located := dates(tz=UTC))
    charts[-1].xaxis.set_major_formatter(written(located, tz=UTC))
    charts[-1].set_xlabel("time of the block (UTC)")
    by_sender = Figure(figsize=(10, 4), layout="constrained")
    bars = by_sender.subplots()
    drawn_bars = bars.barh(
        [name if name == "none" else f"{name[:10]}…{name[-4:]}" for name in senders["sender"]],
        [sent or 0 for sent in senders["gas"]],
    )
    bars.bar_label(drawn_bars, [f"{share or 0} %" for share in senders["percent"]], padding=3)
    bars.invert_yaxis()
    bars.margins(x=0.1)
    bars.xaxis.set_major_formatter(EngFormatter())
    bars.set_title(QUERIES["gas_by_sender"].title)
    bars.set_xlabel("gas limit of their transactions")

    drawn = []
    for name, figure in (("blocks.png", over_time), ("senders.png", by_sender)):
        figure.savefig(target / name)
        drawn.append(target / name)
    return drawn


def scale(chart: Any, values: list[float], *, seconds: bool) -> None:
    """Give the axis of these values numbers for people. It begins at 0; if a burst would flatten
    the rest, it is logarithmic from 1 on."""
    ticks = _SECONDS if seconds else _COUNTS
    most = max(values, default=0)
    if most > _BURST * max(1, median(values or [0])):
        chart.set_yscale("symlog", linthresh=1)
        shown = [tick for tick in ticks if tick <= most]
        step = -(-len(shown) // _TICKS)
        chart.set_yticks([0, *shown[::-step][::-1]], minor=False)
        chart.set_yticks([], minor=True)
    elif most > 1:
        step = next(tick for tick in ticks if tick * _TICKS >= most)
        chart.set_yticks([step * at for at in range(int(most / step) + 1)])
    chart.yaxis.set_major_formatter(_duration if seconds else lambda value, _: f"{value:,g}")
    chart.set_ylim(bottom=min([0, *values]))


def _duration(value: float, _: object = None) -> str:
    """Seconds in the largest unit that fits, such as 5 min."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} s"


def _columns(rows: DataFrame) -> dict[str, list[Any]]:
    found = [row.asDict() for row in rows.collect()]
    return {name: [row[name] for row in found] for name in rows.columns}
