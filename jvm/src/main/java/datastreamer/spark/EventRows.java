package datastreamer.spark;

import java.util.Arrays;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.unsafe.types.UTF8String;

/** A table of events: decodes all events of a page, and keeps the values of the wanted columns. */
final class EventRows implements Rows {
  private static final byte[] NOTHING = new byte[0];

  private final EventTable table;
  private final Cells cells;
  private final FixedDecoder fixed;
  private final MessageDecoder messages;

  /** By column of the table; null for those that nobody asked for. */
  private final Values[] values;

  private long[] numbers = new long[0];
  private byte[] bytes;

  EventRows(EventTable table) {
    this.table = table;
    cells = new Cells(table.kinds.length);
    values = new Values[table.kinds.length];
    fixed = table.layouts == null ? null : new FixedDecoder(table, cells);
    messages = table.layouts == null ? new MessageDecoder(table, cells) : null;
  }

  @Override
  public int take(Page page, int from, int to) throws Doubt {
    bytes = page.bytes;
    int rows = 0;
    for (int i = from; i < to && table.type != null; i++) {
      int head = page.offsets[i];
      if ((BigEndian.u32(bytes, head + Format.TYPE_AT) & 0xFFFFFFFFL) == table.type) {
        decode(head + Format.HEAD_SIZE, page.offsets[i + 1]);
        if (rows == numbers.length) {
          grow(Math.max(1024, 2 * rows));
        }
        numbers[rows] = page.first + i;
        for (int column = 0; column < values.length; column++) {
          if (values[column] != null) {
            values[column].set(rows, cells, column);
          }
        }
        rows++;
      }
    }
    return rows;
  }

  private void decode(int start, int end) throws Doubt {
    cells.clear();
    if (fixed != null) {
      fixed.decode(bytes, start, end);
    } else {
      messages.decode(bytes, start, end);
    }
    if (table.fields() < table.kinds.length) {
      cells.put(table.fields(), start, end - start);
    }
  }

  private void grow(int rows) {
    numbers = Arrays.copyOf(numbers, rows);
    for (Values each : values) {
      if (each != null) {
        each.grow(rows);
      }
    }
  }

  @Override
  public ColumnVector column(String name) {
    if (name.equals("entry_number")) {
      return new Column(DataTypes.LongType) {
        @Override
        public long getLong(int row) {
          return numbers[row];
        }
      };
    }
    int column = Arrays.asList(table.names).indexOf(name);
    if (column < 0) {
      return null;
    }
    int kind = table.kinds[column];
    // A field that one generation of a layout has, another lacks.
    boolean nullable =
        kind == EventTable.DEBUG || (fixed != null && kind != EventTable.DATA);
    values[column] = new Values(kind, nullable);
    return values[column];
  }

  /** The values of one column. */
  private final class Values extends Column {
    private final int kind;
    private final boolean nullable;
    private long[] number = new long[0];
    private int[] at = new int[0];
    private boolean[] there = new boolean[0];

    Values(int kind, boolean nullable) {
      super(
          switch (kind) {
            case EventTable.U64, EventTable.U32 -> DataTypes.LongType;
            case EventTable.BOOL -> DataTypes.BooleanType;
            case EventTable.ENUM -> DataTypes.IntegerType;
            case EventTable.DEBUG -> DataTypes.StringType;
            default -> DataTypes.BinaryType;
          });
      this.kind = kind;
      this.nullable = nullable;
    }

    void grow(int rows) {
      number = Arrays.copyOf(number, rows);
      if (kind >= EventTable.BYTES) {
        at = Arrays.copyOf(at, rows);
      }
      if (nullable) {
        there = Arrays.copyOf(there, rows);
      }
    }

    void set(int row, Cells cells, int column) {
      number[row] = cells.number[column];
      if (kind >= EventTable.BYTES) {
        at[row] = cells.at[column];
      }
      if (nullable) {
        there[row] = cells.there[column];
      }
    }

    @Override
    public boolean hasNull() {
      return nullable;
    }

    @Override
    public boolean isNullAt(int row) {
      return nullable && !there[row];
    }

    @Override
    public long getLong(int row) {
      return kind == EventTable.U32 ? number[row] & 0xFFFFFFFFL : number[row];
    }

    @Override
    public int getInt(int row) {
      return (int) number[row];
    }

    @Override
    public boolean getBoolean(int row) {
      return number[row] != 0;
    }

    @Override
    public byte[] getBinary(int row) {
      int size = (int) number[row];
      return size == 0 ? NOTHING : Arrays.copyOfRange(bytes, at[row], at[row] + size);
    }

    @Override
    public UTF8String getUTF8String(int row) {
      return UTF8String.fromBytes(getBinary(row));
    }
  }
}
