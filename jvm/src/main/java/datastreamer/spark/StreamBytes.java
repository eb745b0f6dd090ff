package datastreamer.spark;

import java.io.Closeable;
import java.io.IOException;

/** A file that is read. */
interface StreamBytes extends Closeable {
  long size() throws IOException;

  /** Read `size` bytes at a file offset into an array from `at` on; false if the file ends before. */
  boolean read(long offset, byte[] into, int at, int size) throws IOException;
}
