package datastreamer.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Serializable;
import java.util.Base64;

/** An archive as Python found it when the scan was planned: its header page and its objects. */
final class ArchiveState implements Serializable {
  private static final long serialVersionUID = 1;

  final byte[] header;
  final String[] objects;

  ArchiveState(JsonNode found) {
    header = Base64.getDecoder().decode(found.get("header").textValue());
    objects = new String[found.get("objects").size()];
    for (int i = 0; i < objects.length; i++) {
      objects[i] = found.get("objects").get(i).textValue();
    }
  }
}
