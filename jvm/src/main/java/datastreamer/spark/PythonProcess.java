package datastreamer.spark;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.StreamReadConstraints;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.Closeable;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.LinkedBlockingDeque;
import org.apache.spark.SparkEnv;
import org.apache.spark.api.python.PythonUtils;
import scala.jdk.javaapi.CollectionConverters;

/**
 * A process of `datastreamer.spark.native.process`, which answers one request at a time.
 *
 * <p>`take` one and `giveBack` after its last answer; `close` it if an answer was not read to its
 * end. A process ends with this JVM, because its standard input does.
 */
final class PythonProcess implements Closeable {
  /** What `process.py` of another version of the package may not understand, and says so. */
  private static final String PROTOCOL = "6";

  /** How many processes wait for the next request: each holds some 100 MB. */
  private static final int MOST_IDLE = 2;

  // The plan of many files is one long text.
  private static final ObjectMapper JSON =
      new ObjectMapper(
          JsonFactory.builder()
              .streamReadConstraints(
                  StreamReadConstraints.builder().maxStringLength(Integer.MAX_VALUE).build())
              .build());

  private static final LinkedBlockingDeque<PythonProcess> IDLE =
      new LinkedBlockingDeque<>(MOST_IDLE);

  private final String python;
  private final Process process;
  private final DataOutputStream requests;
  private final DataInputStream answers;

  private PythonProcess(String python) throws IOException {
    this.python = python;
    ProcessBuilder builder =
        new ProcessBuilder(python, "-m", "datastreamer.spark.native.process", PROTOCOL)
            .redirectError(ProcessBuilder.Redirect.INHERIT);
    Map<String, String> environment = builder.environment();
    String given = environment.getOrDefault("PYTHONPATH", "");
    environment.put(
        "PYTHONPATH",
        PythonUtils.mergePythonPaths(
            CollectionConverters.asScala(
                    java.util.List.of(given, PythonUtils.sparkPythonPath()))
                .toSeq()));
    process = builder.start();
    requests = new DataOutputStream(new BufferedOutputStream(process.getOutputStream()));
    answers = new DataInputStream(new BufferedInputStream(process.getInputStream(), 1 << 16));
  }

  /** In the driver: the interpreter that Spark's own Python workers run on, on all machines. */
  static String python() {
    String found = SparkEnv.get().conf().get("spark.pyspark.python", "");
    if (found.isEmpty()) {
      found = System.getenv().getOrDefault("PYSPARK_PYTHON", "");
    }
    return found.isEmpty() ? "python3" : found;
  }

  static PythonProcess take(String python) throws IOException {
    PythonProcess idle = IDLE.poll();
    if (idle != null && idle.process.isAlive() && idle.python.equals(python)) {
      return idle;
    }
    if (idle != null) {
      idle.close();
    }
    return new PythonProcess(python);
  }

  /** A text of JSON that Python wrote. */
  static JsonNode parsed(String text) {
    try {
      return JSON.readTree(text);
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  void giveBack() {
    if (!IDLE.offerFirst(this)) {
      close();
    }
  }

  /** In the driver: the answer in JSON to one request. */
  static JsonNode ask(Map<String, ?> request) throws IOException, PythonFailure {
    PythonProcess process = take(python());
    try {
      JsonNode answer = process.answer(request);
      process.giveBack();
      return answer;
    } catch (PythonFailure failure) {
      process.giveBack();
      throw failure;
    } catch (IOException error) {
      process.close();
      throw error;
    }
  }

  JsonNode answer(Map<String, ?> request) throws IOException, PythonFailure {
    send(request);
    return JSON.readTree(receive().content());
  }

  void send(Map<String, ?> request) throws IOException {
    byte[] packed = JSON.writeValueAsBytes(request);
    try {
      requests.writeInt(packed.length);
      requests.write(packed);
      requests.flush();
    } catch (IOException error) {
      throw ended(error);
    }
  }

  /** A part of an answer. */
  record Frame(boolean isLast, byte[] content) {}

  /** The next part of the answer. */
  Frame receive() throws IOException, PythonFailure {
    try {
      byte letter = answers.readByte();
      int length = answers.readInt();
      byte[] content = answers.readNBytes(length);
      if (content.length < length) {
        throw new EOFException();
      }
      if (letter == 'E') {
        throw new PythonFailure(new String(content, StandardCharsets.UTF_8));
      }
      return new Frame(letter == 'J', content);
    } catch (IOException error) {
      throw ended(error);
    }
  }

  private IOException ended(IOException error) {
    return new IOException(
        "the Python process of datastreamer ended: its last lines are in the log. It needs the "
            + "package datastreamer with the extra spark in the interpreter that PYSPARK_PYTHON "
            + "or spark.pyspark.python names, here "
            + python,
        error);
  }

  @Override
  public void close() {
    process.destroyForcibly();
  }
}
