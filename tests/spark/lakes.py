"""Delta's and Iceberg's packages for Spark, which `make test-lakes` has Spark download."""

from __future__ import annotations

from typing import Final

from datastreamer.spark import session
from datastreamer.spark.versions import VERSION
from tests.spark.settings import ROOT, SETTINGS

SPARK: Final = ".".join(map(str, VERSION))
IVY: Final = ROOT / "build" / "ivy"
DELTA: Final = f"io.delta:delta-spark_{SPARK}_2.13:4.4.0"
ICEBERG: Final = (
    f"org.apache.iceberg:iceberg-spark-runtime-{SPARK}_2.13:"
    f"{'1.11.0' if VERSION < (4, 1) else '1.12.0'}"
)
NEWEST: Final = {DELTA: (4, 2), ICEBERG: (4, 1)}


def settings(package: str) -> dict[str, str]:
    return {**SETTINGS, "spark.jars.packages": package, "spark.jars.ivy": str(IVY)}


def missing(package: str) -> str:
    """Why the package cannot be used; empty if it can."""
    group, name, version = package.split(":")
    if NEWEST[package] < VERSION:
        return f"there is no {name}"
    if not (IVY / "jars" / f"{group}_{name}-{version}.jar").exists():
        return f"{package} was not downloaded: make test-lakes SPARK={SPARK}"
    return ""


if __name__ == "__main__":
    found = [package for package, newest in NEWEST.items() if newest >= VERSION]
    session("local[1]", "download", settings(",".join(found))).stop()
