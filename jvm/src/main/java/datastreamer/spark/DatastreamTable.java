package datastreamer.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.URL;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.stream.IntStream;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.connector.catalog.CatalogV2Util;
import org.apache.spark.sql.connector.catalog.MetadataColumn;
import org.apache.spark.sql.connector.catalog.SupportsMetadataColumns;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import scala.jdk.javaapi.CollectionConverters;

/** A table of a stream. Java reads its files; for everything else the source in Python is used. */
final class DatastreamTable implements SupportsRead, SupportsWrite, SupportsMetadataColumns {
  /** Whether Spark has the interfaces of Real-Time Mode: 4.0 has not. */
  private static final boolean HAS_REAL_TIME =
      DatastreamTable.class
              .getClassLoader()
              .getResource(
                  "org/apache/spark/sql/connector/read/streaming/SupportsRealTimeMode.class")
          != null;

  private final CaseInsensitiveStringMap options;
  private final StructType schema;
  private final PythonTable python;

  /** This table with the options of single queries, too. */
  private final Map<CaseInsensitiveStringMap, DatastreamTable> others = new ConcurrentHashMap<>();

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

  /**
   * The options of a table. Spark's own catalog keeps them among the properties, some with a prefix,
   * and its properties of each table beside them.
   */
  static CaseInsensitiveStringMap optionsOf(Map<String, String> properties) {
    Map<String, String> found = new HashMap<>();
    properties.forEach(
        (name, value) -> {
          if (!CatalogV2Util.TABLE_RESERVED_PROPERTIES().contains(name)) {
            found.put(name.replaceFirst("^option\\.", ""), value);
          }
        });
    if (new CaseInsensitiveStringMap(properties).containsKey("option.server")) {
      found.remove("path"); // the place in the warehouse, which that catalog adds
    }
    return new CaseInsensitiveStringMap(found);
  }

  /** All columns of the table that options name; with comments on them, also of one of a server. */
  static StructType schema(CaseInsensitiveStringMap options, boolean comments) {
    Map<String, Object> request = request("schema", options);
    request.put("comments", comments);
    return (StructType) DataType.fromJson(ask(request).get("schema").textValue());
  }

  /** The names of the tables that every stream has. */
  static List<String> names() {
    JsonNode found = ask(new HashMap<>(Map.of("do", "tables"))).get("tables");
    return IntStream.range(0, found.size()).mapToObj(it -> found.get(it).textValue()).toList();
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
    // Up to Spark 4.2 a streaming query does not say whether it names the columns of places.
    StructType all = metadataColumns().length == 0 ? columns : PlaceColumn.addedTo(columns);
    Map<String, Object> request = request("follow", options);
    request.put("schema", all.json());
    return HAS_REAL_TIME
        ? RealTimeStream.of(request, all, columns, toString())
        : new FollowedStream(request, all, toString());
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

  /** Those of files: servers and the source in Python have none. */
  @Override
  public MetadataColumn[] metadataColumns() {
    return isNative(options) && !options.containsKey("server")
        ? PlaceColumn.ALL
        : new MetadataColumn[0];
  }

  @Override
  public Set<TableCapability> capabilities() {
    return EnumSet.of(
        TableCapability.BATCH_READ,
        TableCapability.BATCH_WRITE,
        TableCapability.MICRO_BATCH_READ,
        TableCapability.STREAMING_WRITE,
        TableCapability.TRUNCATE,
        // Rows of `type` and `data` become entries of any table's stream.
        TableCapability.ACCEPT_ANY_SCHEMA);
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    CaseInsensitiveStringMap all = with(options);
    if (!isNative(all)) {
      // The plan may name the columns of places, for which Spark does not ask this source.
      PythonTable source =
          metadataColumns().length == 0
              ? python
              : DatastreamProvider.python(PlaceColumn.addedTo(schema), all);
      return source.newScanBuilder(all);
    }
    sendJar();
    // With the same options all scans of the table have one plan.
    return new DatastreamScanBuilder(
        all.equals(this.options)
            ? this
            : others.computeIfAbsent(all, it -> new DatastreamTable(it, schema, python)));
  }

  /** Sends executors the jar of this class, which may be in the class path of the driver alone. */
  private static void sendJar() {
    SparkContext spark = SparkContext.getOrCreate();
    URL jar = DatastreamTable.class.getProtectionDomain().getCodeSource().getLocation();
    String name = jar.getPath().substring(jar.getPath().lastIndexOf('/'));
    List<String> sent = CollectionConverters.asJava(spark.listJars());
    if (!spark.isLocal() && sent.stream().noneMatch(it -> it.endsWith(name))) {
      spark.addJar(jar.toString());
    }
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    return python.newWriteBuilder(new Write(info.queryId(), info.schema(), with(info.options())));
  }

  /** The options, and those of one query: of a table of a catalog Spark hands on only these. */
  private CaseInsensitiveStringMap with(CaseInsensitiveStringMap more) {
    Map<String, String> all = new TreeMap<>(String.CASE_INSENSITIVE_ORDER);
    all.putAll(options.asCaseSensitiveMap());
    all.putAll(more.asCaseSensitiveMap());
    return new CaseInsensitiveStringMap(all);
  }

  /** What Spark says of a write. */
  private record Write(String queryId, StructType schema, CaseInsensitiveStringMap options)
      implements LogicalWriteInfo {}

  @Override
  public Map<String, String> properties() {
    Map<String, String> shown = new TreeMap<>(options.asCaseSensitiveMap());
    shown.replaceAll((option, value) -> shown(value));
    return shown;
  }

  @Override
  public String toString() {
    return name() + " " + properties();
  }

  /**
   * An option's value without the keys that a URI may have. A secret may have slashes: what follows
   * a colon is one, unless it is a port.
   */
  static String shown(String value) {
    return value.contains("://")
        ? value
            .replaceAll("(?<=://)(?:[^/\"]*|[^/:\"]*:(?!\\d+/)[^\"]*)@", "")
            .replaceAll("[?].*", "")
        : value;
  }
}
