package datastreamer.spark;

/**
 * Where the fields of a message are, for all messages that differ from it only in their values.
 *
 * <p>Events of one kind are written one after the other by the same program, so that most of them
 * have their fields at the same places. Such a message is found by comparing some words: its tags,
 * its sizes, and which bytes end a number.
 */
final class MessageShape {
  /** The shapes of the last messages, by the low bits of their size. */
  static final class Cache {
    // Making a shape costs more than decoding a message.
    private static final int MISSES = 16;

    private final MessageShape[] shapes = new MessageShape[64];
    private final int[] misses = new int[shapes.length];

    /** The shape of the message from `start` to `end`; null if it is not known. */
    MessageShape find(byte[] bytes, int start, int end) {
      MessageShape shape = shapes[end - start & shapes.length - 1];
      return shape != null && shape.fits(bytes, start, end - start) ? shape : null;
    }

    /** Remember the shape of a message that was not found, and is a valid one. */
    void learn(EventTable table, byte[] bytes, int start, int end) {
      int slot = end - start & shapes.length - 1;
      if (++misses[slot] == MISSES) {
        misses[slot] = 0;
        shapes[slot] = of(table, bytes, start, end - start);
      }
    }
  }

  private static final int LONGEST_NUMBER = 9;

  private final EventTable table;
  private final int size;

  /** Where words are compared, which bits of them, and with what. */
  private int[] places = new int[0];
  private long[] masks = new long[0];
  private long[] expected = new long[0];

  /** By field: where its value is, and its size; both zero if it is missing. */
  private final int[] at;
  private final int[] sizes;

  private MessageShape(EventTable table, int size) {
    this.table = table;
    this.size = size;
    at = new int[table.fields()];
    sizes = new int[table.fields()];
  }

  /** The shape of a valid message; null for those with rare fields, which differ more. */
  private static MessageShape of(EventTable table, byte[] bytes, int start, int size) {
    if (size < Long.BYTES) {
      return null;
    }
    MessageShape shape = new MessageShape(table, size);
    byte[] mask = new byte[size];
    for (int next = 0; next < size; ) {
      int tag = bytes[start + next];
      int field = (tag >> 3) - 1;
      if (tag < 8 || field >= table.fields() || table.kinds[field] == EventTable.DEBUG) {
        return null;
      }
      mask[next++] = -1;
      boolean isNumber = table.kinds[field] < EventTable.BYTES;
      int first = next;
      do {
        mask[next] = (byte) (isNumber ? 0x80 : 0xFF);
      } while (bytes[start + next++] < 0);
      if (next - first > LONGEST_NUMBER) {
        // Only such a number can be above those of a signed column.
        return null;
      }
      shape.at[field] = isNumber ? first : next;
      shape.sizes[field] =
          isNumber ? next - first : (int) number(bytes, start + first, next - first);
      next += isNumber ? 0 : shape.sizes[field];
    }
    shape.compare(mask, bytes, start);
    return shape;
  }

  private void compare(byte[] mask, byte[] bytes, int start) {
    int words = (size + Long.BYTES - 1) / Long.BYTES;
    int[] places = new int[words];
    int count = 0;
    for (int i = 0; i < words; i++) {
      int place = Math.min(i * Long.BYTES, size - Long.BYTES);
      if (BigEndian.u64(mask, place) != 0) {
        places[count++] = place;
      }
    }
    this.places = java.util.Arrays.copyOf(places, count);
    masks = new long[count];
    expected = new long[count];
    for (int i = 0; i < count; i++) {
      masks[i] = BigEndian.u64(mask, places[i]);
      expected[i] = BigEndian.u64(bytes, start + places[i]) & masks[i];
    }
  }

  private boolean fits(byte[] bytes, int start, int size) {
    if (size != this.size) {
      return false;
    }
    for (int i = 0; i < places.length; i++) {
      if ((BigEndian.u64(bytes, start + places[i]) & masks[i]) != expected[i]) {
        return false;
      }
    }
    return true;
  }

  /** Put the value of a field of the message that begins at `start` into a cell. */
  void read(byte[] bytes, int start, int field, Cells cells) {
    int place = start + at[field];
    if (table.kinds[field] < EventTable.BYTES) {
      cells.number[field] = number(bytes, place, sizes[field]);
    } else {
      cells.at[field] = place;
      cells.number[field] = sizes[field];
      cells.there[field] = false;
    }
  }

  private static long number(byte[] bytes, int at, int size) {
    long value = 0;
    for (int i = 0; i < size; i++) {
      value |= (bytes[at + i] & 0x7FL) << 7 * i;
    }
    return value;
  }
}
