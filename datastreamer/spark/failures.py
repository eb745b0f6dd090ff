"""The one line of a Spark error that says what failed."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from inspect import isgenerator
from typing import Any, Final, TypeVar

from pyspark.errors import PySparkException

from datastreamer.errors import DatastreamerError

__all__ = ["PySparkException", "one_line", "reason"]

C = TypeVar("C", bound=type)

# What Spark's workers call.
_CALLED: Final = (
    *("schema", "reader", "writer", "streamWriter", "partitions", "read", "write", "commit"),
    *("initialOffset", "getDefaultReadLimit", "prepareForTriggerAvailableNow", "latestOffset"),
)
# Only Spark's workers import it. They look into the environment when they report an exception.
_OF_WORKERS: Final = "pyspark.worker_util"
_HIDDEN: Final = "SPARK_HIDE_TRACEBACK"

# The last line of a Python traceback that Spark quotes, for an exception of this package.
_OURS: Final = re.compile(r"datastreamer\.errors\.\w+: (.+)")
# The same for any other exception. The indented lines are the traceback's frames.
_THEIRS: Final = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)*(\S.*)", re.MULTILINE
)
# What lies beneath an error of the JVM.
_CAUSE: Final = re.compile(r"^Caused by: [\w.$]+: (.+)", re.MULTILINE)
# Prefix that Py4J adds to an error of the JVM.
_CALL: Final = re.compile(r"\AAn error occurred while calling .*\n: ")


def reason(error: Exception) -> str:
    """The message of the exception of this package, else of any Python exception, else Spark's
    first line and its last cause."""
    text = _CALL.sub("", str(error))
    found = _OURS.findall(text) or _THEIRS.findall(text)
    if found:
        return str(found[-1]).strip()
    first, causes = text.strip().partition("\n")[0], _CAUSE.findall(text)
    return f"{first}: {causes[-1]}" if causes and causes[-1] not in first else first


def one_line(of: C) -> C:
    """A class that Spark's workers use: they show errors of this package without a trace."""
    for name in _CALLED:
        if name in vars(of):
            setattr(of, name, _in_one_line(vars(of)[name]))
    return of


def _in_one_line(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        try:
            found = method(*args, **named)
        except DatastreamerError:
            _hide_trace()
            raise
        return _rows(found) if isgenerator(found) else found

    return call


def _rows(found: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from found
    except DatastreamerError:
        _hide_trace()
        raise


def _hide_trace() -> None:
    # The worker ends after it has reported the exception.
    if _OF_WORKERS in sys.modules:
        os.environ[_HIDDEN] = "1"
