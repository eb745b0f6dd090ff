package datastreamer.spark;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.InvalidPathException;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;

/** A file of this machine. */
final class LocalBytes implements StreamBytes {
  private final FileChannel channel;

  LocalBytes(String path) throws IOException {
    try {
      channel = FileChannel.open(Path.of(path), StandardOpenOption.READ);
    } catch (InvalidPathException error) {
      // In a locale without UTF-8 a JVM has no names for some files.
      throw new IOException(path + ": this JVM cannot name it", error);
    }
  }

  @Override
  public long size() throws IOException {
    return channel.size();
  }

  @Override
  public boolean read(long offset, byte[] into, int at, int size) throws IOException {
    ByteBuffer target = ByteBuffer.wrap(into, at, size);
    while (target.hasRemaining()) {
      if (channel.read(target, offset + target.position() - at) < 0) {
        return false;
      }
    }
    return true;
  }

  @Override
  public void close() throws IOException {
    channel.close();
  }
}
