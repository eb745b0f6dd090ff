package datastreamer.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.util.Base64;
import org.apache.spark.sql.connector.read.InputPartition;

/** Pages of a file, which one task reads; of their entries those from `start` to `end`. */
final class Part implements InputPartition {
  private static final long serialVersionUID = 1;

  final FileState file;
  final int firstPage;
  final int stopPage;
  final long start;
  final long end;
  final PageSums sums;

  /** Of an archive, where the pages are, and the one after them. */
  final byte[] frames;

  /** A pickle of the part in Python. */
  final String pickled;

  /** From which entry on Python reports damage. */
  final long begin;

  Part(FileState file, JsonNode found) {
    this.file = file;
    firstPage = found.get("first").intValue();
    stopPage = found.get("stop").intValue();
    start = found.get("start").longValue();
    end = found.get("end").longValue();
    sums = new PageSums(Base64.getDecoder().decode(found.get("sums").textValue()));
    frames = Base64.getDecoder().decode(found.get("frames").textValue());
    pickled = found.get("part").textValue();
    begin = found.get("begin").longValue();
  }

  StreamBytes open() throws IOException {
    if (file.archive != null) {
      return new ArchiveBytes(file.archive, this);
    }
    return file.isRemote ? new HadoopBytes(file.path) : new LocalBytes(file.path);
  }

  /** About how many bytes it is. */
  long size() {
    long last = Math.min(Format.pageStart(stopPage), file.length);
    return Math.max(0, last - Format.pageStart(firstPage));
  }
}
