package datastreamer.spark;

import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.vectorized.ColumnVector;

/** The table of entries: its columns read the bytes of the page. */
final class EntryRows implements Rows {
  private final Selection selection;
  private Page page;
  private int from;

  /** By row, with a selection: the index of its entry in the page. */
  private int[] entries = new int[0];

  /** Rows of the selected entries; of all if `selection` is null. */
  EntryRows(Selection selection) {
    this.selection = selection;
  }

  @Override
  public int take(Page page, int from, int to) {
    this.page = page;
    this.from = from;
    if (selection == null) {
      return to - from;
    }
    if (entries.length < to - from) {
      entries = new int[page.offsets.length];
    }
    int rows = 0;
    for (int i = from; i < to; i++) {
      if (selection.has(page.bytes, page.offsets[i], page.offsets[i + 1])) {
        entries[rows++] = i;
      }
    }
    return rows;
  }

  @Override
  public Page page() {
    return page;
  }

  @Override
  public int entry(int row) {
    return selection == null ? from + row : entries[row];
  }

  @Override
  public ColumnVector column(String name) {
    return switch (name) {
      case "number" -> new Column(DataTypes.LongType) {
        @Override
        public long getLong(int row) {
          return page.first + entry(row);
        }
      };
      case "type" -> new Column(DataTypes.LongType) {
        @Override
        public long getLong(int row) {
          return page.types[entry(row)] & 0xFFFFFFFFL;
        }
      };
      case "data" -> new Column(DataTypes.BinaryType) {
        @Override
        public byte[] getBinary(int row) {
          return page.data(entry(row));
        }
      };
      default -> null;
    };
  }
}
