package datastreamer.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Serializable;
import java.util.Arrays;
import java.util.HexFormat;

/** Which entries are rows: those of a type whose data has certain bytes at an offset. */
final class Selection implements Serializable {
  private static final long serialVersionUID = 1;

  /** The clauses of a type and an offset. Prefixes rise, and none is the beginning of another. */
  private record Group(int type, int offset, byte[][] prefixes) implements Serializable {
    private boolean has(byte[] bytes, int at, int end) {
      int low = 0;
      int high = prefixes.length;
      while (low < high) {
        int middle = (low + high) >>> 1;
        byte[] prefix = prefixes[middle];
        int stop = Math.min(end, at + prefix.length);
        int order = Arrays.compareUnsigned(prefix, 0, prefix.length, bytes, at, stop);
        if (order == 0) {
          return true;
        }
        if (order < 0) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      return false;
    }
  }

  private final Group[] groups;

  private Selection(JsonNode found) {
    groups = new Group[found.size()];
    for (int i = 0; i < groups.length; i++) {
      JsonNode group = found.get(i);
      byte[][] prefixes = new byte[group.get(2).size()][];
      for (int j = 0; j < prefixes.length; j++) {
        prefixes[j] = HexFormat.of().parseHex(group.get(2).get(j).textValue());
      }
      groups[i] = new Group((int) group.get(0).longValue(), group.get(1).intValue(), prefixes);
    }
  }

  /** The selection of an answer; null: all entries are rows. */
  static Selection of(JsonNode answer) {
    JsonNode found = answer.get("where");
    return found.isNull() ? null : new Selection(found);
  }

  /** Whether an entry is wanted, from its head at `head` to its end. */
  boolean has(byte[] bytes, int head, int end) {
    int type = BigEndian.u32(bytes, head + Format.TYPE_AT);
    for (Group group : groups) {
      int at = head + Format.HEAD_SIZE + group.offset;
      if (group.type == type && at <= end && group.has(bytes, at, end)) {
        return true;
      }
    }
    return false;
  }
}
