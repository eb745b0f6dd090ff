"""The `datastreamer` program: its commands, each in its own file."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer._version import __version__
from datastreamer.cli.commands.building import LOG_OPTIONS, new_program, verb
from datastreamer.cli.verbs.append import append
from datastreamer.cli.verbs.bench import bench
from datastreamer.cli.verbs.bookmark import bookmark
from datastreamer.cli.verbs.cat import cat
from datastreamer.cli.verbs.clients import clients
from datastreamer.cli.verbs.demo import demo
from datastreamer.cli.verbs.entry import entry
from datastreamer.cli.verbs.export import export
from datastreamer.cli.verbs.import_leveldb import import_leveldb
from datastreamer.cli.verbs.info import info
from datastreamer.cli.verbs.reassemble import reassemble
from datastreamer.cli.verbs.reindex import reindex
from datastreamer.cli.verbs.relay import relay
from datastreamer.cli.verbs.repair import repair
from datastreamer.cli.verbs.serve import serve
from datastreamer.cli.verbs.snapshot import snapshot
from datastreamer.cli.verbs.spark import spark
from datastreamer.cli.verbs.split import split
from datastreamer.cli.verbs.sums import sums
from datastreamer.cli.verbs.top import top
from datastreamer.cli.verbs.truncate import truncate
from datastreamer.cli.verbs.verify import verify
from datastreamer.cli.verbs.zkevm import zkevm


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"datastreamer {__version__}")
        raise typer.Exit


_VERSION_OPTION = Annotated[
    bool | None,
    typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
]

program = new_program(
    "Serve and read streams: append-only files of numbered entries with bookmarks.\n\n"
    "SOURCE is a stream file, or HOST:PORT of a server. Exit codes: 0 success, 1 failure, 2 wrong "
    "usage.",
    {"version": _VERSION_OPTION, **LOG_OPTIONS},
)
for command in (
    *(serve, relay, info, cat, entry, bookmark),
    *(append, truncate, snapshot, reindex, import_leveldb, verify, repair, sums),
    *(reassemble, split, export, top, clients, demo, bench),
):
    program.command()(verb(command))
program.add_typer(zkevm, name="zkevm")
program.add_typer(spark, name="spark")
