"""`datastreamer spark`: tables of a sequencer's stream, made by Spark."""

from __future__ import annotations

from datastreamer.cli.commands.building import new_program, verb
from datastreamer.cli.verbs.spark.ingest import ingest
from datastreamer.cli.verbs.spark.report import report

spark = new_program(
    "Ingest a sequencer's stream into Parquet tables, and report on them; needs Java."
)
for command in (ingest, report):
    spark.command()(verb(command))
