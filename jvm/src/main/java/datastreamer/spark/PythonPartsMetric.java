package datastreamer.spark;

import org.apache.spark.sql.connector.metric.CustomSumMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;

/** How many parts of a scan Java left to Python, because it found something wrong. */
public final class PythonPartsMetric extends CustomSumMetric {
  private static final String NAME = "pythonParts";

  /** The value of one task. */
  static CustomTaskMetric of(int parts) {
    return new CustomTaskMetric() {
      @Override
      public String name() {
        return NAME;
      }

      @Override
      public long value() {
        return parts;
      }
    };
  }

  @Override
  public String name() {
    return NAME;
  }

  @Override
  public String description() {
    return "number of parts that Python read";
  }
}
