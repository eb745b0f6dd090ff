"""The one line of a Spark error that says what failed."""

from __future__ import annotations

import re
from typing import Final

from pyspark.errors import PySparkException

__all__ = ["PySparkException", "reason"]

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
