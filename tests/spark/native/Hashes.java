package datastreamer.spark;

import java.util.Random;

/** Hashes a page in pieces until the compiler has optimised that; prints how many hashes differ. */
final class Hashes {
  public static void main(String[] words) {
    int piece = Integer.parseInt(words[0]);
    int size = (1 << 20) - 37;
    byte[] page = new byte[size + 8];
    new Random(1).nextBytes(page);
    Xxh3.Hash128 whole = Xxh3.hash128(page, 0, size);
    int wrong = 0;
    for (long end = System.nanoTime() + 4_000_000_000L; System.nanoTime() < end; ) {
      Xxh3.Sums sums = new Xxh3.Sums();
      for (int read = 0; read < size; ) {
        read += Math.min(piece, size - read);
        sums.advance(page, 0, size, read);
      }
      if (!Xxh3.hash128(page, 0, size, sums).equals(whole)) {
        wrong++;
      }
    }
    System.out.println(wrong);
  }
}
