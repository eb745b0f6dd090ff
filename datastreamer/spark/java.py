"""Finds the Java that Spark will run on.

Without this check, Spark reports a missing Java as a stack trace of its gateway.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Final

from datastreamer.errors import UsageError

OLDEST: Final = 17
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')


def find_java() -> str:
    """The path of the Java that Spark will start: from JAVA_HOME, else from PATH.

    Raises `UsageError` if there is none or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    path = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if path is None or not os.access(path, os.X_OK):
        where = f"JAVA_HOME is {home}, and there is no {path}" if home else "there is none on PATH"
        raise _missing(where)
    try:
        result = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as error:
        raise _missing(f"{path} does not run: {error.strerror or error}") from None
    found = _VERSION.search(result.stderr + result.stdout)
    if found is None:
        raise _missing(f"{path} does not report its version")
    if int(found[1]) < OLDEST:
        raise _missing(f"{path} is Java {found[1]}")
    return path


def _missing(where: str) -> UsageError:
    return UsageError(
        f"Spark needs Java 17 or 21, but {where}: install one (such as openjdk-17-jre-headless) or "
        "set JAVA_HOME"
    )
