"""xxh3 of short records, for C code that runs without the GIL or once for each commit."""

from libc.stdint cimport uint8_t, uint64_t

cdef extern from *:
    """
    #include <stdint.h>

    /* xxh3 (64 bits) of 33 to 64 bytes, seed 0, with the default secret. */
    static const unsigned char XXH3_SECRET[64] = {
        0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad,
        0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3,
        0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc,
        0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
        0x81, 0x3a, 0x26, 0x4c};
    static inline uint64_t little_u64(const unsigned char *p) {
        uint64_t value = 0;
        for (int i = 7; i >= 0; i--) value = value << 8 | p[i];
        return value;
    }
    /* The halves of the product of 128 bits, which not every machine has, combined by XOR. */
    static inline uint64_t mix16(const unsigned char *p, const unsigned char *secret) {
        const uint64_t mask = 0xFFFFFFFFu;
        uint64_t a = little_u64(p) ^ little_u64(secret);
        uint64_t b = little_u64(p + 8) ^ little_u64(secret + 8);
        uint64_t low = (a & mask) * (b & mask), side = (a >> 32) * (b & mask);
        uint64_t middle = (low >> 32) + (side & mask) + (a & mask) * (b >> 32);
        uint64_t high = (a >> 32) * (b >> 32) + (side >> 32) + (middle >> 32);
        return high ^ (middle << 32 | (low & mask));
    }
    static inline uint64_t xxh3_of_33_to_64(const unsigned char *p, size_t size) {
        uint64_t sum = size * 0x9E3779B185EBCA87ull;
        sum += mix16(p + 16, XXH3_SECRET + 32) + mix16(p + size - 32, XXH3_SECRET + 48);
        sum += mix16(p, XXH3_SECRET) + mix16(p + size - 16, XXH3_SECRET + 16);
        sum ^= sum >> 37;
        sum *= 0x165667919E3779F9ull;
        return sum ^ sum >> 32;
    }
    """
    uint64_t xxh3_of_33_to_64(const uint8_t*, size_t) noexcept nogil
