package datastreamer.spark;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.connector.read.InputPartition;

/** Parts that one task reads, one after the other: small files share a task. */
final class PartGroup implements InputPartition {
  private static final long serialVersionUID = 1;

  /** What opening a file costs, in bytes, as for the source in Python. */
  private static final long OPEN_COST = 1 << 20;

  final ArrayList<Part> parts = new ArrayList<>();

  /** Groups of at most `most` bytes, or of fewer if that leaves tasks without work. */
  static InputPartition[] of(List<Part> parts, long most, int tasks) {
    long total = parts.stream().mapToLong(part -> part.size() + OPEN_COST).sum();
    long size = Math.min(most, Math.max(OPEN_COST, total / tasks));
    List<PartGroup> groups = new ArrayList<>();
    long filled = Long.MAX_VALUE;
    for (Part part : parts) {
      if (filled > size - part.size() - OPEN_COST) {
        groups.add(new PartGroup());
        filled = 0;
      }
      groups.get(groups.size() - 1).parts.add(part);
      filled += part.size() + OPEN_COST;
    }
    return groups.toArray(new InputPartition[0]);
  }
}
