package datastreamer.spark;

import java.util.List;
import org.apache.spark.sql.connector.catalog.MetadataColumn;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.unsafe.types.UTF8String;

/** A column that says where a row's entry is; a query has it if it names it. */
record PlaceColumn(String name, DataType dataType, String comment) implements MetadataColumn {
  static final PlaceColumn[] ALL = {
    new PlaceColumn("_file", DataTypes.StringType, "the file that the row's entry is in"),
    new PlaceColumn("_page", DataTypes.LongType, "the page of the file, from 0"),
    new PlaceColumn("_offset", DataTypes.LongType, "the byte of the file where the entry begins")
  };

  /** These columns behind others, where they are not among them. */
  static StructType addedTo(StructType columns) {
    StructType all = columns;
    for (PlaceColumn column : ALL) {
      if (!List.of(columns.fieldNames()).contains(column.name)) {
        all = all.add(column.name, column.dataType);
      }
    }
    return all;
  }

  /** The values of the column of this name; null if it is none of these. */
  static ColumnVector of(String name, FileState file, Rows rows) {
    UTF8String path = UTF8String.fromString(file.path);
    return switch (name) {
      case "_file" -> new Column(DataTypes.StringType) {
        @Override
        public UTF8String getUTF8String(int row) {
          return path;
        }
      };
      case "_page" -> new Column(DataTypes.LongType) {
        @Override
        public long getLong(int row) {
          return rows.page().number;
        }
      };
      case "_offset" -> new Column(DataTypes.LongType) {
        @Override
        public long getLong(int row) {
          Page page = rows.page();
          return Format.pageStart(page.number) + page.offsets[rows.entry(row)];
        }
      };
      default -> null;
    };
  }
}
