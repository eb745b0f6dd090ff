package datastreamer.spark;

import java.io.Serializable;

/** The checksums of the whole pages of a part; pages without one are not compared. */
final class PageSums implements Serializable {
  private static final long serialVersionUID = 1;

  // The hash of the entries, where they end, the hash of the padding.
  private static final int SIZE = 28;
  private static final int END_AT = 16;
  private static final int PADDING_AT = 20;

  private final byte[] packed;

  PageSums(byte[] packed) {
    this.packed = packed;
  }

  /** Compare the page with this index in the part. */
  void compare(int index, Page page) throws Doubt {
    int at = index * SIZE;
    int end = at < packed.length ? BigEndian.u32(packed, at + END_AT) : 0;
    if (end == 0) {
      return;
    }
    if (end < 0 || end > page.size || page.size < Format.PAGE_SIZE) {
      throw new Doubt("the end in a checksum");
    }
    if (!Xxh3.hash128(page.bytes, 0, end).equals(packed, at)
        || Xxh3.hash64(page.bytes, end, page.size - end)
            != BigEndian.u64(packed, at + PADDING_AT)) {
      throw new Doubt("the checksum of a page");
    }
  }
}
