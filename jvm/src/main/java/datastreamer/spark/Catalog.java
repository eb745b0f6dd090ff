package datastreamer.spark;

import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.TreeMap;
import org.apache.spark.sql.catalyst.analysis.NoSuchNamespaceException;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.NamespaceChange;
import org.apache.spark.sql.connector.catalog.SupportsNamespaces;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Named streams in SQL: `SELECT * FROM ds.mainnet.blocks`, where `spark.sql.catalog.ds` names this
 * class, and `spark.sql.catalog.ds.mainnet.path` a stream. A stream is a namespace, whose tables are
 * those of every stream.
 */
public final class Catalog implements TableCatalog, SupportsNamespaces {
  /** The options of each stream. */
  private final Map<String, Map<String, String>> streams =
      new TreeMap<>(String.CASE_INSENSITIVE_ORDER);

  private String name;
  private List<String> tables;

  @Override
  public void initialize(String name, CaseInsensitiveStringMap options) {
    this.name = name;
    options
        .asCaseSensitiveMap()
        .forEach(
            (key, value) -> {
              String[] words = key.split("\\.", 2);
              if (words.length < 2 || words[0].isEmpty() || words[1].isEmpty()) {
                throw new IllegalArgumentException(
                    String.format(
                        "spark.sql.catalog.%1$s.%2$s: a setting of this catalog names a stream and "
                            + "one of its options, such as spark.sql.catalog.%1$s.mainnet.path",
                        name, key));
              }
              streams.computeIfAbsent(words[0], it -> options()).put(words[1], value);
            });
  }

  private static Map<String, String> options() {
    return new TreeMap<>(String.CASE_INSENSITIVE_ORDER);
  }

  @Override
  public String name() {
    return name;
  }

  private Map<String, String> stream(String[] namespace) throws NoSuchNamespaceException {
    Map<String, String> found = namespace.length == 1 ? streams.get(namespace[0]) : null;
    if (found == null) {
      throw new NoSuchNamespaceException(namespace);
    }
    return found;
  }

  private synchronized List<String> tables() {
    if (tables == null) {
      tables = DatastreamTable.names();
    }
    return tables;
  }

  @Override
  public Identifier[] listTables(String[] namespace) throws NoSuchNamespaceException {
    stream(namespace);
    return tables().stream()
        .map(table -> Identifier.of(namespace, table))
        .toArray(Identifier[]::new);
  }

  @Override
  public Table loadTable(Identifier ident) throws NoSuchTableException {
    return load(ident, Map.of());
  }

  /** The table as it was when the stream had this number of entries. */
  @Override
  public Table loadTable(Identifier ident, String version) throws NoSuchTableException {
    return load(ident, Map.of("endingOffset", version));
  }

  /** The table of the entries that were committed before a time, in microseconds. */
  @Override
  public Table loadTable(Identifier ident, long timestamp) throws NoSuchTableException {
    return load(ident, Map.of("endingTimestamp", Long.toString(timestamp / 1000)));
  }

  private Table load(Identifier ident, Map<String, String> more) throws NoSuchTableException {
    String table = ident.name().toLowerCase(Locale.ROOT);
    Map<String, String> options;
    try {
      options = options();
      options.putAll(stream(ident.namespace()));
    } catch (NoSuchNamespaceException error) {
      throw new NoSuchTableException(ident);
    }
    if (!tables().contains(table)) {
      throw new NoSuchTableException(ident);
    }
    options.put("table", table);
    options.putAll(more);
    StructType schema = DatastreamTable.schema(new CaseInsensitiveStringMap(options), true);
    // A provider keeps the plan of the source in Python, which is that of one table.
    return new DatastreamProvider().getTable(schema, new Transform[0], options);
  }

  @Override
  public String[][] listNamespaces() {
    return streams.keySet().stream().map(it -> new String[] {it}).toArray(String[][]::new);
  }

  @Override
  public String[][] listNamespaces(String[] namespace) throws NoSuchNamespaceException {
    if (namespace.length == 0) {
      return listNamespaces();
    }
    stream(namespace);
    return new String[0][];
  }

  @Override
  public Map<String, String> loadNamespaceMetadata(String[] namespace)
      throws NoSuchNamespaceException {
    Map<String, String> shown = options();
    stream(namespace).forEach((option, value) -> shown.put(option, DatastreamTable.shown(value)));
    return shown;
  }

  private UnsupportedOperationException refused(String what) {
    return new UnsupportedOperationException(
        String.format(
            "%2$s: the streams of the catalog %1$s are its settings, spark.sql.catalog.%1$s.STREAM"
                + ".OPTION, and their tables cannot be changed",
            name, what));
  }

  @Override
  @SuppressWarnings("deprecation") // its successor is of a later version
  public Table createTable(
      Identifier ident, Column[] columns, Transform[] partitions, Map<String, String> properties) {
    throw refused("CREATE TABLE");
  }

  @Override
  public Table alterTable(Identifier ident, TableChange... changes) {
    throw refused("ALTER TABLE");
  }

  @Override
  public boolean dropTable(Identifier ident) {
    throw refused("DROP TABLE");
  }

  @Override
  public void renameTable(Identifier from, Identifier to) {
    throw refused("RENAME TABLE");
  }

  @Override
  public void createNamespace(String[] namespace, Map<String, String> metadata) {
    throw refused("CREATE NAMESPACE");
  }

  @Override
  public void alterNamespace(String[] namespace, NamespaceChange... changes) {
    throw refused("ALTER NAMESPACE");
  }

  @Override
  public boolean dropNamespace(String[] namespace, boolean cascade) {
    throw refused("DROP NAMESPACE");
  }
}
