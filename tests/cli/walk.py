"""Runs commands, each in a fork of this process, and disturbs them; a program of its own, so that
no threads are there to fork.

Standard input has a JSON list of runs: words, `signal` (sent when the command opens `at`, a file,
or connects), `full` (standard output is a full disk), `limit` (of the size of files). Standard
output gets a list of exit code and standard error of each.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from importlib import import_module
from typing import Any

from datastreamer.cli import main as entry
from datastreamer.cli.program import commands


def disturb(run: dict[str, Any], errors: int) -> None:
    """In the child: run the command."""
    os.dup2(errors, 2)
    os.dup2(os.open("/dev/full" if run.get("full") else os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(run["input"], os.O_RDONLY), 0)
    if number := run.get("signal"):
        sent = []

        def hook(event: str, words: tuple[Any, ...]) -> None:
            opened = event == "open" and str(words[0]).endswith(run["at"])
            if not sent and (opened or (event == run["at"])):
                sent.append(event)
                os.kill(os.getpid(), number)

        sys.addaudithook(hook)
    if limit := run.get("limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.argv[1:] = run["words"]
    os._exit(entry.main())


def main() -> None:
    runs = json.load(sys.stdin)
    for name in commands():
        import_module(f"datastreamer.cli.verbs.{name.replace('-', '_')}")
    results = []
    for number, run in enumerate(runs):
        with open(f"errors.{number}", "w+b") as errors:
            if not (child := os.fork()):
                disturb(run, errors.fileno())
            status = os.waitpid(child, 0)[1]
            errors.seek(0)
            text = errors.read().decode()
            results.append([os.waitstatus_to_exitcode(status), text])
    json.dump(results, sys.stdout)


main()
