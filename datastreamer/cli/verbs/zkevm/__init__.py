"""`datastreamer zkevm`: batches and blocks of a sequencer's stream."""

from __future__ import annotations

import typer

from datastreamer.cli.shared.common_options import verb
from datastreamer.cli.shared.options import LogFormatOption, LogLevelOption, new_program
from datastreamer.cli.verbs.zkevm.check import check
from datastreamer.cli.verbs.zkevm.diff import diff
from datastreamer.cli.verbs.zkevm.show import batch, block

zkevm = new_program()


@zkevm.callback(invoke_without_command=True)
def about(
    context: typer.Context,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Check, show and compare the batches and blocks of zkEVM streams."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (check, batch, block, diff):
    zkevm.command()(verb(command))
