package datastreamer.spark;

import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.memory.RootAllocator;
import org.apache.arrow.vector.BigIntVector;
import org.apache.arrow.vector.VectorSchemaRoot;
import org.apache.arrow.vector.ipc.ArrowStreamReader;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.read.streaming.PartitionOffset;
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeRead;
import org.apache.spark.sql.vectorized.ArrowColumnVector;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/** The rows that a process in Python sends as their entries are committed. */
final class LiveReader implements SupportsRealTimeRead<InternalRow> {
  /** How many record batches wait here: Python waits when there are more. */
  private static final int MOST_WAITING = 16;

  /** The key of `live.py` for the entry to continue with. */
  private static final String NEXT = "next";

  private final int columns;
  private final PythonProcess process;
  private final Thread receiving = new Thread(this::receive, "datastreamer live rows");
  private final BlockingQueue<Object> arrived = new ArrayBlockingQueue<>(MOST_WAITING);
  private final BufferAllocator memory = new RootAllocator();
  private ArrowStreamReader arrow;
  private ColumnarBatch batch;
  private BigIntVector numbers;
  private int row;
  private int rows;

  /** The entry after the last row, and that after all of the record batch. */
  private long entry;

  private long next;

  LiveReader(RealTimeStream.Live partition) {
    columns = partition.columns();
    entry = partition.entry();
    next = entry;
    try {
      process = PythonProcess.take(partition.python());
      process.send(partition.request());
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
    receiving.setDaemon(true);
    receiving.start();
  }

  private void receive() {
    try {
      try {
        while (true) {
          arrived.put(process.receive().content());
        }
      } catch (InterruptedException ended) {
        throw ended;
      } catch (Throwable failure) {
        arrived.put(failure);
      }
    } catch (InterruptedException ended) {
      Thread.currentThread().interrupt();
    }
  }

  /** Up to Spark 4.2. */
  @Override
  public RecordStatus nextWithTimeout(Long timeoutMs) throws IOException {
    long until = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(timeoutMs);
    return RecordStatus.newStatusWithoutArrivalTime(advance(until));
  }

  @Override
  public RecordStatus nextWithTimeout(Long startMs, Long timeoutMs) throws IOException {
    return nextWithTimeout(timeoutMs);
  }

  @Override
  public boolean next() throws IOException {
    return advance(Long.MAX_VALUE);
  }

  private boolean advance(long until) throws IOException {
    while (++row >= rows) {
      entry = Math.max(entry, next);
      Object found;
      try {
        found = arrived.poll(until - System.nanoTime(), TimeUnit.NANOSECONDS);
      } catch (InterruptedException ended) {
        Thread.currentThread().interrupt();
        throw new IOException("the task was interrupted", ended);
      }
      if (found == null) {
        row = rows;
        return false;
      }
      if (found instanceof PythonFailure failure) {
        throw failure.inTask();
      }
      if (found instanceof Throwable failure) {
        throw new IOException("the rows of the Python process cannot be received", failure);
      }
      load((byte[]) found);
      if (rows == 0 && until - System.nanoTime() <= 0) {
        row = rows;
        entry = Math.max(entry, next);
        return false;
      }
    }
    entry = numbers.get(row) + 1;
    return true;
  }

  private void load(byte[] content) throws IOException {
    release();
    arrow = new ArrowStreamReader(new ByteArrayInputStream(content), memory);
    if (!arrow.loadNextBatch()) {
      throw new IOException("the Python process ended within a record batch");
    }
    VectorSchemaRoot root = arrow.getVectorSchemaRoot();
    ColumnVector[] vectors = new ColumnVector[columns];
    for (int i = 0; i < columns; i++) {
      vectors[i] = new ArrowColumnVector(root.getVector(i));
    }
    numbers = (BigIntVector) root.getVector(columns);
    rows = root.getRowCount();
    batch = new ColumnarBatch(vectors, rows);
    row = -1;
    String then = root.getSchema().getCustomMetadata().get(NEXT);
    next = then == null ? 0 : Long.parseLong(then);
  }

  @Override
  public InternalRow get() {
    return batch.getRow(row);
  }

  @Override
  public PartitionOffset getOffset() {
    return new RealTimeStream.Reached(entry);
  }

  private void release() throws IOException {
    if (arrow != null) {
      arrow.close();
      arrow = null;
    }
  }

  @Override
  public void close() throws IOException {
    process.close();
    // It may wait for room.
    receiving.interrupt();
    release();
    memory.close();
  }
}
