"""`datastreamer archive`: a stream in object storage."""

from __future__ import annotations

from datastreamer.cli.commands.building import new_program
from datastreamer.cli.commands.groups import group_class

SECTIONS = {
    "Commands": {
        "push": "Archive a stream file, up to its last durable commit.",
        "list": "List what an archive holds.",
        "verify": "Read an archive, and check every page.",
        "restore": "Make a stream file from an archive.",
        "prune": "Delete old manifests of an archive, and unused objects.",
    }
}

# `list` is Python's own name for something else.
archive = new_program(
    "Keep a stream in object storage (S3, Google Cloud, Azure, or a folder).",
    group=group_class("datastreamer.cli.verbs.archive", SECTIONS, {"list": "listing"}),
)
