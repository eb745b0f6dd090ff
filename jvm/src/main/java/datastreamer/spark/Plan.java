package datastreamer.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.List;
import java.util.OptionalLong;
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

  /** About how many rows there are, and how many bytes in the columns that are read. */
  final OptionalLong rows;

  final OptionalLong bytes;

  final List<Part> parts = new ArrayList<>();

  private final long partBytes;
  private final long openCost;

  Plan(JsonNode found) {
    all = found.get("plan").textValue();
    reader = found.get("reader").textValue();
    where = Selection.of(found);
    rows = number(found.get("rows"));
    bytes = number(found.get("bytes"));
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

  private static OptionalLong number(JsonNode found) {
    // The parts of a streaming query come without.
    boolean isKnown = found != null && !found.isNull();
    return isKnown ? OptionalLong.of(found.longValue()) : OptionalLong.empty();
  }

  /** What tasks read. */
  InputPartition[] groups() {
    int tasks = SparkContext.getOrCreate().defaultParallelism();
    return PartGroup.of(parts, partBytes, openCost, tasks);
  }
}
