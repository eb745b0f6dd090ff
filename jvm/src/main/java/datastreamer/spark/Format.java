package datastreamer.spark;

/** The sizes of the stream file format. */
final class Format {
  static final int HEADER_PAGE_SIZE = 4096;
  static final int PAGE_SIZE = 1 << 20;
  static final int HEAD_SIZE = 17;

  static final byte PADDING = 0;
  static final byte ENTRY = 2;

  // In an entry's head.
  static final int LENGTH_AT = 1;
  static final int TYPE_AT = 5;
  static final int NUMBER_AT = 9;

  private Format() {}

  static long pageStart(int page) {
    return HEADER_PAGE_SIZE + (long) page * PAGE_SIZE;
  }

  /** The pages that hold entries of a stream of this total length. */
  static int pagesFor(long length) {
    return Math.toIntExact((length - HEADER_PAGE_SIZE + PAGE_SIZE - 1) / PAGE_SIZE);
  }
}
