package datastreamer.spark;

import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.PartitionOffset;
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeMode;
import org.apache.spark.sql.types.StructType;

/**
 * A stream that a query may follow in Real-Time Mode, too: one task gets the rows as they are
 * committed. Spark 4.0 lacks the interface.
 */
final class RealTimeStream extends FollowedStream implements SupportsRealTimeMode {
  private final Map<String, Object> request;
  private final StructType live;
  private boolean isRealTime;

  private RealTimeStream(
      Map<String, ?> request, StructType columns, StructType live, String description) {
    super(request, columns, description);
    this.live = live;
    this.request = new HashMap<>(request);
  }

  /**
   * A stream of these columns; in Real-Time Mode of those of `live`. To verify a caller, the JVM
   * does not need this class, which Spark 4.0 could not load.
   */
  static FollowedStream of(
      Map<String, ?> request, StructType columns, StructType live, String description) {
    return new RealTimeStream(request, columns, live, description);
  }

  /** Where a task has read to. */
  record Reached(long entry) implements PartitionOffset {}

  /** What the one task of a batch reads, in JSON of its request to Python. */
  record Live(String python, HashMap<String, Object> request, long entry, int columns)
      implements InputPartition {}

  @Override
  public void prepareForRealTimeMode() {
    isRealTime = true;
  }

  @Override
  public InputPartition[] planInputPartitions(Offset start) {
    Map<String, Object> asked = request("kept");
    asked.put("start", start.json());
    HashMap<String, Object> rows = new HashMap<>(request);
    rows.put("do", "live");
    rows.put("schema", live.json());
    rows.put("options", new HashMap<>((Map<?, ?>) request.get("options")));
    rows.put("start", start.json());
    long entry = ask(asked).get("entry").longValue();
    return new InputPartition[] {new Live(PythonProcess.python(), rows, entry, live.length())};
  }

  @Override
  public Offset mergeOffsets(PartitionOffset[] offsets) {
    Map<String, Object> asked = request("offset");
    asked.put("entry", ((Reached) offsets[0]).entry());
    return place(ask(asked));
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return isRealTime ? new LiveFactory() : super.createReaderFactory();
  }

  private static final class LiveFactory implements PartitionReaderFactory {
    private static final long serialVersionUID = 1;

    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      return new LiveReader((Live) partition);
    }
  }
}
