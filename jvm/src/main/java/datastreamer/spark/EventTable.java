package datastreamer.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Serializable;

/** How entries become rows of a table of events in streams of one version. */
final class EventTable implements Serializable {
  private static final long serialVersionUID = 1;

  // Kinds of fields, with the numbers of the compiled decoder in Python.
  static final int U64 = 1;
  static final int U32 = 2;
  static final int BOOL = 3;
  static final int ENUM = 4;

  /** A number of which chains use all 64 bits. */
  static final int FULL_U64 = 5;

  static final int BYTES = 6;
  static final int DEBUG = 7;

  /** Bytes that are an amount. */
  static final int WEI = 8;

  /** The longest amount that a column holds in any case; Python reads longer ones. */
  static final int LONGEST_WEI = 15;

  /** The whole data of an entry. */
  static final int DATA = 9;

  /** A value in data of a fixed layout. */
  record Slot(int column, int at, int width) implements Serializable {}

  /**
   * Data of `size` bytes; with `sizeAt` of 0 or more, the u32 there is the number of bytes that
   * follow, which are the value of the column `tail`.
   */
  record Layout(int size, int sizeAt, int tail, Slot[] slots) implements Serializable {}

  /** The type of the entries that are its rows; null if this version has no such event. */
  final Long type;

  final String[] names;
  final int[] kinds;

  /** The layouts of version 1; null if the data are messages. */
  final Layout[] layouts;

  EventTable(JsonNode found) {
    type = found.get("type").isNull() ? null : found.get("type").longValue();
    names = new String[found.get("names").size()];
    kinds = new int[names.length];
    for (int i = 0; i < names.length; i++) {
      names[i] = found.get("names").get(i).textValue();
      kinds[i] = found.get("kinds").get(i).intValue();
    }
    JsonNode all = found.get("layouts");
    layouts = all.isNull() ? null : new Layout[all.size()];
    for (int i = 0; layouts != null && i < layouts.length; i++) {
      layouts[i] = layout(all.get(i));
    }
  }

  private static Layout layout(JsonNode found) {
    Slot[] slots = new Slot[found.get(3).size()];
    for (int i = 0; i < slots.length; i++) {
      JsonNode slot = found.get(3).get(i);
      slots[i] = new Slot(slot.get(0).intValue(), slot.get(1).intValue(), slot.get(2).intValue());
    }
    return new Layout(
        found.get(0).intValue(), found.get(1).intValue(), found.get(2).intValue(), slots);
  }

  /** How many of the columns are fields of the events. */
  int fields() {
    int last = kinds.length - 1;
    return kinds[last] == DATA ? last : last + 1;
  }
}
