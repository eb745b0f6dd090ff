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

  /** A longer number does not fit into a word, and may be above those of a signed column. */
  private static final int LONGEST_NUMBER = Long.BYTES;

  private final int size;

  /** Where words are compared, which bits of them, and with what. */
  private int[] places = new int[0];
  private long[] masks = new long[0];
  private long[] expected = new long[0];

  /** By field: where its value is, the size of bytes, the bits of a number; zeros if it is missing. */
  private final int[] at;
  private final int[] sizes;
  private final long[] bits;

  private MessageShape(int fields, int size) {
    this.size = size;
    at = new int[fields];
    sizes = new int[fields];
    bits = new long[fields];
  }

  /** The shape of a valid message; null for those with rare fields, which differ more. */
  private static MessageShape of(EventTable table, byte[] bytes, int start, int size) {
    if (size < Long.BYTES) {
      return null;
    }
    MessageShape shape = new MessageShape(table.fields(), size);
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
        return null;
      }
      shape.at[field] = first;
      shape.bits[field] = 0x7F7F7F7F7F7F7F7FL >>> Byte.SIZE * (Long.BYTES - (next - first));
      if (!isNumber) {
        shape.sizes[field] = (int) number(BigEndian.u64(bytes, start + first), shape.bits[field]);
        if (table.kinds[field] == EventTable.WEI && shape.sizes[field] > EventTable.LONGEST_WEI) {
          return null;
        }
        shape.at[field] = next;
        next += shape.sizes[field];
      }
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

  /** The low seven bits of each byte, the first byte's lowest, moved together. */
  private static long number(long word, long bits) {
    word = Long.reverseBytes(word) & bits;
    word = (word & 0x007F007F007F007FL) | (word & 0x7F007F007F007F00L) >>> 1;
    word = (word & 0x00003FFF00003FFFL) | (word & 0x3FFF00003FFF0000L) >>> 2;
    return (word & 0x000000000FFFFFFFL) | (word & 0x0FFFFFFF00000000L) >>> 4;
  }

  /** The numbers, cut to `mask`, that are a field of the messages that begin at some `starts`. */
  void numbers(
      byte[] bytes, int[] starts, int from, int to, int field, long mask, long[] numbers) {
    int at = this.at[field];
    long bits = this.bits[field];
    for (int i = from; i < to; i++) {
      numbers[i] = number(BigEndian.u64(bytes, starts[i] + at), bits) & mask;
    }
  }

  /** Where the bytes begin that are a field, from the start of the message. */
  int at(int field) {
    return at[field];
  }

  /** The size of the bytes that are a field. */
  int size(int field) {
    return sizes[field];
  }
}
