"""`datastreamer context ls`: another name of `context show`."""

from __future__ import annotations

from datastreamer.cli.shared.options import ReportOutput
from datastreamer.cli.verbs.context.show import show


def ls(*, output: ReportOutput) -> None:
    """List the contexts.

    Examples:
      datastreamer context ls
      datastreamer context ls --json | jq -r .server
    """
    show(output=output)
