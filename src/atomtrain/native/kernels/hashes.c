/* BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020) of many pieces of one length, one in each
   lane of a vector: the first 16 bytes of each piece's hash. The library hashes one input at a time,
   and uses its vectors within it, so short ones cost it several times as much. */
#include <stdint.h>
#include <string.h>

#include "bits.h"

enum { LANES = 16, WORDS = 16, BLOCK_BYTES = 64, CHUNK_BYTES = 1024, HASH_BYTES = 16 };
enum { DEEPEST = 8 }; /* of a tree of the chunks in a piece: 2^7 of them at most */
enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

typedef uint32_t vector __attribute__((vector_size(LANES * sizeof(uint32_t))));

static const uint32_t START[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                  0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
static const int ORDER[7][WORDS] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
    {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
    {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
};

#define TURN(x, n) (((x) >> (n)) | ((x) << (32 - (n))))
#define MIX(a, b, c, d, x, y)                                                                      \
    do {                                                                                           \
        v[a] += v[b] + (x), v[d] = TURN(v[d] ^ v[a], 16);                                          \
        v[c] += v[d], v[b] = TURN(v[b] ^ v[c], 12);                                                \
        v[a] += v[b] + (y), v[d] = TURN(v[d] ^ v[a], 8);                                           \
        v[c] += v[d], v[b] = TURN(v[b] ^ v[c], 7);                                                 \
    } while (0)

/* Takes one block of each lane's piece into its chaining value. */
static void compress(vector *value, const vector *m, uint32_t counter, uint32_t bytes,
                     uint32_t flags) {
    vector v[16], none = {0};
    memcpy(v, value, 8 * sizeof *v);
    for (int i = 0; i < 4; i++) v[8 + i] = none + START[i];
    v[12] = none + counter, v[13] = none, v[14] = none + bytes, v[15] = none + flags;
    for (int round = 0; round < 7; round++) {
        const int *o = ORDER[round];
        MIX(0, 4, 8, 12, m[o[0]], m[o[1]]);
        MIX(1, 5, 9, 13, m[o[2]], m[o[3]]);
        MIX(2, 6, 10, 14, m[o[4]], m[o[5]]);
        MIX(3, 7, 11, 15, m[o[6]], m[o[7]]);
        MIX(0, 5, 10, 15, m[o[8]], m[o[9]]);
        MIX(1, 6, 11, 12, m[o[10]], m[o[11]]);
        MIX(2, 7, 8, 13, m[o[12]], m[o[13]]);
        MIX(3, 4, 9, 14, m[o[14]], m[o[15]]);
    }
    for (int i = 0; i < 8; i++) value[i] = v[i] ^ v[i + 8];
}

/* Reads a block at the same place of each lane's piece. */
INLINE void gather(vector *m, const uint8_t *const *lanes, int64_t at) {
    uint32_t words[WORDS][LANES], one[WORDS];
    for (int lane = 0; lane < LANES; lane++) {
        memcpy(one, lanes[lane] + at, BLOCK_BYTES);
        for (int w = 0; w < WORDS; w++) words[w][lane] = one[w];
    }
    memcpy(m, words, sizeof words);
}

INLINE void begin(vector *value) {
    const vector none = {0};
    for (int i = 0; i < 8; i++) value[i] = none + START[i];
}

static void scatter(const vector *value, int64_t count, uint8_t *out) {
    uint32_t words[HASH_BYTES / 4][LANES];
    memcpy(words, value, sizeof words);
    for (int64_t lane = 0; lane < count; lane++)
        for (int w = 0; w < HASH_BYTES / 4; w++)
            memcpy(out + lane * HASH_BYTES + 4 * w, &words[w][lane], 4);
}

/* One chunk, all or a part of a piece. */
static void chunk(vector *value, const uint8_t *const *lanes, int64_t at, int64_t bytes,
                  uint32_t counter, uint32_t last) {
    begin(value);
    for (int64_t block = 0; block < bytes; block += BLOCK_BYTES) {
        vector m[WORDS];
        uint32_t flags = block ? 0 : CHUNK_START;
        if (block + BLOCK_BYTES == bytes) flags |= CHUNK_END | last;
        gather(m, lanes, at + block);
        compress(value, m, counter, BLOCK_BYTES, flags);
    }
}

/* Pieces of `LANES` lanes, of one chunk, or of 2, 4, ... 128 of them. */
static void pieces(vector *value, const uint8_t *const *lanes, int64_t bytes) {
    if (bytes <= CHUNK_BYTES) {
        chunk(value, lanes, 0, bytes, 0, ROOT);
        return;
    }
    vector left[DEEPEST][WORDS]; /* by height: a tree's value, and room for that beside it */
    const int64_t chunks = bytes / CHUNK_BYTES;
    for (int64_t n = 0; n < chunks; n++) {
        chunk(value, lanes, n * CHUNK_BYTES, CHUNK_BYTES, (uint32_t)n, 0);
        int height = 0;
        for (; n >> height & 1; height++) { /* the right one of two */
            const int64_t width = (int64_t)2 << height;
            memcpy(left[height] + 8, value, 8 * sizeof *value);
            begin(value);
            compress(value, left[height], 0, BLOCK_BYTES, PARENT | (width == chunks ? ROOT : 0));
        }
        memcpy(left[height], value, 8 * sizeof *value);
    }
}

/* Writes the hashes of `count` pieces that lie one behind the other. They have `bytes` each: a
   multiple of 64 up to 1024, or that times a power of two up to 128. */
void atom_piece_hashes(const uint8_t *data, int64_t count, int64_t bytes, uint8_t *out) {
    for (int64_t first = 0; first < count; first += LANES) {
        const int64_t some = count - first < LANES ? count - first : LANES;
        const uint8_t *lanes[LANES];
        vector value[8];
        for (int64_t lane = 0; lane < LANES; lane++)
            lanes[lane] = data + (first + (lane < some ? lane : 0)) * bytes;
        pieces(value, lanes, bytes);
        scatter(value, some, out + first * HASH_BYTES);
    }
}

/* Writes the hashes of `count` pairs of hashes: each of `n` and the two. */
void atom_pair_hashes(const uint8_t *below, int64_t count, uint8_t *out) {
    for (int64_t first = 0; first < count; first += LANES) {
        const int64_t some = count - first < LANES ? count - first : LANES;
        uint8_t blocks[LANES][BLOCK_BYTES] = {{0}};
        const uint8_t *lanes[LANES];
        vector value[8], m[WORDS];
        for (int64_t lane = 0; lane < LANES; lane++) {
            lanes[lane] = blocks[lane];
            if (lane >= some) continue;
            blocks[lane][0] = 'n';
            memcpy(blocks[lane] + 1, below + (first + lane) * 2 * HASH_BYTES, 2 * HASH_BYTES);
        }
        begin(value);
        gather(m, lanes, 0);
        compress(value, m, 0, 1 + 2 * HASH_BYTES, CHUNK_START | CHUNK_END | ROOT);
        scatter(value, some, out + first * HASH_BYTES);
    }
}
