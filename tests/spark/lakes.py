"""Where packages of table formats are on this machine: `make test-lakes` downloads them."""

from __future__ import annotations

from pathlib import Path

from datastreamer.spark.versions import VERSION

SPARK = ".".join(map(str, VERSION))
DELTA = f"io.delta:delta-spark_{SPARK}_2.13:4.4.0"
ICEBERG = (
    f"org.apache.iceberg:iceberg-spark-runtime-{SPARK}_2.13:"
    f"{'1.11.0' if VERSION < (4, 1) else '1.12.0'}"
)
NEWEST = {DELTA: (4, 2), ICEBERG: (4, 1)}


def missing(package: str) -> str:
    """Why the package cannot be used; empty if it can."""
    group, name, version = package.split(":")
    if NEWEST[package] < VERSION:
        return f"there is no {name}"
    own = Path.home() / ".m2" / "repository" / group.replace(".", "/") / name / version
    if not (own / f"{name}-{version}.jar").exists():
        return f"{package} is not in ~/.m2: make test-lakes SPARK={SPARK}"
    return ""


if __name__ == "__main__":
    print(*(package for package, newest in NEWEST.items() if newest >= VERSION))
