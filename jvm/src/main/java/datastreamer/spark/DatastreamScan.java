package datastreamer.spark;

import java.util.OptionalLong;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.types.StructType;

/** A planned scan of files. */
final class DatastreamScan implements Scan, Batch, SupportsReportStatistics {
  private final DatastreamTable table;
  private final StructType columns;
  private final NumberFilters filters;
  private final long limit;

  /** Made when it is first needed: a streaming query needs none. */
  private Plan plan;

  private boolean follows;

  DatastreamScan(DatastreamTable table, StructType columns, NumberFilters filters, long limit) {
    this.table = table;
    this.columns = columns;
    this.filters = filters;
    this.limit = limit;
  }

  private synchronized Plan plan() {
    if (plan == null) {
      plan = table.plan(columns, filters.limits);
    }
    return plan;
  }

  @Override
  public StructType readSchema() {
    return columns;
  }

  @Override
  public String description() {
    return "datastream (native) " + filters.filters;
  }

  @Override
  public CustomMetric[] supportedCustomMetrics() {
    return new CustomMetric[] {new PythonPartsMetric()};
  }

  @Override
  public Batch toBatch() {
    return this;
  }

  @Override
  public MicroBatchStream toMicroBatchStream(String checkpoint) {
    follows = true;
    return table.follow(columns);
  }

  @Override
  public Statistics estimateStatistics() {
    if (follows || table.startsAtEnd()) {
      // Of a stream it is not known, and a batch would be planned to say so.
      return new Size(OptionalLong.empty(), OptionalLong.empty());
    }
    return new Size(plan().bytes, plan().rows);
  }

  @Override
  public InputPartition[] planInputPartitions() {
    return plan().groups();
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    Plan plan = plan();
    return new PartReaderFactory(
        ScanContext.inDriver(columns, plan.reader, plan.where, limit));
  }

  private record Size(OptionalLong sizeInBytes, OptionalLong numRows) implements Statistics {}
}
