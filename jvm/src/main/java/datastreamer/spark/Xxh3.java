package datastreamer.spark;

import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.nio.ByteOrder;

/**
 * XXH3 of 128 bits with seed 0, as xxHash specifies it.
 *
 * <p>Public, so that tests can compare it with xxHash itself.
 */
public final class Xxh3 {
  /** A hash of 128 bits. */
  public record Hash128(long high, long low) {
    /** Whether it is the hash that is stored, big-endian, at an offset. */
    boolean equals(byte[] stored, int at) {
      return BigEndian.u64(stored, at) == high && BigEndian.u64(stored, at + 8) == low;
    }
  }

  private static final VarHandle INTS =
      MethodHandles.byteArrayViewVarHandle(int[].class, ByteOrder.LITTLE_ENDIAN);
  private static final VarHandle LONGS =
      MethodHandles.byteArrayViewVarHandle(long[].class, ByteOrder.LITTLE_ENDIAN);

  private static final byte[] SECRET =
      java.util.HexFormat.of()
          .parseHex(
              "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
                  + "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
                  + "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8"
                  + "fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364ea"
                  + "c5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b"
                  + "16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e");

  static final long PRIME32_1 = 0x9E3779B1L;
  private static final long PRIME32_2 = 0x85EBCA77L;
  private static final long PRIME32_3 = 0xC2B2AE3DL;
  private static final long PRIME64_1 = 0x9E3779B185EBCA87L;
  private static final long PRIME64_2 = 0xC2B2AE3D27D4EB4FL;
  private static final long PRIME64_3 = 0x165667B19E3779F9L;
  private static final long PRIME64_4 = 0x85EBCA77C2B2AE63L;
  private static final long PRIME64_5 = 0x27D4EB2F165667C5L;
  private static final long PRIME_MX1 = 0x165667919E3779F9L;
  private static final long PRIME_MX2 = 0x9FB21C651E98DF25L;

  private static final int STRIPE = 64;
  static final int STRIPES = (SECRET.length - STRIPE) / 8;
  private static final int BLOCK = STRIPE * STRIPES;
  private static final long LOW_32 = 0xFFFFFFFFL;

  // The secret as each stripe of a block uses it: eight numbers from every eighth byte on.
  static final long[] KEYS = new long[STRIPES + 8];

  static {
    for (int i = 0; i < KEYS.length; i++) {
      KEYS[i] = secret(8 * i);
    }
  }

  private Xxh3() {}

  /** The hash of 128 bits of some bytes. */
  public static Hash128 hash128(byte[] in, int at, int size) {
    return hash128(in, at, size, new Sums());
  }

  /** The same, after `sums` advanced over some or all of the bytes. */
  static Hash128 hash128(byte[] in, int at, int size, Sums sums) {
    if (size <= 16) {
      return short128(in, at, size);
    }
    if (size <= 240) {
      return middle128(in, at, size);
    }
    long[] acc = sums.last(in, at, size);
    FasterBlocks.note(size);
    int last = SECRET.length - STRIPE - 11;
    return new Hash128(
        merge(acc, last, ~(size * PRIME64_2)), merge(acc, 11, size * PRIME64_1));
  }

  private static long combined(byte[] in, int at, int size) {
    long first = in[at] & 0xFF;
    long middle = in[at + size / 2] & 0xFF;
    long last = in[at + size - 1] & 0xFF;
    return first << 16 | middle << 24 | last | (long) size << 8;
  }

  private static Hash128 short128(byte[] in, int at, int size) {
    if (size > 8) {
      return nine128(in, at, size);
    }
    if (size >= 4) {
      long both = i32(in, at) + (i32(in, at + size - 4) << 32);
      long keyed = both ^ secret(16) ^ secret(24);
      long factor = PRIME64_1 + ((long) size << 2);
      long low = keyed * factor;
      long high = Math.multiplyHigh(keyed, factor) + unsigned(keyed, factor);
      high += low << 1;
      low ^= high >>> 3;
      low ^= low >>> 35;
      low *= PRIME_MX2;
      low ^= low >>> 28;
      return new Hash128(avalanche(high), low);
    }
    if (size > 0) {
      long low = combined(in, at, size);
      long high = Integer.rotateLeft(Integer.reverseBytes((int) low), 13) & LOW_32;
      return new Hash128(
          avalanche64(high ^ (i32(SECRET, 8) ^ i32(SECRET, 12))),
          avalanche64(low ^ (i32(SECRET, 0) ^ i32(SECRET, 4))));
    }
    return new Hash128(avalanche64(secret(80) ^ secret(88)), avalanche64(secret(64) ^ secret(72)));
  }

  private static Hash128 nine128(byte[] in, int at, int size) {
    long keyLow = secret(32) ^ secret(40);
    long keyHigh = secret(48) ^ secret(56);
    long inLow = i64(in, at);
    long inHigh = i64(in, at + size - 8);
    long mixed = inLow ^ inHigh ^ keyLow;
    long low = mixed * PRIME64_1;
    long high = Math.multiplyHigh(mixed, PRIME64_1) + unsigned(mixed, PRIME64_1);
    low += (long) (size - 1) << 54;
    inHigh ^= keyHigh;
    high += inHigh + (inHigh & LOW_32) * (PRIME32_2 - 1);
    low ^= Long.reverseBytes(high);
    long outLow = low * PRIME64_2;
    long outHigh = Math.multiplyHigh(low, PRIME64_2) + unsigned(low, PRIME64_2);
    outHigh += high * PRIME64_2;
    return new Hash128(avalanche(outHigh), avalanche(outLow));
  }

  private static Hash128 middle128(byte[] in, int at, int size) {
    long low = size * PRIME64_1;
    long high = 0;
    if (size <= 128) {
      for (int i = (size - 1) / 32; i >= 0; i--) {
        int front = at + 16 * i;
        int back = at + size - 16 * (i + 1);
        low = mix32(low, in, front, back, 32 * i);
        high = mix32(high, in, back, front, 32 * i + 16);
      }
    } else {
      for (int i = 0; i < 4; i++) {
        int front = at + 32 * i;
        low = mix32(low, in, front, front + 16, 32 * i);
        high = mix32(high, in, front + 16, front, 32 * i + 16);
      }
      low = avalanche(low);
      high = avalanche(high);
      for (int i = 4; i < size / 32; i++) {
        int front = at + 32 * i;
        low = mix32(low, in, front, front + 16, 3 + 32 * (i - 4));
        high = mix32(high, in, front + 16, front, 3 + 32 * (i - 4) + 16);
      }
      low = mix32(low, in, at + size - 16, at + size - 32, 136 - 17 - 16);
      high = mix32(high, in, at + size - 32, at + size - 16, 136 - 17);
    }
    long sum = low + high;
    long other = low * PRIME64_1 + high * PRIME64_4 + size * PRIME64_2;
    return new Hash128(-avalanche(other), avalanche(sum));
  }

  private static long mix32(long acc, byte[] in, int one, int two, int key) {
    return (acc + mix16(in, one, key)) ^ (i64(in, two) + i64(in, two + 8));
  }

  private static long mix16(byte[] in, int at, int key) {
    return fold(i64(in, at) ^ secret(key), i64(in, at + 8) ^ secret(key + 8));
  }

  /** Adds whole blocks to the eight sums. */
  interface Blocks {
    void add(long[] acc, byte[] in, int from, int blocks);
  }

  /** The eight sums over more than 240 bytes, which may be hashed as they are read. */
  static final class Sums {
    private final long[] acc = {
      PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1
    };
    private int blocks;

    /** Add those of `size` bytes of which `read` are there; the last bytes wait for `last`. */
    void advance(byte[] in, int at, int size, int read) {
      int more = Math.min(read, size - 1) / BLOCK - blocks;
      if (more > 0) {
        FasterBlocks.found().add(acc, in, at + blocks * BLOCK, more);
        blocks += more;
      }
    }

    private long[] last(byte[] in, int at, int size) {
      advance(in, at, size, size);
      int done = blocks * BLOCK;
      stripes(acc, in, at + done, (size - 1 - done) / STRIPE);
      // The last stripe overlaps the one before, and has a key of its own.
      int last = at + size - STRIPE;
      int key = SECRET.length - STRIPE - 7;
      for (int j = 0; j < 8; j++) {
        long value = i64(in, last + 8 * j);
        long keyed = value ^ secret(key + 8 * j);
        acc[j ^ 1] += value;
        acc[j] += (keyed & LOW_32) * (keyed >>> 32);
      }
      return acc;
    }
  }

  static void addBlocks(long[] acc, byte[] in, int from, int blocks) {
    for (int block = 0; block < blocks; block++) {
      stripes(acc, in, from + block * BLOCK, STRIPES);
      for (int j = 0; j < 8; j++) {
        acc[j] = (acc[j] ^ acc[j] >>> 47 ^ KEYS[STRIPES + j]) * PRIME32_1;
      }
    }
  }

  // Local variables: the compiler keeps them in registers, but not the elements of an array.
  private static void stripes(long[] acc, byte[] in, int from, int count) {
    long a0 = acc[0];
    long a1 = acc[1];
    long a2 = acc[2];
    long a3 = acc[3];
    long a4 = acc[4];
    long a5 = acc[5];
    long a6 = acc[6];
    long a7 = acc[7];
    for (int i = 0; i < count; i++) {
      int at = from + i * STRIPE;
      long v0 = i64(in, at);
      long v1 = i64(in, at + 8);
      long k0 = v0 ^ KEYS[i];
      long k1 = v1 ^ KEYS[i + 1];
      a0 += v1 + (k0 & LOW_32) * (k0 >>> 32);
      a1 += v0 + (k1 & LOW_32) * (k1 >>> 32);
      long v2 = i64(in, at + 16);
      long v3 = i64(in, at + 24);
      long k2 = v2 ^ KEYS[i + 2];
      long k3 = v3 ^ KEYS[i + 3];
      a2 += v3 + (k2 & LOW_32) * (k2 >>> 32);
      a3 += v2 + (k3 & LOW_32) * (k3 >>> 32);
      long v4 = i64(in, at + 32);
      long v5 = i64(in, at + 40);
      long k4 = v4 ^ KEYS[i + 4];
      long k5 = v5 ^ KEYS[i + 5];
      a4 += v5 + (k4 & LOW_32) * (k4 >>> 32);
      a5 += v4 + (k5 & LOW_32) * (k5 >>> 32);
      long v6 = i64(in, at + 48);
      long v7 = i64(in, at + 56);
      long k6 = v6 ^ KEYS[i + 6];
      long k7 = v7 ^ KEYS[i + 7];
      a6 += v7 + (k6 & LOW_32) * (k6 >>> 32);
      a7 += v6 + (k7 & LOW_32) * (k7 >>> 32);
    }
    acc[0] = a0;
    acc[1] = a1;
    acc[2] = a2;
    acc[3] = a3;
    acc[4] = a4;
    acc[5] = a5;
    acc[6] = a6;
    acc[7] = a7;
  }

  private static long merge(long[] acc, int key, long start) {
    long result = start;
    for (int i = 0; i < 4; i++) {
      result += fold(acc[2 * i] ^ secret(key + 16 * i), acc[2 * i + 1] ^ secret(key + 16 * i + 8));
    }
    return avalanche(result);
  }

  private static long fold(long one, long two) {
    return one * two ^ Math.multiplyHigh(one, two) + unsigned(one, two);
  }

  /** What makes a signed high half of a product the unsigned one. */
  private static long unsigned(long one, long two) {
    return (one >> 63 & two) + (two >> 63 & one);
  }

  private static long avalanche(long hash) {
    long mixed = (hash ^ hash >>> 37) * PRIME_MX1;
    return mixed ^ mixed >>> 32;
  }

  private static long avalanche64(long hash) {
    long mixed = (hash ^ hash >>> 33) * PRIME64_2;
    mixed = (mixed ^ mixed >>> 29) * PRIME64_3;
    return mixed ^ mixed >>> 32;
  }

  private static long secret(int at) {
    return (long) LONGS.get(SECRET, at);
  }

  private static long i64(byte[] in, int at) {
    return (long) LONGS.get(in, at);
  }

  private static long i32(byte[] in, int at) {
    return (int) INTS.get(in, at) & LOW_32;
  }
}
