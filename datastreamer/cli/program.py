"""The `datastreamer` program: its commands, each in its own file, loaded when it is used."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer._version import __version__
from datastreamer.cli.commands.building import LOG_OPTIONS, new_program
from datastreamer.cli.commands.groups import Commands, group_class


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

SECTIONS = {
    "Serve": {
        "serve": "Serve a stream to clients over TCP or a Unix socket.",
        "relay": "Download a stream, keep it in a file, and serve it.",
        "health": "Check that a server serves.",
        "top": "Watch a server's head and its clients.",
        "clients": "List the clients of a server.",
    },
    "Read": {
        "info": "Show the header of a stream, and the contents of a file.",
        "cat": "Print entries.",
        "tail": "Print the last entries, then later ones as they are committed.",
        "entry": "Print one entry by its number.",
        "bookmark": "Print the first event at or after a bookmark.",
        "export": "Export entries to Parquet, JSON lines or CSV.",
        "reassemble": "Print payloads that several producers publish in messages.",
    },
    "Write": {
        "append": "Append atomic operations, read as JSON lines.",
        "split": "Split payloads, read as JSON lines, into messages.",
        "truncate": "Truncate a stream to its first N entries, permanently.",
        "snapshot": "Copy a stream consistently, also while it is written.",
        "archive": "Keep a stream in object storage.",
        "demo": "Write the blocks of a demo sequencer to a stream.",
    },
    "Check": {
        "verify": "Check a stream file, the stream of a server, or an archive.",
        "repair": "Repair a damaged stream file.",
        "reindex": "Delete the bookmark index and rebuild it.",
        "sums": "Make the checksums that are missing beside a file.",
        "import-leveldb": "Index a stream and compare the index with the Go program's.",
        "bench": "Measure this machine, or a server.",
    },
    "zkEVM": {"zkevm": "Check, show and compare batches and blocks."},
    "Spark": {"spark": "Ingest a sequencer's stream into Parquet tables; needs Java."},
    "Set up": {
        "context": "Name servers, with their TLS options.",
        "completion": "Print the completion script of a shell.",
    },
}

_FOLDER = "datastreamer.cli.verbs"


def commands() -> Commands:
    """The commands, for completion."""
    return Commands(_FOLDER, SECTIONS)


program = new_program(
    "Serve and read streams: append-only files of numbered entries with bookmarks.\n\n"
    "SOURCE is a stream file, HOST:PORT of a server, or archive:URL. Exit codes: 0 success, "
    "1 failure, 2 wrong usage, 3 damage found, 130 or 143 interrupted.",
    {"version": _VERSION_OPTION, **LOG_OPTIONS},
    group_class(_FOLDER, SECTIONS),
)
