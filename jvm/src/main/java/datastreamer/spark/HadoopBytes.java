package datastreamer.spark;

import java.io.EOFException;
import java.io.IOException;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.spark.SparkEnv;
import org.apache.spark.deploy.SparkHadoopUtil;

/** A file of one of Hadoop's file systems, as Spark's configuration (`spark.hadoop.*`) reaches it. */
final class HadoopBytes implements StreamBytes {
  private final long size;
  private final FSDataInputStream stream;

  HadoopBytes(String uri) throws IOException {
    try {
      Path path = new Path(uri);
      FileSystem system =
          path.getFileSystem(SparkHadoopUtil.get().newConfiguration(SparkEnv.get().conf()));
      size = system.getFileStatus(path).getLen();
      stream = system.open(path);
    } catch (RuntimeException | LinkageError error) {
      // As of a file system whose class, or what it needs, is missing.
      throw new IOException(uri + ": Hadoop cannot open it", error);
    }
  }

  @Override
  public long size() {
    return size;
  }

  @Override
  public boolean read(long offset, byte[] into, int at, int count) throws IOException {
    // A seek to where the stream is costs nothing, and pages are read in their order.
    stream.seek(offset);
    try {
      stream.readFully(into, at, count);
      return true;
    } catch (EOFException error) {
      return false;
    }
  }

  @Override
  public void close() throws IOException {
    stream.close();
  }
}
