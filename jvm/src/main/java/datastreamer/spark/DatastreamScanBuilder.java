package datastreamer.spark;

import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.aggregate.AggregateFunc;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.expressions.aggregate.CountStar;
import org.apache.spark.sql.connector.expressions.aggregate.Max;
import org.apache.spark.sql.connector.expressions.aggregate.Min;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.SupportsPushDownAggregates;
import org.apache.spark.sql.connector.read.SupportsPushDownFilters;
import org.apache.spark.sql.connector.read.SupportsPushDownLimit;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.types.StructType;

/** Collects what one scan of a table needs, and plans it. */
final class DatastreamScanBuilder
    implements ScanBuilder,
        SupportsPushDownFilters,
        SupportsPushDownRequiredColumns,
        SupportsPushDownLimit,
        SupportsPushDownAggregates {
  private final DatastreamTable table;
  private StructType columns;
  private NumberFilters filters = new NumberFilters(new Filter[0]);
  private long limit = Long.MAX_VALUE;
  private AggregateScan aggregates;

  DatastreamScanBuilder(DatastreamTable table) {
    this.table = table;
    columns = table.schema();
  }

  @Override
  public Filter[] pushFilters(Filter[] given) {
    filters = new NumberFilters(given);
    // They narrow what is read, and Spark applies all of them.
    return given;
  }

  @Override
  public Filter[] pushedFilters() {
    return filters.filters.toArray(new Filter[0]);
  }

  @Override
  public void pruneColumns(StructType required) {
    columns = required;
  }

  @Override
  public boolean pushLimit(int rows) {
    limit = rows;
    return true;
  }

  @Override
  public boolean supportCompletePushDown(Aggregation aggregation) {
    return aggregation.groupByExpressions().length == 0
        && filters.filters.isEmpty()
        && Arrays.stream(aggregation.aggregateExpressions()).allMatch(it -> function(it) != null);
  }

  /** The name of a function, and of its column (null: none); null if it is not one of ours. */
  private static List<String> function(AggregateFunc function) {
    if (function instanceof CountStar) {
      return Arrays.asList("count", null);
    }
    boolean isMin = function instanceof Min;
    if ((isMin || function instanceof Max)
        && function.children()[0] instanceof NamedReference column
        && column.fieldNames().length == 1) {
      return List.of(isMin ? "min" : "max", column.fieldNames()[0]);
    }
    return null;
  }

  @Override
  public boolean pushAggregation(Aggregation aggregation) {
    if (supportCompletePushDown(aggregation)) {
      AggregateFunc[] functions = aggregation.aggregateExpressions();
      Object[] values =
          table.aggregate(Arrays.stream(functions).map(it -> function(it)).toList());
      if (values != null) {
        String[] names = Arrays.stream(functions).map(Object::toString).toArray(String[]::new);
        aggregates = new AggregateScan(names, values);
      }
    }
    return aggregates != null;
  }

  @Override
  public Scan build() {
    return aggregates != null ? aggregates : new DatastreamScan(table, columns, filters, limit);
  }
}
