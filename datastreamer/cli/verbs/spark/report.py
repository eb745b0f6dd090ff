"""`datastreamer spark report`: query the ingested tables, and draw charts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import write_out
from datastreamer.cli.shared.options import ReportOutput, text_option
from datastreamer.cli.shared.output import json_line
from datastreamer.cli.verbs.spark.running import MasterOption, spark_session

if TYPE_CHECKING:
    from datastreamer.spark.pipeline.queries import Query

FolderArgument = Annotated[
    str, typer.Argument(metavar="FOLDER", help="Folder or URL that `spark ingest` writes to.")
]
ChartsOption = Annotated[str | None, text_option("OUT", "Also draw charts (PNG) into this folder.")]

_MOST_ROWS = 20


def report(
    folder: FolderArgument,
    *,
    charts: ChartsOption = None,
    output: ReportOutput,
    master: MasterOption = "local[*]",
) -> None:
    """Report transactions per block, gas, block times, open batches.

    Sums gas by sender. Reads only complete writes, so that an ingest may run at the same time.

    Examples:
      datastreamer spark report tables
      datastreamer spark report tables --charts charts
    """
    shape = output.chosen()
    from datastreamer.spark import find_java
    from datastreamer.spark.pipeline.folder import TableFolder
    from datastreamer.spark.pipeline.manifest import complete
    from datastreamer.spark.read.paths import local_path

    # Find missing requirements first: Spark needs seconds to start.
    find_java()
    if (local := local_path(folder)) is not None:
        complete(TableFolder(local))
    with spark_session(master) as spark:
        from datastreamer.spark.pipeline.queries import QUERIES, draw, open_tables

        open_tables(spark, folder)
        for name, query in QUERIES.items():
            rows = [
                {column: _plain(value) for column, value in row.asDict().items()}
                for row in spark.sql(query.sql).collect()
            ]
            if shape == "table":
                write_out(_table(query, rows))
            else:
                write_out(json_line({"query": name, "rows": rows}))
        if charts is not None:
            for path in draw(spark, charts):
                logs.say(f"drew {path}")


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float) else str(value)


def _table(query: Query, rows: list[dict[str, Any]]) -> bytes:
    """The title, and the rows in columns; of many rows the last ones."""
    if not rows:
        return f"{query.title}: none\n\n".encode()
    shown = rows[-_MOST_ROWS:]
    lines = [[*rows[0]], *([_shown(value) for value in row.values()] for row in shown)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    title = query.title
    if len(shown) < len(rows):
        title += f" (the last {len(shown)} of {len(rows)})"
    return "\n".join([title, *text, "", ""]).encode()


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
