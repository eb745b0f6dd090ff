"""A session of Spark for a command: started quietly, stopped in the end.

Owns what Spark's failures become: the line that our own code said, where it was ours.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from datastreamer.cli.outcome import Failure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MasterOption = Annotated[
    str,
    typer.Option("--master", metavar="URL", help="Where Spark runs: local[2], spark://HOST:7077."),
]

_OURS = re.compile(r"datastreamer\.errors\.\w+: (.+)")


@contextlib.contextmanager
def spark_session(master: str) -> Iterator[SparkSession]:
    """A session; what fails in it is told in a line. Raises `ExtraMissing` and `UsageError`
    where there is no Spark or no Java."""
    from datastreamer.spark import session

    made = session(
        master,
        "datastreamer",
        {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "OFF",
            "spark.sql.session.timeZone": "UTC",
        },
    )
    from pyspark.errors import PySparkException

    try:
        yield made
    except PySparkException as error:
        raise Failure(reason(str(error))) from error
    finally:
        made.stop()


def reason(told: str) -> str:
    """What is behind an error of Spark's: our own line, or its first."""
    ours = _OURS.findall(told)
    return ours[-1].strip() if ours else told.strip().partition("\n")[0]
