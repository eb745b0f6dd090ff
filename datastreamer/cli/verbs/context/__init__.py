"""`datastreamer context`: servers with a name."""

from __future__ import annotations

from datastreamer.cli.commands.building import new_program
from datastreamer.cli.commands.groups import group_class

SECTIONS = {
    "Commands": {
        "add": "Add a context, or replace it.",
        "use": "Use a context where no SOURCE is given.",
        "show": "List the contexts.",
        "ls": "List the contexts.",
        "remove": "Remove a context.",
    }
}

context = new_program(
    "Name servers with their TLS options; commands that read SOURCE use them by --context NAME.",
    group=group_class("datastreamer.cli.verbs.context", SECTIONS),
)
