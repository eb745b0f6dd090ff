package datastreamer.spark;

import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;

/** Decodes protobuf messages; of a repeated field the last value is used. */
final class MessageDecoder {
  private static final int VARINT = 0;
  private static final int FIXED64 = 1;
  private static final int LENGTH = 2;
  private static final int FIXED32 = 5;

  private final int[] kinds;
  private final int fields;
  private final Cells cells;

  private byte[] bytes;
  private int at;

  MessageDecoder(EventTable table, Cells cells) {
    kinds = table.kinds;
    fields = table.fields();
    this.cells = cells;
  }

  /** Decode the bytes from `start` to `end`. */
  void decode(byte[] from, int start, int end) throws Doubt {
    bytes = from;
    long[] number = cells.number;
    // The place is in a local variable, and this loop calls nothing: most fields are read here.
    int next = start;
    while (next < end) {
      int tag = from[next];
      int field = (tag >> 3) - 1;
      if (tag < 8 || field >= fields || kinds[field] == EventTable.DEBUG || next + 1 == end) {
        next = rare(next, end);
        continue;
      }
      int first = ++next;
      long value = from[next++];
      if (value < 0) {
        value &= 0x7F;
        byte more;
        int shift = 7;
        do {
          if (next == end || shift >= 70) {
            throw new Doubt("a varint");
          }
          more = from[next++];
          value |= (long) (more & 0x7F) << shift;
          shift += 7;
        } while (more < 0);
      }
      number[field] = value;
      if (kinds[field] < EventTable.BYTES) {
        if ((tag & 7) != VARINT) {
          throw new Doubt("the wire type of a field");
        }
      } else {
        if ((tag & 7) != LENGTH || next - first > 5 || value < 0 || value > end - next) {
          throw new Doubt("the size of a field");
        }
        cells.at[field] = next;
        next += (int) value;
      }
    }
    for (int field = 0; field < fields; field++) {
      if ((kinds[field] == EventTable.U64 && number[field] < 0)
          || (kinds[field] == EventTable.WEI && number[field] > EventTable.LONGEST_WEI)) {
        throw new Doubt("a number that may be too large for its column");
      }
    }
  }

  /** Decode a field that is a message, or that this version does not know; returns its end. */
  private int rare(int start, int end) throws Doubt {
    at = start;
    int tag = tag(end);
    int field = (tag >>> 3) - 1;
    if (field >= fields) {
      unknown(tag, end);
    } else if (kinds[field] == EventTable.DEBUG) {
      debug(field, size(tag, end));
    } else {
      throw new Doubt("a field is cut off");
    }
    return at;
  }

  /** The text of a Debug message. */
  private void debug(int field, int messageSize) throws Doubt {
    int end = at + messageSize;
    cells.there[field] = true;
    while (at < end) {
      int tag = tag(end);
      if (tag >>> 3 != 1) {
        unknown(tag, end);
        continue;
      }
      int size = size(tag, end);
      ensureText(at, size);
      cells.put(field, at, size);
      at += size;
    }
  }

  private void ensureText(int start, int size) throws Doubt {
    try {
      StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(bytes, start, size));
    } catch (CharacterCodingException error) {
      throw new Doubt("a text that is not UTF-8");
    }
  }

  private int tag(int end) throws Doubt {
    int start = at;
    long tag = varint(end);
    if (at - start > 5 || tag >>> 32 != 0 || tag >>> 3 == 0) {
      throw new Doubt("a tag");
    }
    return (int) tag;
  }

  /** The size of the bytes that follow, all of which are there. */
  private int size(int tag, int end) throws Doubt {
    if ((tag & 7) != LENGTH) {
      throw new Doubt("the wire type of a field");
    }
    int start = at;
    long size = varint(end);
    if (at - start > 5 || size < 0 || size > end - at) {
      throw new Doubt("the size of a field");
    }
    return (int) size;
  }

  private long varint(int end) throws Doubt {
    long value = 0;
    for (int shift = 0; at < end && shift < 70; shift += 7) {
      byte next = bytes[at++];
      value |= (long) (next & 0x7F) << shift;
      if (next >= 0) {
        return value;
      }
    }
    throw new Doubt("a varint");
  }

  /** Skip a field that this version does not know. Groups, which no writer makes, are for Python. */
  private void unknown(int tag, int end) throws Doubt {
    int size =
        switch (tag & 7) {
          case VARINT -> {
            varint(end);
            yield 0;
          }
          case FIXED64 -> 8;
          case FIXED32 -> 4;
          case LENGTH -> size(tag, end);
          default -> throw new Doubt("a group");
        };
    if (size > end - at) {
      throw new Doubt("an unknown field is cut off");
    }
    at += size;
  }
}
