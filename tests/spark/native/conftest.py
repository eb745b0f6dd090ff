"""The session with the reader in Java, and what it read."""

from __future__ import annotations

from typing import Any

import pytest

from datastreamer.spark import native_jar


@pytest.fixture(scope="session")
def native(spark: Any) -> Any:
    """The session; skips if the jar was not built."""
    if native_jar() is None:
        pytest.skip("the reader in Java was not built: make jar")
    return spark
