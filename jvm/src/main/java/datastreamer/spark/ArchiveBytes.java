package datastreamer.spark;

import com.github.luben.zstd.ZstdDecompressCtx;
import com.github.luben.zstd.ZstdException;
import java.io.IOException;

/**
 * The stream of an archive as a file: pages are decompressed from the frames of its objects.
 *
 * <p>Whoever reads compares them with their checksums.
 */
final class ArchiveBytes implements StreamBytes {
  // Of a frame: the object, by its place among the archive's, the offset and the size there.
  private static final int FRAME = 16;

  private final ArchiveState archive;
  private final Part part;
  private final ZstdDecompressCtx zstd = new ZstdDecompressCtx();
  private final byte[] page = new byte[Format.PAGE_SIZE];
  private int pageSize;
  private int number = -1;
  private byte[] frame = new byte[0];
  private StreamBytes object;
  private int opened = -1;

  ArchiveBytes(ArchiveState archive, Part part) {
    this.archive = archive;
    this.part = part;
  }

  @Override
  public long size() {
    return part.file.length;
  }

  @Override
  public boolean read(long offset, byte[] into, int at, int count) throws IOException {
    byte[] from = archive.header;
    int start = (int) offset;
    int size = from.length;
    if (offset >= Format.HEADER_PAGE_SIZE) {
      int wanted = (int) ((offset - Format.HEADER_PAGE_SIZE) / Format.PAGE_SIZE);
      load(wanted);
      from = page;
      start = (int) (offset - Format.pageStart(wanted));
      size = pageSize;
    }
    if (start + count > size) {
      return false;
    }
    System.arraycopy(from, start, into, at, count);
    return true;
  }

  private void load(int wanted) throws IOException {
    if (wanted == number) {
      return;
    }
    number = -1;
    int place = (wanted - part.firstPage) * FRAME;
    open(BigEndian.u32(part.frames, place));
    int size = BigEndian.u32(part.frames, place + 12);
    if (frame.length < size) {
      frame = new byte[size + size / 4];
    }
    if (!object.read(BigEndian.u64(part.frames, place + 4), frame, 0, size)) {
      throw new IOException(archive.objects[opened] + " is shorter than it was");
    }
    try {
      pageSize = zstd.decompressByteArray(page, 0, page.length, frame, 0, size);
    } catch (ZstdException error) {
      throw new IOException(archive.objects[opened] + ": a frame is damaged", error);
    }
    number = wanted;
  }

  private void open(int wanted) throws IOException {
    if (wanted == opened) {
      return;
    }
    closeObject();
    object = new HadoopBytes(archive.objects[wanted]);
    opened = wanted;
  }

  @Override
  public void close() throws IOException {
    zstd.close();
    closeObject();
  }

  private void closeObject() throws IOException {
    if (object != null) {
      object.close();
      object = null;
      opened = -1;
    }
  }
}
