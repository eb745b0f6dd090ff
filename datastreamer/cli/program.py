"""`datastreamer` put together: its verbs, each in a file of its own."""

from __future__ import annotations

import typer

from datastreamer.cli.append import append
from datastreamer.cli.bench import bench
from datastreamer.cli.bookmark import bookmark
from datastreamer.cli.cat import cat
from datastreamer.cli.clients import clients
from datastreamer.cli.demo import demo
from datastreamer.cli.entry import entry
from datastreamer.cli.export import export
from datastreamer.cli.import_leveldb import import_leveldb
from datastreamer.cli.info import info
from datastreamer.cli.options import LogFormatOption, LogLevelOption, VersionOption, new_program
from datastreamer.cli.reassemble import reassemble
from datastreamer.cli.reindex import reindex
from datastreamer.cli.relay import relay
from datastreamer.cli.repair import repair
from datastreamer.cli.serve import serve
from datastreamer.cli.snapshot import snapshot
from datastreamer.cli.spark import spark
from datastreamer.cli.split import split
from datastreamer.cli.top import top
from datastreamer.cli.truncate import truncate
from datastreamer.cli.verb import verb
from datastreamer.cli.verify import verify
from datastreamer.cli.zkevm import zkevm

program = new_program()


@program.callback(invoke_without_command=True)
def datastreamer(
    context: typer.Context,
    version: VersionOption = False,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Serve and read streams: append-only files of numbered entries with bookmarks.

    SOURCE is a stream file, or HOST:PORT of a server.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (
    *(serve, relay, info, cat, entry, bookmark),
    *(append, truncate, snapshot, reindex, import_leveldb, verify, repair),
    *(reassemble, split, export, top, clients, demo, bench),
):
    program.command()(verb(command))
program.add_typer(zkevm, name="zkevm")
program.add_typer(spark, name="spark")
