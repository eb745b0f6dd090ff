package org.apache.spark.sql.connector.read.streaming;

import org.apache.spark.sql.connector.read.InputPartition;

/** As Spark has it from 4.1 on. It is compiled with, and not in the jar. */
public interface SupportsRealTimeMode {
  InputPartition[] planInputPartitions(Offset start);

  Offset mergeOffsets(PartitionOffset[] offsets);

  default void prepareForRealTimeMode() {}
}
