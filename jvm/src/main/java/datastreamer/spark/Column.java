package datastreamer.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.types.UTF8String;

/** A column without nulls; a subclass has the method of its type. */
abstract class Column extends ColumnVector {
  Column(DataType type) {
    super(type);
  }

  private UnsupportedOperationException wrong() {
    return new UnsupportedOperationException("a value of a column of type " + type);
  }

  @Override
  public void close() {}

  @Override
  public boolean hasNull() {
    return false;
  }

  @Override
  public int numNulls() {
    return 0;
  }

  @Override
  public boolean isNullAt(int row) {
    return false;
  }

  @Override
  public boolean getBoolean(int row) {
    throw wrong();
  }

  @Override
  public byte getByte(int row) {
    throw wrong();
  }

  @Override
  public short getShort(int row) {
    throw wrong();
  }

  @Override
  public int getInt(int row) {
    throw wrong();
  }

  @Override
  public long getLong(int row) {
    throw wrong();
  }

  @Override
  public float getFloat(int row) {
    throw wrong();
  }

  @Override
  public double getDouble(int row) {
    throw wrong();
  }

  @Override
  public ColumnarArray getArray(int row) {
    throw wrong();
  }

  @Override
  public ColumnarMap getMap(int row) {
    throw wrong();
  }

  @Override
  public Decimal getDecimal(int row, int precision, int scale) {
    throw wrong();
  }

  @Override
  public UTF8String getUTF8String(int row) {
    throw wrong();
  }

  @Override
  public byte[] getBinary(int row) {
    throw wrong();
  }

  @Override
  public ColumnVector getChild(int ordinal) {
    throw wrong();
  }
}
