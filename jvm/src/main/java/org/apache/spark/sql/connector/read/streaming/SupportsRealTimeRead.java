package org.apache.spark.sql.connector.read.streaming;

import java.io.IOException;
import org.apache.spark.sql.connector.read.PartitionReader;

/** As Spark has it from 4.1 on. It is compiled with, and not in the jar. */
public interface SupportsRealTimeRead<T> extends PartitionReader<T> {
  class RecordStatus {
    public static RecordStatus newStatusWithoutArrivalTime(boolean hasRecord) {
      return new RecordStatus();
    }
  }

  PartitionOffset getOffset();

  /** Up to Spark 4.2. */
  RecordStatus nextWithTimeout(Long timeoutMs) throws IOException;

  /** From Spark 4.3 on: with the time at which the batch started. */
  RecordStatus nextWithTimeout(Long startMs, Long timeoutMs) throws IOException;
}
