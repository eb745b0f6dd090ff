"""A session of Spark for a command: started quietly, stopped in the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from datastreamer.cli.outcome import Failure

MasterOption = Annotated[
    str,
    typer.Option("--master", metavar="URL", help="Where Spark runs: local[2], spark://HOST:7077."),
]

_QUIETLY = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",
    "spark.sql.session.timeZone": "UTC",
}


@contextlib.contextmanager
def spark_session(master: str) -> Iterator[Any]:
    """A session; what fails in it is told in a line. Raises `ExtraMissing` and `UsageError`
    where there is no Spark or no Java."""
    from datastreamer.spark import session
    from datastreamer.spark.failures import PySparkException, reason

    spark = session(master, "datastreamer", _QUIETLY)
    try:
        yield spark
    except PySparkException as error:
        raise Failure(reason(error)) from error
    finally:
        spark.stop()
