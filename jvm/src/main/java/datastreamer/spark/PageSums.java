package datastreamer.spark;

import java.io.Serializable;

/** The proven checksums of the whole pages of a part; pages without one are not compared. */
final class PageSums implements Serializable {
  private static final long serialVersionUID = 1;

  // The hash of the entries, and where they end.
  private static final int SIZE = 20;
  private static final int END_AT = 16;

  private final byte[] packed;

  PageSums(byte[] packed) {
    this.packed = packed;
  }

  /** Compares a page, as it is read, with the checksum at this index in the part. */
  Comparison comparison(int index) {
    return new Comparison(index * SIZE);
  }

  /** The comparison of one page. */
  final class Comparison {
    private final int at;
    private final int end;
    private final Xxh3.Sums sums = new Xxh3.Sums();

    private Comparison(int at) {
      this.at = at;
      end = at < packed.length ? BigEndian.u32(packed, at + END_AT) : 0;
    }

    /** Hash what can be hashed of a page of which `read` bytes are there. */
    void advance(Page page, int read) {
      if (end > 0) {
        sums.advance(page.bytes, 0, Math.min(end, page.size), read);
      }
    }

    /**
     * Compare the page, all of whose bytes are there, up to the padding mark. A power cut may have
     * left any bytes after it.
     */
    void finish(Page page) throws Doubt {
      if (end == 0) {
        return;
      }
      if (end < 0 || end > page.size || page.size < Format.PAGE_SIZE) {
        throw new Doubt("the end in a checksum");
      }
      if (!Xxh3.hash128(page.bytes, 0, end, sums).equals(packed, at)
          || (end < page.size && page.bytes[end] != Format.PADDING)) {
        throw new Doubt("the checksum of a page");
      }
    }
  }
}
