"""Where the reader in Java is: a jar beside this module, if the build made one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_JAR: Final = Path(__file__).with_name("datastreamer-spark.jar")


def native_jar() -> str | None:
    """The path of the jar with the reader in Java, for Spark's setting `spark.jars` (`--jars`).

    None if the package was built without it.
    """
    return str(_JAR) if _JAR.is_file() else None
