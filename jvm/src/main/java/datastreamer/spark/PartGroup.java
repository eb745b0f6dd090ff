package datastreamer.spark;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.connector.read.InputPartition;

/** Parts that one task reads, one after the other: small files share a task. */
final class PartGroup implements InputPartition {
  private static final long serialVersionUID = 1;

  final ArrayList<Part> parts = new ArrayList<>();

  /**
   * Groups of at most `most` bytes, or of fewer if that leaves tasks without work; to open a file
   * counts as `openCost` bytes.
   */
  static InputPartition[] of(List<Part> parts, long most, long openCost, int tasks) {
    long total = parts.stream().mapToLong(part -> part.size() + openCost).sum();
    long size = Math.min(most, Math.max(openCost, total / tasks));
    List<PartGroup> groups = new ArrayList<>();
    long filled = Long.MAX_VALUE;
    for (Part part : parts) {
      if (filled > size - part.size() - openCost) {
        groups.add(new PartGroup());
        filled = 0;
      }
      groups.get(groups.size() - 1).parts.add(part);
      filled += part.size() + openCost;
    }
    return groups.toArray(new InputPartition[0]);
  }
}
