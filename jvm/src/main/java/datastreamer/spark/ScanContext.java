package datastreamer.spark;

import java.io.Serializable;
import org.apache.spark.sql.types.StructType;

/**
 * What all parts of a scan have in common.
 *
 * @param python the interpreter that reads such parts, which the driver chose
 * @param columns the columns that Spark wants
 * @param reader a pickle of the reader in Python, for parts that Java does not read
 * @param where which entries are rows of the table of entries; null: all
 * @param limit the most rows that Spark wants of a part
 */
record ScanContext(
    String python, StructType columns, String reader, Selection where, long limit)
    implements Serializable {
  static ScanContext inDriver(StructType columns, String reader, Selection where, long limit) {
    return new ScanContext(PythonProcess.python(), columns, reader, where, limit);
  }
}
