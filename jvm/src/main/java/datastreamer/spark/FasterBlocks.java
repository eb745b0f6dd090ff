package datastreamer.spark;

import java.lang.invoke.MethodHandle;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.MethodType;
import java.util.Arrays;
import java.util.Random;

/**
 * Finds out whether this JVM hashes faster with vectors.
 *
 * <p>Until its compiler has seen enough of them, and for good if it makes no machine code of them,
 * they are a hundred times as slow as without. So a thread tries them, once so much was hashed that
 * it pays off.
 */
public final class FasterBlocks {
  private static final long ENOUGH = 128L << 20;
  private static final int TURNS = 4000;

  private static volatile Xxh3.Blocks blocks = Xxh3::addBlocks;

  /** About how many bytes were hashed before the trial; negative: it has begun. */
  private static long hashed;

  private FasterBlocks() {}

  static Xxh3.Blocks found() {
    return blocks;
  }

  /** Note that bytes were hashed. */
  static void note(int size) {
    if (hashed >= 0 && (hashed += size) > ENOUGH) {
      hashed = Long.MIN_VALUE;
      Thread trial = new Thread(FasterBlocks::tryVectors, "datastreamer: how to hash");
      trial.setDaemon(true);
      trial.start();
    }
  }

  private static void tryVectors() {
    byte[] some = new byte[32 << 10];
    new Random(1).nextBytes(some);
    try {
      Xxh3.Blocks vectors = vectors();
      for (int turn = 0; turn < TURNS; turn++) {
        if (gain(vectors, some) > 1.5) {
          blocks = vectors;
          return;
        }
        // Tasks have the processor meanwhile, and the compiler.
        Thread.sleep(1);
      }
    } catch (ReflectiveOperationException | LinkageError | InterruptedException without) {
      // The JVM has no such module, or the machine no such vectors.
    }
  }

  private static Xxh3.Blocks vectors() throws ReflectiveOperationException {
    Class<?> found = Class.forName("datastreamer.spark.Xxh3Vectors");
    return new Called((Xxh3.Blocks) found.getDeclaredConstructor().newInstance());
  }

  /**
   * Calls blocks by a handle that is no constant, so that the compiler does not inline them: C2 of
   * Java 17 may compile vectors that it inlines into their caller so that all sums are wrong.
   */
  private static final class Called implements Xxh3.Blocks {
    private final MethodHandle add;

    Called(Xxh3.Blocks blocks) throws ReflectiveOperationException {
      MethodType type =
          MethodType.methodType(void.class, long[].class, byte[].class, int.class, int.class);
      add = MethodHandles.lookup().bind(blocks, "add", type);
    }

    @Override
    public void add(long[] acc, byte[] in, int from, int blocks) {
      try {
        add.invokeExact(acc, in, from, blocks);
      } catch (Throwable error) {
        throw new IllegalStateException(error);
      }
    }
  }

  /**
   * How many times as fast vectors are for these bytes as without; negative if the sums differ.
   * Public for tests.
   */
  public static double gain(byte[] some) throws ReflectiveOperationException {
    return gain(vectors(), some);
  }

  private static double gain(Xxh3.Blocks vectors, byte[] some) {
    long[] one = new long[8];
    long[] other = new long[8];
    long begin = System.nanoTime();
    vectors.add(one, some, 0, some.length >> 10);
    long middle = System.nanoTime();
    Xxh3.addBlocks(other, some, 0, some.length >> 10);
    double time = System.nanoTime() - middle;
    return Arrays.equals(one, other) ? time / (middle - begin) : -1;
  }
}
