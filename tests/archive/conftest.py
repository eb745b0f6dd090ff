"""Files whose first pages are in an archive alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.archive.evicting import made, marked_copy

FLOOR = 6


@pytest.fixture
def twin(tmp_path: Path) -> Path:
    """The same stream, with all its pages."""
    return made(tmp_path / "twin" / "s.bin")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "archive").as_uri()


@pytest.fixture
def marked(twin: Path, tmp_path: Path, url: str) -> Path:
    return marked_copy(twin, tmp_path / "marked" / "s.bin", url, 3, FLOOR)
