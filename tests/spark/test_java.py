"""A missing Java is an error of one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastreamer.errors import UsageError
from datastreamer.spark import find_java, session


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the test's own Java, which JAVA_HOME names."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin" / "java"


def write(java: Path, version: str) -> None:
    java.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
    java.chmod(0o755)


@pytest.mark.parametrize("version", ["17.0.15", "21", "21.0.2-ea"])
def test_one_that_does(java: Path, version: str) -> None:
    write(java, f'openjdk version "{version}" 2025-04-15')
    assert find_java() == str(java)


@pytest.mark.parametrize(
    "version, message",
    [
        ('java version "1.8.0_402"', "is Java 8"),
        ('openjdk version "11.0.2"', "is Java 11"),
        ("what?", "does not report its version"),
    ],
)
def test_one_that_does_not(java: Path, version: str, message: str) -> None:
    write(java, version)
    with pytest.raises(
        UsageError, match=rf"^Spark needs Java 17 or 21, but {java} {message}: inst"
    ):
        find_java()


def test_none(java: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"JAVA_HOME is {tmp_path}, and there is no {java}") as it:
        session("local[1]")
    assert "\n" not in str(it.value)
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is none on PATH: install one"):
        find_java()
