"""A session of Spark for a command: started quietly, stopped in the end."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from datastreamer.cli.shared.exit_codes import Failure

_MASTERS = re.compile(r"local(-cluster)?(\[[\d*, ]+\])?|(spark|k8s)://.+|yarn")


def _read_master(value: str) -> str:
    if _MASTERS.fullmatch(value) is None:
        raise typer.BadParameter(
            f"it is local[2], local[*], spark://HOST:7077, k8s://URL or yarn, not {value!r}"
        )
    return value


MasterOption = Annotated[
    str,
    typer.Option(
        "--master",
        parser=_read_master,
        metavar="URL",
        help="Where Spark runs: local[2], spark://HOST:7077.",
    ),
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
    from py4j.protocol import Py4JError

    from datastreamer.spark import session
    from datastreamer.spark.failures import PySparkException, reason

    try:
        spark = session(master, "datastreamer", _QUIETLY)
    except (PySparkException, Py4JError) as error:
        raise Failure(f"Spark does not start with --master {master}: {reason(error)}") from error
    try:
        yield spark
    except PySparkException as error:
        raise Failure(reason(error)) from error
    finally:
        spark.stop()
