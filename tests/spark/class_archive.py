"""`python -m tests.spark.class_archive` makes the archive of Spark's classes, once for an
environment: a JVM that maps it starts in two thirds of the time. Without it, and with one of
another Java or Spark, everything works, only more slowly."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pyspark
from pyspark import SparkContext
from pyspark.sql import DataFrame

from datastreamer import DataStream
from datastreamer.errors import UsageError
from datastreamer.reassembly import Producer
from datastreamer.spark import STATE_SETTINGS, find_java, messages, reassemble_stream, session
from tests.spark.settings import CLASS_ARCHIVE, ENVIRONMENT, SETTINGS


def main() -> None:
    try:
        java = find_java()
    except UsageError:
        return
    version = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    jars = Path(pyspark.__file__).parent / "jars"
    wanted = f"{jars} {jars.stat().st_mtime_ns}\n{version}"
    made_of = CLASS_ARCHIVE.with_suffix(".txt")
    if CLASS_ARCHIVE.exists() and made_of.exists() and made_of.read_text() == wanted:
        return
    print("preparing Spark's classes for tests: half a minute", flush=True)
    made = CLASS_ARCHIVE.with_suffix(".new")
    os.environ.update(ENVIRONMENT)
    with TemporaryDirectory() as folder:
        use_spark(Path(folder), f"-XX:ArchiveClassesAtExit={made} -Xlog:cds*=off")
    # A JVM that maps a part of an archive crashes.
    made.replace(CLASS_ARCHIVE)
    made_of.write_text(wanted)


def use_spark(folder: Path, options: str) -> None:
    """Load what most tests load, and end Java."""
    path = folder / "stream.bin"
    with DataStream.create(path, version=1, system_id=1) as stream:
        Producer(stream).publish(b"1" * 32, {b"p" * 33: b"value"})
    settings = {**SETTINGS, **STATE_SETTINGS, "spark.driver.extraJavaOptions": options}
    spark = session("local[2]", "classes", settings)
    spark.sparkContext.setLogLevel("OFF")
    for reader in ("auto", "python"):
        rows = spark.read.format("datastream").option("reader", reader).load(str(path))
        rows.createOrReplaceTempView(reader)
    spark.sql("SELECT type, count(*) FROM auto WHERE number > 0 GROUP BY type").toArrow()
    spark.sql("SELECT a.* FROM auto a JOIN python p USING (number) ORDER BY 1").collect()
    rows.mapInArrow(lambda batches: batches, rows.schema).write.parquet(str(folder / "rows"))
    spark.read.parquet(str(folder / "rows")).toArrow()

    def each(batch: DataFrame, number: int) -> None:
        batch.count()

    streamed = spark.readStream.format("datastream").load(str(path))
    reassembled = reassemble_stream(messages(streamed, "producer")).rows
    for number, frame in enumerate((streamed, reassembled)):
        query = frame.writeStream.foreachBatch(each).trigger(availableNow=True)
        query.option("checkpointLocation", str(folder / str(number))).start().awaitTermination()
    gateway = SparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    main()
