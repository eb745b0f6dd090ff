"""`datastreamer spark`: tables of a sequencer's stream, made by Spark."""

from __future__ import annotations

import typer

from datastreamer.cli.shared.common_options import verb
from datastreamer.cli.shared.options import LogFormatOption, LogLevelOption, new_program
from datastreamer.cli.verbs.spark.ingest import ingest
from datastreamer.cli.verbs.spark.report import report

spark = new_program()


@spark.callback(invoke_without_command=True)
def about(
    context: typer.Context,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Ingest a sequencer's stream into Parquet tables, and report on them; needs Java."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (ingest, report):
    spark.command()(verb(command))
