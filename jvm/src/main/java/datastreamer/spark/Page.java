package datastreamer.spark;

import java.util.Arrays;

/**
 * The bytes of one page and where its entries are in them.
 *
 * <p>Accepts only what every reader accepts without a word: entries one after the other, numbered
 * without gaps, up to the end or to padding that the format allows there. The arrays are reused.
 */
final class Page {
  /** Those of the page, and some more: a word can be read from each of them on. */
  final byte[] bytes;

  /** Which page of the file it is. */
  int number;

  /** The bytes of the page that belong to the stream. */
  int size;

  /** The offsets of the entries' heads, and then that of the end of the last entry. */
  int[] offsets = new int[1024];

  /** The types of the entries. */
  int[] types = new int[1024];

  int count;
  long first;

  /** Where the next head is looked for. */
  private int parsed;

  /** A page of at most `capacity` bytes. */
  Page(int capacity) {
    bytes = new byte[capacity + Long.BYTES];
  }

  /** The number after the last entry's. */
  long next() {
    return first + count;
  }

  int end() {
    return offsets[count];
  }

  /** A copy of the data of the entry at this index in the page. */
  byte[] data(int index) {
    return Arrays.copyOfRange(bytes, offsets[index] + Format.HEAD_SIZE, offsets[index + 1]);
  }

  /** Begin with a page of this size, whose bytes are read into `bytes` one piece after another. */
  void begin(int number, int size) {
    this.number = number;
    this.size = size;
    count = 0;
    parsed = 0;
  }

  /** Find the entries that begin in the first `read` bytes. */
  void parse(int read) throws Doubt {
    int last = read == size ? size - 1 : read - Format.HEAD_SIZE;
    int at = parsed;
    while (at <= last && bytes[at] == Format.ENTRY) {
      if (size - at < Format.HEAD_SIZE) {
        throw new Doubt("a head is cut off");
      }
      long lengthAndType = BigEndian.u64(bytes, at + Format.LENGTH_AT);
      int length = checked((int) (lengthAndType >>> 32), at);
      long number = BigEndian.u64(bytes, at + Format.NUMBER_AT);
      if (count == 0) {
        first = number;
      } else if (number != first + count) {
        throw new Doubt("a number");
      }
      if (count + 1 == offsets.length) {
        offsets = Arrays.copyOf(offsets, 2 * offsets.length);
        types = Arrays.copyOf(types, offsets.length);
      }
      types[count] = (int) lengthAndType;
      offsets[count++] = at;
      at += length;
    }
    parsed = at;
  }

  /** End with all bytes parsed. The first entry has to be `due`, unless that is negative. */
  void finish(long due) throws Doubt {
    offsets[count] = parsed;
    if (count == 0) {
      throw new Doubt("no entry");
    }
    if (first < 0 || (due >= 0 && first != due)) {
      throw new Doubt("the first number");
    }
    if (parsed < size && (bytes[parsed] != Format.PADDING || size < Format.PAGE_SIZE)) {
      throw new Doubt("neither an entry nor padding");
    }
    if (first + count <= 0) {
      throw new Doubt("numbers above those of a signed column");
    }
  }

  /** The number of the first entry if its head is possible. */
  long firstNumber() throws Doubt {
    if (size < Format.HEAD_SIZE || bytes[0] != Format.ENTRY) {
      throw new Doubt("no entry at the start of a page");
    }
    checked(BigEndian.u32(bytes, Format.LENGTH_AT), 0);
    return BigEndian.u64(bytes, Format.NUMBER_AT);
  }

  private int checked(int length, int at) throws Doubt {
    if (length < Format.HEAD_SIZE || length > size - at) {
      throw new Doubt("a length");
    }
    return length;
  }
}
