package datastreamer.spark;

import java.util.Arrays;
import java.util.OptionalLong;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;

/** A planned scan of files. */
final class DatastreamScan implements Scan, Batch, SupportsReportStatistics {
  private final Plan plan;
  private final ScanContext context;
  private final String described;

  DatastreamScan(Plan plan, ScanContext context, String described) {
    this.plan = plan;
    this.context = context;
    this.described = described;
  }

  @Override
  public StructType readSchema() {
    return context.columns();
  }

  @Override
  public String description() {
    return described;
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
  public Statistics estimateStatistics() {
    boolean isEntries = plan.parts.stream().allMatch(part -> part.file.events == null);
    OptionalLong rows = isEntries ? OptionalLong.of(plan.entries()) : OptionalLong.empty();
    // Only columns of bytes can have most of the bytes of a file.
    boolean isNarrow =
        isEntries
            && Arrays.stream(context.columns().fields())
                .noneMatch(field -> field.dataType().equals(DataTypes.BinaryType));
    long size = isNarrow ? 8L * context.columns().length() * plan.entries() : plan.size();
    return new Statistics() {
      @Override
      public OptionalLong sizeInBytes() {
        return OptionalLong.of(size);
      }

      @Override
      public OptionalLong numRows() {
        return rows;
      }
    };
  }

  @Override
  public InputPartition[] planInputPartitions() {
    return plan.parts.toArray(new InputPartition[0]);
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new PartReaderFactory(context);
  }
}
