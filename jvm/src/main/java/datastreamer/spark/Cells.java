package datastreamer.spark;

import java.util.Arrays;

/** The values of the event that was decoded last: numbers, or places of bytes in the page. */
final class Cells {
  final long[] number;
  final int[] at;
  final boolean[] there;

  Cells(int columns) {
    number = new long[columns];
    at = new int[columns];
    there = new boolean[columns];
  }

  /** Make all values zero or empty, and none of them there. */
  void clear() {
    Arrays.fill(number, 0);
    // Nobody asks where bytes are that are none.
    Arrays.fill(there, false);
  }

  void put(int column, long value) {
    number[column] = value;
    there[column] = true;
  }

  void put(int column, int start, long size) {
    at[column] = start;
    put(column, size);
  }
}
