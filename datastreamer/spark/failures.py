"""What Spark's errors are about: the line that our own code said, where it was ours."""

from __future__ import annotations

import re
from typing import Final

from pyspark.errors import PySparkException

__all__ = ["PySparkException", "reason"]

# As Python tells of an exception at the end of a traceback, which Spark quotes.
_OURS: Final = re.compile(r"datastreamer\.errors\.\w+: (.+)")
# The same of any other exception: behind the lines of the traceback, which are set in.
_THEIRS: Final = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)*(\S.*)", re.MULTILINE
)
# What the gateway to Java says before the error itself.
_CALL: Final = re.compile(r"\AAn error occurred while calling .*\n: ")


def reason(error: Exception) -> str:
    """One line: ours, or what Python said, or the first of Spark's."""
    told = _CALL.sub("", str(error))
    found = _OURS.findall(told) or _THEIRS.findall(told)
    return str(found[-1]).strip() if found else told.strip().partition("\n")[0]
