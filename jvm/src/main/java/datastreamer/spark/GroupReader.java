package datastreamer.spark;

import java.io.IOException;
import java.util.Iterator;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/** The rows of a group of parts. */
final class GroupReader implements PartitionReader<ColumnarBatch> {
  private final ScanContext context;
  private final Iterator<Part> left;
  private PartReader reader;
  private long returned;
  private int pythonParts;

  GroupReader(ScanContext context, PartGroup group) {
    this.context = context;
    left = group.parts.iterator();
  }

  @Override
  public boolean next() throws IOException {
    while (returned < context.limit()) {
      if (reader != null && reader.next()) {
        returned += reader.get().numRows();
        return true;
      }
      close();
      if (!left.hasNext()) {
        return false;
      }
      reader = new PartReader(context, left.next());
    }
    return false;
  }

  @Override
  public ColumnarBatch get() {
    return reader.get();
  }

  @Override
  public CustomTaskMetric[] currentMetricsValues() {
    int now = pythonParts + (reader != null && reader.isPython() ? 1 : 0);
    return new CustomTaskMetric[] {PythonPartsMetric.of(now)};
  }

  @Override
  public void close() throws IOException {
    if (reader != null) {
      pythonParts += reader.isPython() ? 1 : 0;
      reader.close();
      reader = null;
    }
  }
}
