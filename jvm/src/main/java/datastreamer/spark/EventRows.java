package datastreamer.spark;

import java.math.BigDecimal;
import java.math.BigInteger;
import java.util.Arrays;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.unsafe.types.UTF8String;

/** A table of events: checks all events of a page, and keeps the values of the wanted columns. */
final class EventRows implements Rows {
  private static final byte[] NOTHING = new byte[0];

  // Most rows that the columns take at a time, one column after the other: their bytes stay in the
  // core's first cache meanwhile.
  private static final int RUN = 64;

  private final EventTable table;
  private final Cells cells;
  private final FixedDecoder fixed;
  private final MessageDecoder messages;
  private final MessageShape.Cache shapes = new MessageShape.Cache();

  /** The wanted columns that are fields of the events. */
  private Values[] values = new Values[0];

  private Page page;

  /** By row: the index of its entry in the page, and where the data of that begin. */
  private int[] entries = new int[0];

  private int[] starts = new int[0];

  EventRows(EventTable table) {
    this.table = table;
    cells = new Cells(table.kinds.length);
    fixed = table.layouts == null ? null : new FixedDecoder(table, cells);
    messages = table.layouts == null ? new MessageDecoder(table, cells) : null;
  }

  @Override
  public int take(Page page, int from, int to) throws Doubt {
    this.page = page;
    int rows = 0;
    if (table.type == null) {
      return rows;
    }
    byte[] bytes = page.bytes;
    int type = (int) (long) table.type;
    int[] types = page.types;
    // Rows from `first` on have the shape `run`, and no values yet.
    MessageShape run = null;
    int first = 0;
    for (int i = from; i < to; i++) {
      if (types[i] == type) {
        if (rows == entries.length) {
          grow(Math.max(1024, 2 * rows));
        }
        int start = page.offsets[i] + Format.HEAD_SIZE;
        int end = page.offsets[i + 1];
        MessageShape shape = fixed == null ? shapes.find(bytes, start, end) : null;
        if (shape != run || rows - first == RUN) {
          set(run, first, rows);
          run = shape;
          first = rows;
        }
        if (shape == null) {
          decode(bytes, start, end, rows);
        }
        entries[rows] = i;
        starts[rows++] = start;
      }
    }
    set(run, first, rows);
    return rows;
  }

  @Override
  public Page page() {
    return page;
  }

  @Override
  public int entry(int row) {
    return entries[row];
  }

  /** Let the wanted columns keep the values of the event of a row. */
  private void decode(byte[] bytes, int start, int end, int row) throws Doubt {
    cells.clear();
    if (fixed != null) {
      fixed.decode(bytes, start, end);
    } else {
      messages.decode(bytes, start, end);
      shapes.learn(table, bytes, start, end);
    }
    for (Values each : values) {
      each.set(row, cells);
    }
  }

  /** Let the wanted columns take the values of rows of a shape; null: they have them. */
  private void set(MessageShape shape, int from, int to) {
    if (shape != null) {
      for (Values each : values) {
        each.set(shape, from, to);
      }
    }
  }

  private void grow(int rows) {
    entries = Arrays.copyOf(entries, rows);
    starts = Arrays.copyOf(starts, rows);
    for (Values each : values) {
      each.grow(rows);
    }
  }

  @Override
  public ColumnVector column(String name) {
    if (name.equals("entry_number")) {
      return new Column(DataTypes.LongType) {
        @Override
        public long getLong(int row) {
          return page.first + entries[row];
        }
      };
    }
    int column = Arrays.asList(table.names).indexOf(name);
    if (column < 0) {
      return null;
    }
    int kind = table.kinds[column];
    if (kind == EventTable.DATA) {
      return new Column(DataTypes.BinaryType) {
        @Override
        public byte[] getBinary(int row) {
          return page.data(entries[row]);
        }
      };
    }
    // A field that one generation of a layout has, another lacks.
    boolean nullable = kind == EventTable.DEBUG || fixed != null;
    int count = values.length;
    values = Arrays.copyOf(values, count + 1);
    values[count] = nullable ? new NullableValues(column) : new Values(column);
    return values[count];
  }

  /**
   * The values of one column.
   *
   * <p>Of Spark's loop over the rows, which calls the methods of all columns, the compiler inlines
   * only so much: so the methods that read a value do little.
   */
  private class Values extends Column {
    final int field;
    private final int kind;
    private final long mask;

    /** By row: the number; of bytes where they begin, in the upper half, and how many they are. */
    long[] value = new long[0];

    /** The last decimal; it is of `lastSmall` if that is not negative. */
    private Decimal lastDecimal;

    private long lastSmall = -1;

    Values(int field) {
      super(
          switch (table.kinds[field]) {
            case EventTable.U64, EventTable.U32 -> DataTypes.LongType;
            case EventTable.FULL_U64 -> DataTypes.createDecimalType(20, 0);
            case EventTable.WEI -> DataTypes.createDecimalType(38, 0);
            case EventTable.BOOL -> DataTypes.BooleanType;
            case EventTable.ENUM -> DataTypes.IntegerType;
            case EventTable.DEBUG -> DataTypes.StringType;
            default -> DataTypes.BinaryType;
          });
      this.field = field;
      kind = table.kinds[field];
      mask = kind == EventTable.U32 ? 0xFFFFFFFFL : -1;
    }

    void grow(int rows) {
      value = Arrays.copyOf(value, rows);
    }

    /** Set the value of a row that has no shape. */
    void set(int row, Cells cells) {
      value[row] =
          kind < EventTable.BYTES
              ? cells.number[field] & mask
              : place(cells.at[field], (int) cells.number[field]);
    }

    /** Set the values of rows of this shape. */
    void set(MessageShape shape, int from, int to) {
      if (kind < EventTable.BYTES) {
        shape.numbers(page.bytes, starts, from, to, field, mask, value);
      } else {
        for (int row = from; row < to; row++) {
          value[row] = place(starts[row] + shape.at(field), shape.size(field));
        }
      }
    }

    private static long place(int at, int size) {
      return (long) at << Integer.SIZE | size;
    }

    @Override
    public long getLong(int row) {
      return value[row];
    }

    @Override
    public int getInt(int row) {
      return (int) value[row];
    }

    @Override
    public Decimal getDecimal(int row, int precision, int scale) {
      byte[] wei = kind == EventTable.WEI ? getBinary(row) : null;
      long small = wei == null ? value[row] : wei.length == 0 ? 0 : -1;
      // Most chains have one limit for all blocks, and many no fee.
      if (small < 0 || small != lastSmall || lastDecimal.precision() != precision) {
        BigInteger exact =
            small >= 0
                ? BigInteger.valueOf(small)
                : wei == null
                    ? new BigInteger(Long.toUnsignedString(small))
                    : new BigInteger(1, wei);
        lastSmall = small;
        lastDecimal =
            Decimal.apply(new scala.math.BigDecimal(new BigDecimal(exact)), precision, scale);
      }
      return lastDecimal;
    }

    @Override
    public boolean getBoolean(int row) {
      return value[row] != 0;
    }

    @Override
    public byte[] getBinary(int row) {
      long place = value[row];
      int size = (int) place;
      if (size == 0) {
        return NOTHING;
      }
      byte[] copy = new byte[size];
      System.arraycopy(page.bytes, (int) (place >>> Integer.SIZE), copy, 0, size);
      return copy;
    }

    @Override
    public UTF8String getUTF8String(int row) {
      return UTF8String.fromBytes(getBinary(row));
    }
  }

  /** The values of a column, of which -1 stands for none. */
  private final class NullableValues extends Values {
    NullableValues(int field) {
      super(field);
    }

    @Override
    void set(int row, Cells cells) {
      super.set(row, cells);
      if (!cells.there[field]) {
        value[row] = -1;
      }
    }

    /** A message of a shape lacks what may be null. */
    @Override
    void set(MessageShape shape, int from, int to) {
      Arrays.fill(value, from, to, -1);
    }

    @Override
    public boolean hasNull() {
      return true;
    }

    @Override
    public boolean isNullAt(int row) {
      return value[row] < 0;
    }
  }
}
