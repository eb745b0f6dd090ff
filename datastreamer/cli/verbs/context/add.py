"""`datastreamer context add`: give a server a name."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer

from datastreamer.cli.commands.contexts import read_contexts, write_contexts
from datastreamer.cli.shared.addresses import address_of
from datastreamer.cli.shared.options import SourceOptions

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")]
ServerArgument = Annotated[
    str, typer.Argument(metavar="SERVER", help="HOST:PORT, tcps://HOST:PORT, unix:PATH.")
]


def add(name: NameArgument, server: ServerArgument, *, options: SourceOptions) -> None:
    """Add a context, or replace it.

    Paths of files are stored as absolute paths.

    Examples:
      datastreamer context add prod tcps://stream.example.org --tls-ca ca.pem
      datastreamer cat --context prod --last 10
    """
    if not address_of(server).tls:
        options.check_unused(server)
    given = {key: value for key, value in asdict(options).items() if value is not None}
    for key in ("tls_ca", "tls_cert", "tls_key"):
        if key in given:
            given[key] = os.path.abspath(given[key])
            if given[key].startswith(f"/proc/{os.getpid()}/"):
                raise typer.BadParameter("a pipe can be read once only; a context needs a file")
    context = {"server": server, **{key.replace("_", "-"): given[key] for key in given}}
    write_contexts({**read_contexts(), name: context})
