package datastreamer.spark;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;

/** A file of this machine. */
final class LocalBytes implements StreamBytes {
  // The JVM copies through a buffer of its own: of this size, both stay in the core's cache.
  private static final int CHUNK = 128 << 10;

  private final FileChannel channel;

  LocalBytes(String path) throws IOException {
    channel = FileChannel.open(Path.of(path), StandardOpenOption.READ);
  }

  @Override
  public long size() throws IOException {
    return channel.size();
  }

  @Override
  public boolean read(long offset, byte[] into, int size) throws IOException {
    int at = 0;
    while (at < size) {
      ByteBuffer target = ByteBuffer.wrap(into, at, Math.min(CHUNK, size - at));
      int count = channel.read(target, offset + at);
      if (count < 0) {
        return false;
      }
      at += count;
    }
    return true;
  }

  @Override
  public void close() throws IOException {
    channel.close();
  }
}
