package datastreamer.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Serializable;
import java.util.Arrays;
import java.util.HexFormat;

/** Which entries are rows: those of a type whose data has certain bytes at an offset. */
final class Selection implements Serializable {
  private static final long serialVersionUID = 1;

  // Of each clause.
  private final int[] types;
  private final int[] offsets;
  private final byte[][] prefixes;

  private Selection(JsonNode clauses) {
    types = new int[clauses.size()];
    offsets = new int[clauses.size()];
    prefixes = new byte[clauses.size()][];
    for (int i = 0; i < types.length; i++) {
      types[i] = (int) clauses.get(i).get(0).longValue();
      offsets[i] = clauses.get(i).get(1).intValue();
      prefixes[i] = HexFormat.of().parseHex(clauses.get(i).get(2).textValue());
    }
  }

  /** The clauses of an answer; null: all entries are rows. */
  static Selection of(JsonNode answer) {
    JsonNode clauses = answer.get("where");
    return clauses.isNull() ? null : new Selection(clauses);
  }

  /** Whether one of the clauses matches the entry whose head is at `head`, and which ends at `end`. */
  boolean has(byte[] bytes, int head, int end) {
    int type = BigEndian.u32(bytes, head + Format.TYPE_AT);
    for (int i = 0; i < types.length; i++) {
      byte[] prefix = prefixes[i];
      int at = head + Format.HEAD_SIZE + offsets[i];
      if (types[i] == type
          && at + prefix.length <= end
          && Arrays.equals(bytes, at, at + prefix.length, prefix, 0, prefix.length)) {
        return true;
      }
    }
    return false;
  }
}
