package datastreamer.spark;

import java.io.Closeable;
import java.io.IOException;

/**
 * Reads the pages of a part, one after the other.
 *
 * <p>A page is returned when the start of the next one has confirmed where it ends: what looks like
 * padding may be a damaged entry.
 */
final class PageReader implements Closeable {
  // A piece stays in the core's cache while it is copied, hashed and searched for entries.
  private static final int PIECE = 512 << 10;

  private final Part part;
  private final StreamBytes bytes;
  private Page page;
  private Page following;
  private int next;

  PageReader(Part part) throws IOException, Doubt {
    this.part = part;
    bytes = part.open();
    next = part.firstPage;
    try {
      part.file.compareWith(bytes);
      if (next < part.stopPage) {
        following = made();
        load(following, next, next == 0 ? 0 : -1);
      }
    } catch (IOException | Doubt error) {
      bytes.close();
      throw error;
    }
  }

  /** The next page; null after the last one. It is valid until the next call. */
  Page read() throws IOException, Doubt {
    if (next == part.stopPage) {
      part.file.compareWith(bytes);
      return null;
    }
    Page free = page;
    page = following;
    next++;
    if (next == part.file.pages()) {
      if (page.next() != part.file.entries) {
        throw new Doubt("the number of entries");
      }
      return page;
    }
    following = free == null ? made() : free;
    if (next < part.stopPage) {
      load(following, next, page.next());
    } else {
      // Of the next part only the first head matters here.
      following.size = part.file.sizeOf(next);
      readBytes(following, next, 0, Math.min(following.size, Format.HEAD_SIZE));
      if (following.firstNumber() != page.next()) {
        throw new Doubt("the start of the next page");
      }
    }
    return page;
  }

  /** A page for this file, which may be much smaller than a page. */
  private Page made() {
    return new Page((int) Math.min(Format.PAGE_SIZE, part.file.length - Format.HEADER_PAGE_SIZE));
  }

  private void load(Page into, int number, long due) throws IOException, Doubt {
    into.begin(number, part.file.sizeOf(number));
    PageSums.Comparison sums = part.sums.comparison(number - part.firstPage);
    for (int read = 0; read < into.size; ) {
      int more = Math.min(PIECE, into.size - read);
      readBytes(into, number, read, more);
      read += more;
      sums.advance(into, read);
      into.parse(read);
    }
    sums.finish(into);
    into.finish(due);
    if (number == part.file.pages() - 1) {
      part.file.compareTail(into);
    }
  }

  private void readBytes(Page into, int number, int at, int size) throws IOException, Doubt {
    if (!bytes.read(Format.pageStart(number) + at, into.bytes, at, size)) {
      throw new Doubt("the file ends");
    }
  }

  @Override
  public void close() throws IOException {
    bytes.close();
  }
}
