package datastreamer.spark;

import java.math.BigInteger;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.sources.EqualNullSafe;
import org.apache.spark.sql.sources.EqualTo;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.sources.GreaterThan;
import org.apache.spark.sql.sources.GreaterThanOrEqual;
import org.apache.spark.sql.sources.In;
import org.apache.spark.sql.sources.LessThan;
import org.apache.spark.sql.sources.LessThanOrEqual;

/** The filters that limit a column of integers, as Python understands them. */
final class NumberFilters {
  final List<Filter> filters = new ArrayList<>();

  /** The limits, by filter: a column and the least and the greatest value (null: no limit). */
  final List<Map<String, Object>> limits = new ArrayList<>();

  NumberFilters(Filter[] given) {
    for (Filter filter : given) {
      Map<String, Object> limit = limit(filter);
      if (limit != null) {
        filters.add(filter);
        limits.add(limit);
      }
    }
  }

  private static Map<String, Object> limit(Filter filter) {
    if (filter instanceof EqualTo is) {
      return between(is.attribute(), is.value(), is.value());
    } else if (filter instanceof EqualNullSafe is) {
      return between(is.attribute(), is.value(), is.value());
    } else if (filter instanceof GreaterThan above) {
      return between(above.attribute(), plus(above.value(), 1), null);
    } else if (filter instanceof GreaterThanOrEqual from) {
      return between(from.attribute(), from.value(), null);
    } else if (filter instanceof LessThan below) {
      return between(below.attribute(), null, plus(below.value(), -1));
    } else if (filter instanceof LessThanOrEqual to) {
      return between(to.attribute(), null, to.value());
    } else if (filter instanceof In in) {
      return around(in);
    }
    return null;
  }

  private static Map<String, Object> around(In in) {
    Object[] values = in.values();
    if (values.length == 0 || !Arrays.stream(values).allMatch(NumberFilters::isNumber)) {
      return null;
    }
    long[] numbers =
        Arrays.stream(values).mapToLong(value -> ((Number) value).longValue()).sorted().toArray();
    return between(in.attribute(), numbers[0], numbers[numbers.length - 1]);
  }

  private static boolean isNumber(Object value) {
    return value instanceof Long || value instanceof Integer;
  }

  /** A limit plus one or minus one, which may be too large for a long. */
  private static Object plus(Object value, int more) {
    return isNumber(value)
        ? BigInteger.valueOf(((Number) value).longValue()).add(BigInteger.valueOf(more))
        : value;
  }

  private static Map<String, Object> between(String column, Object least, Object most) {
    for (Object limit : new Object[] {least, most}) {
      if (limit != null && !isNumber(limit) && !(limit instanceof BigInteger)) {
        return null;
      }
    }
    if (least == null && most == null) {
      return null;
    }
    Map<String, Object> limits = new HashMap<>();
    limits.put("column", column);
    limits.put("least", least);
    limits.put("most", most);
    return limits;
  }
}
