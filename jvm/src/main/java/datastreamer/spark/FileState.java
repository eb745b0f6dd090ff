package datastreamer.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.io.Serializable;
import java.util.Arrays;
import java.util.HexFormat;

/** A stream file as Python found it when the scan was planned. */
final class FileState implements Serializable {
  private static final long serialVersionUID = 1;

  // In the header page: what commits change is the totals, and what follows the end of `fixed`.
  private static final int TOTALS_AT = 38;
  private static final int TOTALS_SIZE = 16;

  final String path;

  /** Whether the path is a URI of another file system. */
  final boolean isRemote;

  /** If the file is an archive, what is known of that; else null. */
  final ArchiveState archive;

  final long length;
  final long entries;
  final long systemId;

  /** How its entries become rows of a table of events; null for the table of entries. */
  final EventTable events;

  private final byte[] fixed;
  private final byte[] tail;

  FileState(JsonNode found) {
    path = found.get("path").textValue();
    isRemote = found.get("isRemote").booleanValue();
    archive = found.get("archive").isNull() ? null : new ArchiveState(found.get("archive"));
    length = found.get("length").longValue();
    entries = found.get("entries").longValue();
    systemId = found.get("systemId").longValue();
    fixed = HexFormat.of().parseHex(found.get("fixed").textValue());
    tail = HexFormat.of().parseHex(found.get("tail").textValue());
    events = found.get("events").isNull() ? null : new EventTable(found.get("events"));
  }

  int pages() {
    return Format.pagesFor(length);
  }

  /** The bytes of a page that belong to the stream. */
  int sizeOf(int page) {
    return (int) Math.min(Format.PAGE_SIZE, length - Format.pageStart(page));
  }

  /** Compare the file with this state: the same stream, in the same history, not shorter. */
  void compareWith(StreamBytes file) throws IOException, Doubt {
    byte[] page = new byte[Format.HEADER_PAGE_SIZE];
    if (fixed.length == 0 || !file.read(0, page, 0, page.length)) {
      throw new Doubt("the header page");
    }
    int resumed = TOTALS_AT + TOTALS_SIZE;
    if (!Arrays.equals(page, 0, TOTALS_AT, fixed, 0, TOTALS_AT)
        || !Arrays.equals(
            page, resumed, fixed.length + TOTALS_SIZE, fixed, TOTALS_AT, fixed.length)) {
      throw new Doubt("the header page changed");
    }
    long entriesNow = BigEndian.u64(page, TOTALS_AT + 8);
    if (Long.compareUnsigned(entriesNow, entries) < 0 || file.size() < length) {
      throw new Doubt("the stream was truncated");
    }
  }

  /** Compare the last page of the stream with its checksum, if it has one. */
  void compareTail(Page page) throws Doubt {
    if (tail.length > 0 && !Xxh3.hash128(page.bytes, 0, page.end()).equals(tail, 0)) {
      throw new Doubt("the checksum of the last page");
    }
  }
}
