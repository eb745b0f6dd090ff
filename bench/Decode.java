import com.github.luben.zstd.ZstdDecompressCtx;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;

/**
 * Decodes the pages of a segment's object in one thread, as the reader in Java for Spark does, for
 * some seconds; prints MB for each second of that thread on a processor.
 */
final class Decode {
  public static void main(String[] words) throws Exception {
    byte[] object = Files.readAllBytes(Path.of(words[0]));
    List<byte[]> frames = frames(object);
    byte[] page = new byte[1 << 20];
    ZstdDecompressCtx zstd = new ZstdDecompressCtx();
    ThreadMXBean threads = ManagementFactory.getThreadMXBean();
    double best = 0;
    for (long end = System.nanoTime() + 4_000_000_000L; System.nanoTime() < end; ) {
      long begin = threads.getCurrentThreadCpuTime();
      long bytes = 0;
      for (byte[] frame : frames) {
        bytes += zstd.decompressByteArray(page, 0, page.length, frame, 0, frame.length);
      }
      best = Math.max(best, bytes * 1e3 / (threads.getCurrentThreadCpuTime() - begin));
    }
    System.out.println(best);
  }

  /** By the seek table at the end; its last row is the footer's. */
  private static List<byte[]> frames(byte[] object) {
    ByteBuffer table = ByteBuffer.wrap(object).order(ByteOrder.LITTLE_ENDIAN);
    int count = table.getInt(object.length - 9);
    int row = object.length - 9 - 8 * count;
    List<byte[]> found = new ArrayList<>();
    for (int at = 0, offset = 0; at < count - 1; at++) {
      byte[] frame = new byte[table.getInt(row + 8 * at)];
      System.arraycopy(object, offset, frame, 0, frame.length);
      offset += frame.length;
      found.add(frame);
    }
    return found;
  }
}
