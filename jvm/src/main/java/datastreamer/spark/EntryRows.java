package datastreamer.spark;

import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.vectorized.ColumnVector;

/** The table of entries: its columns read the bytes of the page. */
final class EntryRows implements Rows {
  private Page page;
  private int from;

  @Override
  public int take(Page page, int from, int to) {
    this.page = page;
    this.from = from;
    return to - from;
  }

  @Override
  public ColumnVector column(String name) {
    return switch (name) {
      case "number" -> new Column(DataTypes.LongType) {
        @Override
        public long getLong(int row) {
          return page.first + from + row;
        }
      };
      case "type" -> new Column(DataTypes.LongType) {
        @Override
        public long getLong(int row) {
          return BigEndian.u32(page.bytes, page.offsets[from + row] + Format.TYPE_AT)
              & 0xFFFFFFFFL;
        }
      };
      case "data" -> new Column(DataTypes.BinaryType) {
        @Override
        public byte[] getBinary(int row) {
          return page.data(from + row);
        }
      };
      default -> null;
    };
  }
}
