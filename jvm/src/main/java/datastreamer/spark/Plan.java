package datastreamer.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.List;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.connector.read.InputPartition;

/** The plan of a scan, as Python made it. */
final class Plan {
  /** A pickle of all parts of the table, for the plans of other scans of it. */
  final String all;

  /** A pickle of the reader in Python. */
  final String reader;

  /** Which entries are rows of the table of entries; null: all. */
  final Selection where;

  final List<Part> parts = new ArrayList<>();

  private final long partBytes;
  private final long openCost;

  Plan(JsonNode found) {
    all = found.get("plan").textValue();
    reader = found.get("reader").textValue();
    where = Selection.of(found);
    partBytes = found.get("partBytes").longValue();
    openCost = found.get("openCost").longValue();
    List<FileState> files = new ArrayList<>();
    for (JsonNode file : found.get("files")) {
      files.add(new FileState(file));
    }
    for (JsonNode part : found.get("parts")) {
      parts.add(new Part(files.get(part.get("file").intValue()), part));
    }
  }

  /** What tasks read. */
  InputPartition[] groups() {
    int tasks = SparkContext.getOrCreate().defaultParallelism();
    return PartGroup.of(parts, partBytes, openCost, tasks);
  }

  /** The bytes that are read. */
  long size() {
    return parts.stream().mapToLong(Part::size).sum();
  }

  /** The number of entries that are read. */
  long entries() {
    // The parts of a file that belong together have the same first and last entry.
    long entries = 0;
    Part before = null;
    for (Part part : parts) {
      if (before == null || before.file != part.file) {
        entries += part.end - part.start;
      }
      before = part;
    }
    return entries;
  }
}
