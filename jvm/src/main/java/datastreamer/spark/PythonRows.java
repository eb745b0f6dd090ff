package datastreamer.spark;

import java.io.ByteArrayInputStream;
import java.io.Closeable;
import java.io.IOException;
import java.util.Map;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.memory.RootAllocator;
import org.apache.arrow.vector.FieldVector;
import org.apache.arrow.vector.VectorSchemaRoot;
import org.apache.arrow.vector.ipc.ArrowStreamReader;
import org.apache.spark.sql.vectorized.ArrowColumnVector;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/** The rows of a part that Python reads, without the first ones. */
final class PythonRows implements Closeable {
  private final ScanContext context;
  private final PythonProcess process;
  private final BufferAllocator memory = new RootAllocator();
  private ArrowStreamReader arrow;
  private VectorSchemaRoot sliced;
  private ColumnarBatch batch;
  private long skipped;
  private boolean ended;

  PythonRows(ScanContext context, Part part, long skipped) throws IOException {
    this.context = context;
    this.skipped = skipped;
    process = PythonProcess.take(context.python());
    try {
      process.send(
          Map.of(
              "do", "read", "reader", context.reader(), "part", part.pickled, "begin", part.begin));
    } catch (IOException error) {
      close();
      throw error;
    }
  }

  boolean next() throws IOException {
    while (true) {
      release();
      byte[] content;
      try {
        PythonProcess.Frame frame = process.receive();
        if (frame.isLast()) {
          finish();
          return false;
        }
        content = frame.content();
      } catch (PythonFailure failure) {
        finish();
        throw failure.inTask();
      }
      arrow = new ArrowStreamReader(new ByteArrayInputStream(content), memory);
      arrow.loadNextBatch();
      VectorSchemaRoot root = arrow.getVectorSchemaRoot();
      int rows = root.getRowCount();
      if (rows > skipped) {
        sliced = root.slice((int) skipped);
        batch = new ColumnarBatch(columns(sliced), sliced.getRowCount());
        skipped = 0;
        return true;
      }
      skipped -= rows;
    }
  }

  private ColumnVector[] columns(VectorSchemaRoot root) {
    ColumnVector[] columns = new ColumnVector[context.columns().length()];
    for (int i = 0; i < columns.length; i++) {
      FieldVector vector = root.getVector(i);
      columns[i] = new ArrowColumnVector(vector);
    }
    return columns;
  }

  ColumnarBatch get() {
    return batch;
  }

  private void finish() {
    ended = true;
    process.giveBack();
  }

  private void release() throws IOException {
    if (sliced != null) {
      sliced.close();
      sliced = null;
    }
    if (arrow != null) {
      arrow.close();
      arrow = null;
    }
  }

  @Override
  public void close() throws IOException {
    release();
    memory.close();
    if (!ended) {
      process.close();
    }
  }
}
