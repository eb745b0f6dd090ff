package datastreamer.spark;

import java.io.Closeable;
import java.io.IOException;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * The rows of a part, a batch for each page.
 *
 * <p>From the first page on that is in doubt, Python reads the part: the same rows up to that page,
 * which are skipped, and then its verdict.
 */
final class PartReader implements Closeable {
  private final ScanContext context;
  private final Part part;
  private final Rows rows;
  private final ColumnarBatch batch;
  private PageReader pages;
  private PythonRows python;

  /** How many rows were returned. */
  private long returned;

  PartReader(ScanContext context, Part part) throws IOException {
    this.context = context;
    this.part = part;
    EventTable events = part.file.events;
    rows = events == null ? new EntryRows(context.where()) : new EventRows(events);
    batch = new ColumnarBatch(columns(context.columns(), rows, part.file));
    try {
      pages = new PageReader(part);
    } catch (Doubt | IOException doubt) {
      // Python says what is wrong with the file.
      python = new PythonRows(context, part, 0);
    }
  }

  private static ColumnVector[] columns(StructType wanted, Rows rows, FileState file) {
    StructField[] fields = wanted.fields();
    ColumnVector[] columns = new ColumnVector[fields.length];
    for (int i = 0; i < fields.length; i++) {
      ColumnVector own = rows.column(fields[i].name());
      ColumnVector place = PlaceColumn.of(fields[i].name(), file, rows);
      if (own != null || place != null) {
        columns[i] = own != null ? own : place;
      } else if (fields[i].name().equals("system_id")) {
        columns[i] = ConstantColumn.of(file.systemId);
      } else {
        columns[i] = ConstantColumn.nulls(fields[i].dataType());
      }
    }
    return columns;
  }

  boolean next() throws IOException {
    if (python == null) {
      try {
        return nextPage();
      } catch (Doubt | IOException doubt) {
        pages.close();
        python = new PythonRows(context, part, returned);
      }
    }
    return python.next();
  }

  private boolean nextPage() throws IOException, Doubt {
    while (true) {
      Page page = pages.read();
      if (page == null) {
        return false;
      }
      int from = (int) Math.max(0, Math.min(page.count, part.start - page.first));
      int to = (int) Math.max(from, Math.min(page.count, part.end - page.first));
      int count = rows.take(page, from, to);
      if (count > 0) {
        returned += count;
        batch.setNumRows(count);
        return true;
      }
    }
  }

  ColumnarBatch get() {
    return python == null ? batch : python.get();
  }

  /** Whether Python reads the part. */
  boolean isPython() {
    return python != null;
  }

  @Override
  public void close() throws IOException {
    if (pages != null) {
      pages.close();
    }
    if (python != null) {
      python.close();
    }
  }
}
