package datastreamer.spark;

import java.util.Arrays;
import org.apache.spark.sql.types.DataTypes;
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

  /** The wanted columns of the table, and their values. */
  private int[] wanted = new int[0];
  private Values[] values = new Values[0];

  private long[] numbers = new long[0];
  private byte[] bytes;

  EventRows(EventTable table) {
    this.table = table;
    cells = new Cells(table.kinds.length);
    fixed = table.layouts == null ? null : new FixedDecoder(table, cells);
    messages = table.layouts == null ? new MessageDecoder(table, cells) : null;
  }

  @Override
  public int take(Page page, int from, int to) throws Doubt {
    bytes = page.bytes;
    int rows = 0;
    if (table.type == null) {
      return rows;
    }
    long type = table.type;
    for (int i = from; i < to; i++) {
      int head = page.offsets[i];
      if ((BigEndian.u32(bytes, head + Format.TYPE_AT) & 0xFFFFFFFFL) == type) {
        decode(head + Format.HEAD_SIZE, page.offsets[i + 1]);
        if (rows == numbers.length) {
          grow(Math.max(1024, 2 * rows));
        }
        numbers[rows] = page.first + i;
        for (int j = 0; j < wanted.length; j++) {
          values[j].set(rows, cells, wanted[j]);
        }
        rows++;
      }
    }
    return rows;
  }

  /** Put the values of the wanted columns into the cells. */
  private void decode(int start, int end) throws Doubt {
    int fields = table.fields();
    MessageShape shape = fixed == null ? shapes.find(bytes, start, end) : null;
    if (shape != null) {
      for (int column : wanted) {
        if (column < fields) {
          shape.read(bytes, start, column, cells);
        }
      }
    } else {
      cells.clear();
      if (fixed != null) {
        fixed.decode(bytes, start, end);
      } else {
        messages.decode(bytes, start, end);
        shapes.learn(table, bytes, start, end);
      }
    }
    if (fields < table.kinds.length) {
      cells.put(fields, start, end - start);
    }
  }

  private void grow(int rows) {
    numbers = Arrays.copyOf(numbers, rows);
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
    int count = wanted.length;
    wanted = Arrays.copyOf(wanted, count + 1);
    wanted[count] = column;
    values = Arrays.copyOf(values, count + 1);
    values[count] = new Values(kind, nullable);
    return values[count];
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
