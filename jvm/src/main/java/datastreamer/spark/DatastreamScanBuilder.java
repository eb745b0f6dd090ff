package datastreamer.spark;

import java.util.OptionalLong;
import org.apache.spark.sql.connector.expressions.aggregate.AggregateFunc;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.expressions.aggregate.CountStar;
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
  private OptionalLong count = OptionalLong.empty();

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
    AggregateFunc[] functions = aggregation.aggregateExpressions();
    return functions.length == 1
        && functions[0] instanceof CountStar
        && aggregation.groupByExpressions().length == 0
        && filters.filters.isEmpty();
  }

  @Override
  public boolean pushAggregation(Aggregation aggregation) {
    if (supportCompletePushDown(aggregation)) {
      count = table.count();
    }
    return count.isPresent();
  }

  @Override
  public Scan build() {
    return count.isPresent()
        ? new CountScan(count.getAsLong())
        : new DatastreamScan(table, columns, filters, limit);
  }
}
