"""What Spark's errors are about: the line that our own code said, where it was ours."""

from __future__ import annotations

import re
from typing import Final

from pyspark.errors import PySparkException

__all__ = ["PySparkException", "reason"]

# As Python tells of an exception at the end of a traceback, which Spark quotes.
_OURS: Final = re.compile(r"datastreamer\.errors\.\w+: (.+)")
# What the gateway to Java says before the error itself.
_CALL: Final = re.compile(r"\AAn error occurred while calling .*\n: ")


def reason(error: Exception) -> str:
    """One line: ours, or the first of Spark's."""
    told = _CALL.sub("", str(error))
    ours = _OURS.findall(told)
    return str(ours[-1]).strip() if ours else told.strip().partition("\n")[0]
