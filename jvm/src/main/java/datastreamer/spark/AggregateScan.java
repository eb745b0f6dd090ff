package datastreamer.spark;

import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.read.LocalScan;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;

/** The values of aggregates that are known without a task: a number each, or null. */
final class AggregateScan implements LocalScan {
  private final StructType columns;
  private final Object[] values;

  AggregateScan(String[] names, Object[] values) {
    StructType made = new StructType();
    for (String name : names) {
      made = made.add(name, DataTypes.LongType);
    }
    columns = made;
    this.values = values;
  }

  @Override
  public StructType readSchema() {
    return columns;
  }

  @Override
  public InternalRow[] rows() {
    return new InternalRow[] {new GenericInternalRow(values)};
  }
}
