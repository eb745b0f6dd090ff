package datastreamer.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.stream.IntStream;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** A table of a stream. Java reads its files; for everything else the source in Python is used. */
final class DatastreamTable implements SupportsRead, SupportsWrite {
  private final CaseInsensitiveStringMap options;
  private final StructType schema;
  private final PythonTable python;

  /** A pickle of the parts that the first plan found: all scans of the table read the same. */
  private String parts;

  /** The last plans, by their requests. */
  private final Map<Object, Plan> plans =
      new LinkedHashMap<>() {
        private static final long serialVersionUID = 1;

        @Override
        protected boolean removeEldestEntry(Map.Entry<Object, Plan> eldest) {
          return size() > 4;
        }
      };

  DatastreamTable(CaseInsensitiveStringMap options, StructType schema, PythonTable python) {
    this.options = options;
    this.schema = schema;
    this.python = python;
  }

  /** Whether Java reads what these options name. */
  static boolean isNative(CaseInsensitiveStringMap options) {
    String reader = options.getOrDefault("reader", "auto").strip().toLowerCase(Locale.ROOT);
    return reader.equals("native")
        || (!reader.equals("python")
            && !options.containsKey("server")
            && !options.getOrDefault("changes", "").strip().equalsIgnoreCase("true")
            && isLocal(options));
  }

  private static boolean isLocal(CaseInsensitiveStringMap options) {
    for (String name : List.of("path", "paths", "file")) {
      String given = options.getOrDefault(name, "");
      if (given.replace("file://", "").contains("://")) {
        return false;
      }
    }
    return true;
  }

  /** The request that Python answers, with these options. */
  static Map<String, Object> request(String what, CaseInsensitiveStringMap options) {
    Map<String, Object> request = new HashMap<>();
    request.put("do", what);
    request.put("options", options.asCaseSensitiveMap());
    return request;
  }

  /** Whether a streaming query that reads the table begins at its end. */
  boolean startsAtEnd() {
    return options.getOrDefault("startingOffset", "").strip().equalsIgnoreCase("latest");
  }

  /**
   * The values of functions over all rows as they are when it is asked for; null if tasks have to
   * find them.
   */
  synchronized Object[] aggregate(List<List<String>> functions) {
    Map<String, Object> request = request("aggregate", options);
    request.put("table", schema.json());
    request.put("functions", functions);
    putPlan(request);
    JsonNode found = ask(request);
    parts = found.get("plan").textValue();
    JsonNode values = found.get("values");
    return values.isNull()
        ? null
        : IntStream.range(0, values.size())
            .mapToObj(it -> values.get(it).isNull() ? null : (Object) values.get(it).longValue())
            .toArray();
  }

  private void putPlan(Map<String, Object> request) {
    request.put("plan", parts);
    request.put("tasks", SparkContext.getOrCreate().defaultParallelism());
  }

  private static JsonNode ask(Map<String, Object> request) {
    try {
      return PythonProcess.ask(request);
    } catch (PythonFailure failure) {
      throw Failures.unchecked(failure.inPlan());
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  synchronized Plan plan(StructType columns, List<Map<String, Object>> filters) {
    Map<String, Object> request = request("scan", options);
    request.put("schema", columns.json());
    request.put("table", schema.json());
    request.put("filters", filters);
    Object key = List.of(columns, filters);
    Plan known = plans.get(key);
    if (known != null) {
      return known;
    }
    putPlan(request);
    Plan plan = new Plan(ask(request));
    parts = plan.all;
    plans.put(key, plan);
    return plan;
  }

  FollowedStream follow(StructType columns) {
    Map<String, Object> request = request("follow", options);
    request.put("schema", columns.json());
    return new FollowedStream(request, columns);
  }

  @Override
  public String name() {
    return DatastreamProvider.NAME;
  }

  @Override
  @SuppressWarnings("deprecation") // its successor returns the same columns in another form
  public StructType schema() {
    return schema;
  }

  @Override
  public Set<TableCapability> capabilities() {
    return EnumSet.of(
        TableCapability.BATCH_READ,
        TableCapability.BATCH_WRITE,
        TableCapability.MICRO_BATCH_READ,
        TableCapability.STREAMING_WRITE,
        TableCapability.TRUNCATE);
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    return isNative(options) ? new DatastreamScanBuilder(this) : python.newScanBuilder(options);
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    return python.newWriteBuilder(info);
  }
}
