package datastreamer.spark;

/** Decodes the fixed layouts of version 1. */
final class FixedDecoder {
  private final EventTable table;
  private final Cells cells;

  FixedDecoder(EventTable table, Cells cells) {
    this.table = table;
    this.cells = cells;
  }

  /** Decode the bytes from `at` to `end` in the first layout that they fit. */
  void decode(byte[] bytes, int at, int end) throws Doubt {
    EventTable.Layout layout = fitting(bytes, at, end - at);
    for (EventTable.Slot slot : layout.slots()) {
      int start = at + slot.at();
      int kind = table.kinds[slot.column()];
      if (kind >= EventTable.BYTES) {
        cells.put(slot.column(), start, slot.width());
        continue;
      }
      long value = 0;
      for (int i = 0; i < slot.width(); i++) {
        value = value << 8 | bytes[start + i] & 0xFF;
      }
      // The only enumeration is a bookmark's kind: 0 for a block and 1 for a batch.
      if (value < 0 || (kind == EventTable.ENUM && value > 1)) {
        throw new Doubt("a number of an event");
      }
      cells.put(slot.column(), kind == EventTable.ENUM ? 2 - value : value);
    }
    if (layout.sizeAt() >= 0) {
      cells.put(layout.tail(), at + layout.size(), end - at - layout.size());
    }
  }

  private EventTable.Layout fitting(byte[] bytes, int at, int size) throws Doubt {
    for (EventTable.Layout layout : table.layouts) {
      if (size >= layout.size()) {
        int more = layout.sizeAt() < 0 ? 0 : BigEndian.u32(bytes, at + layout.sizeAt());
        if (size - layout.size() == more) {
          return layout;
        }
      }
    }
    throw new Doubt("the size of an event");
  }
}
