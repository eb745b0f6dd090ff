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

  /** By row: the shape that says where its values are; null if the columns keep them. */
  private MessageShape[] shapeOf = new MessageShape[0];

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
    for (int i = from; i < to; i++) {
      if (types[i] == type) {
        if (rows == entries.length) {
          grow(Math.max(1024, 2 * rows));
        }
        int start = page.offsets[i] + Format.HEAD_SIZE;
        int end = page.offsets[i + 1];
        MessageShape shape = fixed == null ? shapes.find(bytes, start, end) : null;
        if (shape == null) {
          decode(bytes, start, end, rows);
        }
        entries[rows] = i;
        starts[rows] = start;
        // To compare costs less than to tell the garbage collector of it.
        if (shapeOf[rows] != shape) {
          shapeOf[rows] = shape;
        }
        rows++;
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

  private void grow(int rows) {
    entries = Arrays.copyOf(entries, rows);
    starts = Arrays.copyOf(starts, rows);
    shapeOf = Arrays.copyOf(shapeOf, rows);
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
    values[count] = new Values(column, nullable);
    return values[count];
  }

  /** The values of one column. */
  private final class Values extends Column {
    private final int field;
    private final int kind;
    private final boolean nullable;

    // Of rows without a shape.
    private long[] number = new long[0];
    private int[] at = new int[0];
    private boolean[] there = new boolean[0];

    /** The last decimal; it is of `lastSmall` if that is not negative. */
    private Decimal lastDecimal;

    private long lastSmall = -1;

    Values(int field, boolean nullable) {
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

    void set(int row, Cells cells) {
      number[row] = cells.number[field];
      if (kind >= EventTable.BYTES) {
        at[row] = cells.at[field];
      }
      if (nullable) {
        there[row] = cells.there[field];
      }
    }

    @Override
    public boolean hasNull() {
      return nullable;
    }

    @Override
    public boolean isNullAt(int row) {
      return nullable && (shapeOf[row] != null || !there[row]);
    }

    private long number(int row) {
      MessageShape shape = shapeOf[row];
      return shape == null ? number[row] : shape.number(page.bytes, starts[row], field);
    }

    @Override
    public long getLong(int row) {
      return kind == EventTable.U32 ? number(row) & 0xFFFFFFFFL : number(row);
    }

    @Override
    public int getInt(int row) {
      return (int) number(row);
    }

    @Override
    public Decimal getDecimal(int row, int precision, int scale) {
      byte[] wei = kind == EventTable.WEI ? getBinary(row) : null;
      long small = wei == null ? number(row) : wei.length == 0 ? 0 : -1;
      // Most chains have one limit for all blocks, and many no fee.
      if (small < 0 || small != lastSmall || lastDecimal.precision() != precision) {
        BigInteger value =
            small >= 0
                ? BigInteger.valueOf(small)
                : wei == null
                    ? new BigInteger(Long.toUnsignedString(small))
                    : new BigInteger(1, wei);
        lastSmall = small;
        lastDecimal =
            Decimal.apply(new scala.math.BigDecimal(new BigDecimal(value)), precision, scale);
      }
      return lastDecimal;
    }

    @Override
    public boolean getBoolean(int row) {
      return number(row) != 0;
    }

    @Override
    public byte[] getBinary(int row) {
      MessageShape shape = shapeOf[row];
      int size = shape == null ? (int) number[row] : shape.size(field);
      if (size == 0) {
        return NOTHING;
      }
      int from = shape == null ? at[row] : starts[row] + shape.at(field);
      return Arrays.copyOfRange(page.bytes, from, from + size);
    }

    @Override
    public UTF8String getUTF8String(int row) {
      return UTF8String.fromBytes(getBinary(row));
    }
  }
}
