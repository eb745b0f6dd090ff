"""xxh3 in C, where the library does not fit.

For short records, it would need the GIL or take longer than the rest of a commit. For the blocks of
an index, it computes with AVX-512, after which some processors run all other code more slowly for a
while (bookmark queries over 64 connections: by 5 %).
"""

from libc.stdint cimport uint8_t, uint64_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    /* xxh3 (64 bits), seed 0, with the default secret. */
    static const unsigned char XXH3_SECRET[192] = {
        0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad,
        0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3,
        0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc,
        0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
        0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65,
        0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
        0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9,
        0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
        0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb,
        0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0,
        0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d,
        0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
        0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
    static inline uint64_t little_u64(const unsigned char *p) {
        uint64_t value;
        memcpy(&value, p, 8);
    #if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        value = __builtin_bswap64(value);
    #endif
        return value;
    }
    /* The halves of the product of 128 bits, which not every machine has, combined by XOR. */
    static inline uint64_t folded_product(uint64_t a, uint64_t b) {
        const uint64_t mask = 0xFFFFFFFFu;
        uint64_t low = (a & mask) * (b & mask), side = (a >> 32) * (b & mask);
        uint64_t middle = (low >> 32) + (side & mask) + (a & mask) * (b >> 32);
        uint64_t high = (a >> 32) * (b >> 32) + (side >> 32) + (middle >> 32);
        return high ^ (middle << 32 | (low & mask));
    }
    static inline uint64_t mix16(const unsigned char *p, const unsigned char *secret) {
        return folded_product(little_u64(p) ^ little_u64(secret),
                              little_u64(p + 8) ^ little_u64(secret + 8));
    }
    static inline uint64_t xxh3_avalanche(uint64_t sum) {
        sum ^= sum >> 37;
        sum *= 0x165667919E3779F9ull;
        return sum ^ sum >> 32;
    }
    /* Of 33 to 96 bytes. */
    static inline uint64_t xxh3_of_33_to_96(const unsigned char *p, size_t size) {
        uint64_t sum = size * 0x9E3779B185EBCA87ull;
        if (size > 64)
            sum += mix16(p + 32, XXH3_SECRET + 64) + mix16(p + size - 48, XXH3_SECRET + 80);
        sum += mix16(p + 16, XXH3_SECRET + 32) + mix16(p + size - 32, XXH3_SECRET + 48);
        sum += mix16(p, XXH3_SECRET) + mix16(p + size - 16, XXH3_SECRET + 16);
        return xxh3_avalanche(sum);
    }
    /* The hash of 128 bits of 32 bytes, as it is stored: big-endian. */
    static inline void xxh3_128_of_32(const unsigned char *p, unsigned char *digest) {
        const uint64_t prime1 = 0x9E3779B185EBCA87ull, prime4 = 0x85EBCA77C2B2AE63ull;
        uint64_t low = 32 * prime1 + mix16(p, XXH3_SECRET);
        uint64_t high = mix16(p + 16, XXH3_SECRET + 16);
        low ^= little_u64(p + 16) + little_u64(p + 24);
        high ^= little_u64(p) + little_u64(p + 8);
        uint64_t first = 0 - xxh3_avalanche(low * prime1 + high * prime4
                                            + 32 * 0xC2B2AE3D27D4EB4Full);
        uint64_t second = xxh3_avalanche(low + high);
        for (int i = 0; i < 8; i++) {
            digest[i] = (unsigned char)(first >> (56 - 8 * i));
            digest[8 + i] = (unsigned char)(second >> (56 - 8 * i));
        }
    }
    /* One stripe of 64 bytes. */
    static inline void xxh3_add(uint64_t *sums, const unsigned char *p,
                                const unsigned char *secret) {
        for (int i = 0; i < 8; i++) {
            uint64_t value = little_u64(p + 8 * i), keyed = value ^ little_u64(secret + 8 * i);
            sums[i ^ 1] += value;
            sums[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
        }
    }
    static inline uint64_t xxh3_of_over_240(const unsigned char *p, size_t size) {
        uint64_t sums[8] = {
            0xC2B2AE3Du, 0x9E3779B185EBCA87ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull,
            0x85EBCA77C2B2AE63ull, 0x85EBCA77u, 0x27D4EB2F165667C5ull, 0x9E3779B1u};
        for (size_t stripe = 0; stripe < (size - 1) / 64; stripe++) {
            xxh3_add(sums, p + 64 * stripe, XXH3_SECRET + 8 * (stripe % 16));
            if (stripe % 16 < 15) continue;
            for (int i = 0; i < 8; i++) {
                sums[i] ^= sums[i] >> 47 ^ little_u64(XXH3_SECRET + 128 + 8 * i);
                sums[i] *= 0x9E3779B1u;
            }
        }
        xxh3_add(sums, p + size - 64, XXH3_SECRET + 192 - 64 - 7);
        uint64_t sum = size * 0x9E3779B185EBCA87ull;
        for (int i = 0; i < 4; i++) {
            const unsigned char *secret = XXH3_SECRET + 11 + 16 * i;
            sum += folded_product(sums[2 * i] ^ little_u64(secret),
                                  sums[2 * i + 1] ^ little_u64(secret + 8));
        }
        return xxh3_avalanche(sum);
    }
    """
    uint64_t xxh3_of_33_to_96(const uint8_t*, size_t) noexcept nogil
    void xxh3_128_of_32(const uint8_t*, uint8_t*) noexcept nogil
    uint64_t xxh3_of_over_240(const uint8_t*, size_t) noexcept nogil
