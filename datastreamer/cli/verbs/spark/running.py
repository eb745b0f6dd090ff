"""The Spark session of a command, with Spark's log off."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from datastreamer.cli.shared.exit_codes import Failure, cancel_on_signal, raise_if_signalled
from datastreamer.cli.shared.options import text_option

_MASTERS = re.compile(r"local(-cluster)?(\[[\d*, ]+\])?|(spark|k8s)://.+|yarn")


def _read_master(value: str) -> str:
    if _MASTERS.fullmatch(value) is None:
        raise typer.BadParameter(
            f"it is local[2], local[*], spark://HOST:7077, k8s://URL or yarn, not {value!r}"
        )
    return value


MasterOption = Annotated[
    str, text_option("URL", "Spark master: local[2], spark://HOST:7077.", parser=_read_master)
]

_QUIETLY = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",
    "spark.sql.session.timeZone": "UTC",
}


@contextlib.contextmanager
def spark_session(master: str, settings: Mapping[str, str] | None = None) -> Iterator[Any]:
    """A session, whose errors become one line. Raises `ExtraMissing` and `UsageError` if Spark or
    Java is missing."""
    from py4j.protocol import Py4JError

    # It logs each connection that it closes, and a stack for each that a signal interrupts, some of
    # it through the root logger.
    logging.getLogger("py4j").propagate = False
    logging.getLogger().addFilter(_is_not_of_py4j)
    from datastreamer.spark import session
    from datastreamer.spark.failures import PySparkException, reason

    try:
        spark = session(master, "datastreamer", {**_QUIETLY, **(settings or {})})
    except (PySparkException, Py4JError) as error:
        raise Failure(f"Spark failed to start with --master {master}: {reason(error)}") from error

    def cancel() -> None:
        # A signal may have ended Java, too, or the session is being stopped.
        with contextlib.suppress(OSError, Py4JError, AttributeError):
            spark.sparkContext.cancelAllJobs()

    # Spark's own handler calls Java over the connection on which the interrupted call waits.
    cancel_on_signal(cancel)
    try:
        yield spark
    except (PySparkException, Py4JError) as error:
        raise_if_signalled()
        raise Failure(reason(error)) from error
    finally:
        # A signal may have ended Java, too.
        with contextlib.suppress(OSError, Py4JError):
            spark.stop()


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"
