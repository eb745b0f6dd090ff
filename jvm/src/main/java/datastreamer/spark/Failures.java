package datastreamer.spark;

/** Raises exceptions that Spark's interfaces do not declare, and that Spark itself raises there. */
final class Failures {
  private Failures() {}

  /** To be thrown; throws the error itself, whether it is checked or not. */
  @SuppressWarnings("unchecked")
  static <E extends Throwable> RuntimeException unchecked(Throwable error) throws E {
    throw (E) error;
  }
}
