package datastreamer.spark;

import java.util.Map;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** `format("datastream")`: Spark prefers it to the source in Python of the same name. */
public final class DatastreamProvider implements TableProvider, DataSourceRegister {
  static final String NAME = "datastream";

  private final PythonDataSourceV2 python = python();

  private static PythonDataSourceV2 python() {
    PythonDataSourceV2 python = new PythonDataSourceV2();
    python.setShortName(NAME);
    return python;
  }

  /** A table of these columns, which the source in Python reads. */
  static PythonTable python(StructType schema, CaseInsensitiveStringMap options) {
    return (PythonTable) python().getTable(schema, new Transform[0], options);
  }

  @Override
  public String shortName() {
    return NAME;
  }

  @Override
  public boolean supportsExternalMetadata() {
    return true;
  }

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    CaseInsensitiveStringMap kept = DatastreamTable.optionsOf(options);
    return DatastreamTable.isNative(kept)
        ? DatastreamTable.schema(kept, false)
        : python.inferSchema(kept);
  }

  @Override
  public Table getTable(
      StructType schema, Transform[] partitioning, Map<String, String> properties) {
    CaseInsensitiveStringMap options = DatastreamTable.optionsOf(properties);
    return new DatastreamTable(
        options, schema, (PythonTable) python.getTable(schema, partitioning, options));
  }
}
