"""`datastreamer context show`: list the contexts."""

from __future__ import annotations

from datastreamer.cli.commands.contexts import current_context, read_contexts
from datastreamer.cli.shared.exit_codes import write_out
from datastreamer.cli.shared.options import ReportOutput
from datastreamer.cli.shared.output import json_line, text_lines


def show(*, output: ReportOutput) -> None:
    """List the contexts.

    The table marks the current one with *.

    Examples:
      datastreamer context show
      datastreamer context show --json | jq -r .server
    """
    current = current_context()
    contexts = [
        {"name": name, **context, **({"current": True} if name == current else {})}
        for name, context in sorted(read_contexts().items())
    ]
    if output.chosen() == "jsonl":
        write_out(b"".join(map(json_line, contexts)))
    else:
        write_out(
            text_lines(
                [
                    f"{'*' if each.get('current') else ' '} {each['name']:15}  {each['server']}"
                    for each in contexts
                ]
            )
        )
