"""`datastreamer context use`: select the context of commands without a SOURCE."""

from __future__ import annotations

from datastreamer.cli.commands.contexts import context_of, read_contexts, write_contexts
from datastreamer.cli.verbs.context.add import NameArgument


def use(name: NameArgument) -> None:
    """Use a context where no SOURCE is given.

    Commands that read then need no SOURCE; --context and DATASTREAMER_SERVER override the context.

    Examples:
      datastreamer context use prod
      datastreamer info
    """
    context_of(name)
    write_contexts(read_contexts(), name)
