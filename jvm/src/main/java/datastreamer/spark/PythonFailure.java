package datastreamer.spark;

import java.util.Map;
import org.apache.spark.QueryContext;
import org.apache.spark.SparkException;
import org.apache.spark.SparkRuntimeException;
import org.apache.spark.sql.AnalysisException;

/** An error that Python raised; its message is the last line of the traceback. */
final class PythonFailure extends Exception {
  private static final long serialVersionUID = 1;

  // Spark's condition for errors of sources in Python.
  private static final String CONDITION = "PYTHON_DATA_SOURCE_ERROR";

  PythonFailure(String message) {
    super(message);
  }

  /** As Spark reports an error of a plan. */
  AnalysisException inPlan() {
    return new AnalysisException(CONDITION, parameters("plan"));
  }

  /** As Spark reports an error of a task. */
  SparkRuntimeException inTask() {
    return new SparkRuntimeException(CONDITION, parameters("read"), this, new QueryContext[0], "");
  }

  private scala.collection.immutable.Map<String, String> parameters(String action) {
    return SparkException.constructMessageParams(
        Map.of("action", action, "type", "datastream", "msg", getMessage() + "\n"));
  }
}
