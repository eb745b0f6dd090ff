package datastreamer.spark;

/**
 * A page, a header or an event is not plainly as it has to be.
 *
 * <p>Java decides nothing about it: Python reads the part in its place, and says what is wrong.
 */
final class Doubt extends Exception {
  private static final long serialVersionUID = 1;

  Doubt(String why) {
    super(why, null, false, false);
  }
}
