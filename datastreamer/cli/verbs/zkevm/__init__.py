"""`datastreamer zkevm`: batches and blocks of a sequencer's stream."""

from __future__ import annotations

from datastreamer.cli.commands.building import new_program
from datastreamer.cli.commands.groups import group_class

SECTIONS = {
    "Commands": {
        "check": "Check the sequence of entries, blocks, batches and parents.",
        "batch": "Show a batch with its blocks and their transactions.",
        "block": "Show a block with its transactions.",
        "diff": "Compare two streams and show the first difference.",
    }
}

zkevm = new_program(
    "Check, show and compare the batches and blocks of zkEVM streams.",
    group=group_class("datastreamer.cli.verbs.zkevm", SECTIONS, {"batch": "show", "block": "show"}),
)
