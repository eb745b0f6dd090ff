"""`datastreamer zkevm`: batches and blocks of a sequencer's stream."""

from __future__ import annotations

from datastreamer.cli.commands.building import new_program, verb
from datastreamer.cli.verbs.zkevm.check import check
from datastreamer.cli.verbs.zkevm.diff import diff
from datastreamer.cli.verbs.zkevm.show import batch, block

zkevm = new_program("Check, show and compare the batches and blocks of zkEVM streams.")
for command in (check, batch, block, diff):
    zkevm.command()(verb(command))
