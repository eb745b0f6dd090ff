"""`datastreamer spark`: tables of a sequencer's stream, made by Spark."""

from __future__ import annotations

from datastreamer.cli.commands.building import new_program
from datastreamer.cli.commands.groups import group_class

SECTIONS = {
    "Commands": {
        "ingest": "Write blocks, transactions and batches to Parquet.",
        "report": "Report transactions per block, gas, block times, open batches.",
    }
}

spark = new_program(
    "Ingest a sequencer's stream into Parquet tables, and report on them; needs Java.",
    group=group_class("datastreamer.cli.verbs.spark", SECTIONS),
)
