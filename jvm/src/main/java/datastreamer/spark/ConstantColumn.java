package datastreamer.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;

/** A column whose rows all have the same number, or are all null. */
final class ConstantColumn extends Column {
  private final boolean isNull;
  private final long value;

  private ConstantColumn(DataType type, boolean isNull, long value) {
    super(type);
    this.isNull = isNull;
    this.value = value;
  }

  static ConstantColumn of(long value) {
    return new ConstantColumn(DataTypes.LongType, false, value);
  }

  static ConstantColumn nulls(DataType type) {
    return new ConstantColumn(type, true, 0);
  }

  @Override
  public boolean hasNull() {
    return isNull;
  }

  @Override
  public int numNulls() {
    // Spark asks only whether there are any.
    return isNull ? 1 : 0;
  }

  @Override
  public boolean isNullAt(int row) {
    return isNull;
  }

  @Override
  public long getLong(int row) {
    return value;
  }
}
