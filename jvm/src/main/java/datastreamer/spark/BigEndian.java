package datastreamer.spark;

import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.nio.ByteOrder;

/** Numbers of the stream format in an array of bytes; reads outside of the array raise. */
final class BigEndian {
  private static final VarHandle INTS =
      MethodHandles.byteArrayViewVarHandle(int[].class, ByteOrder.BIG_ENDIAN);
  private static final VarHandle LONGS =
      MethodHandles.byteArrayViewVarHandle(long[].class, ByteOrder.BIG_ENDIAN);

  private BigEndian() {}

  static int u32(byte[] bytes, int at) {
    return (int) INTS.get(bytes, at);
  }

  static long u64(byte[] bytes, int at) {
    return (long) LONGS.get(bytes, at);
  }
}
