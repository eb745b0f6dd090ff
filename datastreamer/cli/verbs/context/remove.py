"""`datastreamer context remove`: remove a context."""

from __future__ import annotations

from datastreamer.cli.commands.contexts import context_of, read_contexts, write_contexts
from datastreamer.cli.verbs.context.add import NameArgument


def remove(name: NameArgument) -> None:
    """Remove a context.

    Examples:
      datastreamer context remove prod
      datastreamer context show
    """
    context_of(name)
    write_contexts({key: value for key, value in read_contexts().items() if key != name})
