package datastreamer.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.ReadMaxBytes;
import org.apache.spark.sql.connector.read.streaming.ReadMaxRows;
import org.apache.spark.sql.connector.read.streaming.ReportsSourceMetrics;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;
import org.apache.spark.sql.types.StructType;

/**
 * A file that a streaming query follows.
 *
 * <p>A process in Python of its own determines the bounds of batches, so that checkpoints are those
 * of the source in Python; Java reads their parts.
 */
class FollowedStream
    implements MicroBatchStream, SupportsTriggerAvailableNow, ReportsSourceMetrics {
  /** An offset as Python writes it. */
  private static final class Place extends Offset {
    private final String text;

    Place(String text) {
      this.text = text;
    }

    @Override
    public String json() {
      return text;
    }
  }

  final StructType columns;
  private final String description;
  private final PythonProcess process;
  private final JsonNode begun;

  /** The last place that `metrics` was asked about, and when, in ns. */
  private long reported = -1;

  private long reportedAt;

  FollowedStream(Map<String, ?> request, StructType columns, String description) {
    this.columns = columns;
    this.description = description;
    try {
      process = PythonProcess.take(PythonProcess.python());
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
    try {
      begun = ask(request);
    } catch (RuntimeException error) {
      process.close();
      throw error;
    }
  }

  final synchronized JsonNode ask(Map<String, ?> request) {
    try {
      return process.answer(request);
    } catch (PythonFailure failure) {
      throw failure.inTask();
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  static Map<String, Object> request(String what) {
    Map<String, Object> request = new HashMap<>();
    request.put("do", what);
    return request;
  }

  static Offset place(JsonNode answer) {
    JsonNode text = answer.get("offset");
    return text.isNull() ? null : new Place(text.textValue());
  }

  @Override
  public Offset initialOffset() {
    return place(ask(request("initialOffset")));
  }

  @Override
  public Offset deserializeOffset(String json) {
    return new Place(json);
  }

  @Override
  public ReadLimit getDefaultReadLimit() {
    if (begun.hasNonNull("maxRows")) {
      return ReadLimit.maxRows(begun.get("maxRows").longValue());
    }
    if (begun.hasNonNull("maxBytes")) {
      return ReadLimit.maxBytes(begun.get("maxBytes").longValue());
    }
    return ReadLimit.allAvailable();
  }

  @Override
  public void prepareForTriggerAvailableNow() {
    ask(request("availableNow"));
  }

  @Override
  public Offset latestOffset(Offset start, ReadLimit limit) {
    Map<String, Object> request = request("latestOffset");
    request.put("start", start.json());
    request.put("maxRows", limit instanceof ReadMaxRows rows ? rows.maxRows() : null);
    request.put("maxBytes", limit instanceof ReadMaxBytes bytes ? bytes.maxBytes() : null);
    return place(ask(request));
  }

  @Override
  public Offset latestOffset() {
    throw new UnsupportedOperationException("an offset without a limit");
  }

  @Override
  public Offset reportLatestOffset() {
    return place(ask(request("reportLatestOffset")));
  }

  @Override
  public synchronized Map<String, String> metrics(Optional<Offset> consumed) {
    if (consumed.isEmpty()) {
      return Map.of();
    }
    long entry = entry(consumed.get());
    long now = System.nanoTime();
    Map<String, String> found = new TreeMap<>();
    found.put("entriesBehind", Long.toString(Math.max(0, entry(reportLatestOffset()) - entry)));
    if (reported >= 0 && now > reportedAt) {
      double rate = Math.max(0, entry - reported) * 1e9 / (now - reportedAt);
      found.put("entriesPerSecond", String.format(Locale.ROOT, "%.1f", rate));
    }
    reported = entry;
    reportedAt = now;
    return found;
  }

  private static long entry(Offset offset) {
    return PythonProcess.parsed(offset.json()).get("entry").longValue();
  }

  @Override
  public String toString() {
    return description;
  }

  @Override
  public InputPartition[] planInputPartitions(Offset start, Offset end) {
    Map<String, Object> request = request("partitions");
    request.put("start", start.json());
    request.put("end", end.json());
    return new Plan(ask(request)).groups();
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    String reader = begun.get("reader").textValue();
    return new PartReaderFactory(
        ScanContext.inDriver(columns, reader, Selection.of(begun), Long.MAX_VALUE));
  }

  @Override
  public void commit(Offset end) {
    // The stream keeps all entries, and Spark keeps the offset.
  }

  @Override
  public void stop() {
    process.close();
  }
}
