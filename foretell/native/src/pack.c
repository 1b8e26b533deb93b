/* Matrices of .gguf files put into the order in which products read them. No number is rounded, and
   scales stay what they are there, in the kind that is nearest. */

#include "foretell_native.h"
#include "pool.h"

#include <stddef.h>
#include <string.h>

/* Types of numbers, as files name them. */
enum {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11,
    Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, TQ1_0 = 34, TQ2_0 = 35,
    MXFP4 = 39, NVFP4 = 40
};

/* Numbers of a block of a file, its bytes, and how the library stores them. */
typedef struct {
    int32_t type, numbers, bytes, format, bits, group, offset, scaling, least_scaling, has_table;
} block_type;

static const block_type types[] = {
    {F32, 1, 4, FT_FLOAT32, 0, 0, 0, 0, 0, 0},
    {F16, 1, 2, FT_FLOAT16, 0, 0, 0, 0, 0, 0},
    {BF16, 1, 2, FT_BFLOAT16, 0, 0, 0, 0, 0, 0},
    {Q8_0, 32, 34, FT_WHOLE, 8, 32, 128, FT_HALF, FT_NONE, 0},
    {Q4_0, 32, 18, FT_WHOLE, 4, 32, 8, FT_HALF, FT_NONE, 0},
    {Q4_1, 32, 20, FT_WHOLE, 4, 32, 0, FT_HALF, FT_HALF, 0},
    {Q5_0, 32, 22, FT_WHOLE, 5, 32, 16, FT_HALF, FT_NONE, 0},
    {Q5_1, 32, 24, FT_WHOLE, 5, 32, 0, FT_HALF, FT_HALF, 0},
    {Q2_K, 256, 84, FT_WHOLE, 2, 16, 0, FT_SUPER, FT_SUPER, 0},
    {Q3_K, 256, 110, FT_WHOLE, 3, 16, 4, FT_SUPER, FT_NONE, 0},
    {Q4_K, 256, 144, FT_WHOLE, 4, 32, 0, FT_SUPER, FT_SUPER, 0},
    {Q5_K, 256, 176, FT_WHOLE, 5, 32, 0, FT_SUPER, FT_SUPER, 0},
    {Q6_K, 256, 210, FT_WHOLE, 6, 16, 32, FT_SUPER, FT_NONE, 0},
    {IQ4_NL, 32, 18, FT_WHOLE, 4, 32, 0, FT_HALF, FT_NONE, 1},
    {IQ4_XS, 256, 136, FT_WHOLE, 4, 32, 0, FT_SUPER, FT_NONE, 1},
    {TQ1_0, 256, 54, FT_WHOLE, 2, 256, 1, FT_HALF, FT_NONE, 0},
    {TQ2_0, 256, 66, FT_WHOLE, 2, 256, 1, FT_HALF, FT_NONE, 0},
    {MXFP4, 32, 17, FT_WHOLE, 4, 32, 0, FT_POWER, FT_NONE, 1},
    {NVFP4, 64, 36, FT_WHOLE, 4, 16, 0, FT_FLOAT8, FT_NONE, 1},
};

/* 4 numbers in the bytes of a word; masks of their bits. */
typedef uint32_t four;
#define BITS1 0x01010101u
#define BITS2 0x03030303u
#define BITS4 0x0f0f0f0fu

/* Numbers of one row's block, of which word i stands at words[BLOCK * i]. */
#define AT(I) words[(I) * BLOCK]

static four word(const uint8_t *bytes, int32_t index) {
    four value;
    memcpy(&value, bytes + 4 * index, 4);
    return value;
}

/* 4 bits, one in each byte. */
static four spread(uint32_t bits) { return ((bits & 15) * 0x204081u) & BITS1; }

/* --- numbers, in the order of the inputs */

/* Bytes whose lower halves are numbers `apart` words before those of the upper halves. */
static void halves(const uint8_t *bytes, int32_t count, four *words) {
    for (int32_t i = 0; i < count; i++) {
        AT(i) = word(bytes, i) & BITS4;
        AT(count + i) = word(bytes, i) >> 4 & BITS4;
    }
}

/* 32 bytes with 4 fields of 2 bits, each field of 32 numbers: 64 bytes for 256. */
static void fields(const uint8_t *bytes, four *words) {
    for (int32_t i = 0; i < 64; i++)
        AT(i) = word(bytes, i / 32 * 8 + i % 8) >> 2 * (i / 8 % 4) & BITS2;
}

/* A bit more for each number: 32 bytes, bit i of the i-th 32 numbers. */
static void more_bits(const uint8_t *bytes, int32_t to, four *words) {
    for (int32_t i = 0; i < 64; i++)
        AT(i) |= (word(bytes, i % 8) >> i / 8 & BITS1) << to;
}

/* Numbers of 3 values, 5 to a byte as digits behind a point; `count` words of them. */
static void digits(const uint8_t *bytes, int32_t count, int32_t places, four *words) {
    for (int32_t place = 0, power = 1; place < places; place++, power *= 3)
        for (int32_t i = 0; i < count; i++) {
            four value = 0;
            for (int32_t k = 0; k < 4; k++)
                value |= (four)(((bytes[4 * i + k] * power & 255) * 3) >> 8) << 8 * k;
            AT(place * count + i) = value;
        }
}

static void read_numbers(int32_t type, const uint8_t *block, four *words) {
    switch (type) {
    case Q8_0:
        for (int32_t i = 0; i < 8; i++)
            AT(i) = word(block + 2, i) ^ 0x80808080u;
        return;
    case Q4_0: case IQ4_NL: halves(block + 2, 4, words); return;
    case Q4_1: halves(block + 4, 4, words); return;
    case MXFP4: halves(block + 1, 4, words); return;
    case Q5_0: case Q5_1: {
        const uint8_t *from = block + (type == Q5_0 ? 2 : 4);
        halves(from + 4, 4, words);
        for (int32_t i = 0; i < 8; i++)
            AT(i) |= spread(word(from, 0) >> 4 * i) << 4;
        return;
    }
    case NVFP4:
        for (int32_t i = 0; i < 4; i++)
            halves(block + 4 + 8 * i, 2, words + 4 * i * BLOCK);
        return;
    case Q2_K: fields(block + 16, words); return;
    case Q3_K:
        fields(block + 32, words);
        more_bits(block, 2, words);
        return;
    case Q4_K:
        for (int32_t i = 0; i < 4; i++)
            halves(block + 16 + 32 * i, 8, words + 16 * i * BLOCK);
        return;
    case Q5_K:
        for (int32_t i = 0; i < 4; i++)
            halves(block + 48 + 32 * i, 8, words + 16 * i * BLOCK);
        more_bits(block + 16, 4, words);
        return;
    case Q6_K:
        halves(block, 16, words);
        halves(block + 64, 16, words + 32 * BLOCK);
        for (int32_t i = 0; i < 64; i++)
            AT(i) |= (word(block + 128, i / 32 * 8 + i % 8) >> 2 * (i / 8 % 4) & BITS2) << 4;
        return;
    case IQ4_XS:
        for (int32_t i = 0; i < 8; i++)
            halves(block + 8 + 16 * i, 4, words + 8 * i * BLOCK);
        return;
    case TQ1_0:
        digits(block, 8, 5, words);
        digits(block + 32, 4, 5, words + 40 * BLOCK);
        digits(block + 48, 1, 4, words + 60 * BLOCK);
        return;
    case TQ2_0: fields(block, words); return;
    default: return;
    }
}

/* --- scales of one row's block. `scales` and `minima` are those of the row's first group here. */

static void copy_half(const uint8_t *from, uint8_t *to) { memcpy(to, from, 2); }

/* The factor of a super-block; of a least value, which files take away, with another sign. */
static void copy_factor(const uint8_t *from, int turned, uint8_t *super, int32_t lane) {
    super[2 * lane] = from[0];
    super[2 * lane + 1] = from[1] ^ (turned ? 0x80 : 0);
}

#define FACTOR(SUPER_AT, GROUP_AT) SUPER_AT[(2 + (GROUP_AT)) * BLOCK + lane]

/* Q4_K and Q5_K: 6 bits each of 8 scales and 8 least values in 12 bytes. */
static void read_six_bits(const uint8_t *packed, uint8_t *scales, uint8_t *minima, int32_t lane) {
    for (int32_t i = 0; i < 4; i++) {
        const uint8_t one = packed[i], other = packed[4 + i], both = packed[8 + i];
        FACTOR(scales, i) = one & 63;
        FACTOR(minima, i) = other & 63;
        FACTOR(scales, 4 + i) = (both & 15) | (one >> 2 & 48);
        FACTOR(minima, 4 + i) = both >> 4 | (other >> 2 & 48);
    }
}

static void read_scales(int32_t type, const uint8_t *block, uint8_t *scales, uint8_t *minima,
                        int32_t lane) {
    switch (type) {
    case Q4_1: case Q5_1: copy_half(block + 2, minima + 2 * lane); /* fall through */
    case Q8_0: case Q4_0: case Q5_0: case IQ4_NL: copy_half(block, scales + 2 * lane); return;
    case TQ1_0: copy_half(block + 52, scales + 2 * lane); return;
    case TQ2_0: copy_half(block + 64, scales + 2 * lane); return;
    case MXFP4: scales[lane] = block[0]; return;
    case NVFP4:
        for (int32_t i = 0; i < 4; i++) /* the one that is no number stands for nothing */
            scales[i * BLOCK + lane] = block[i] == 0x7f ? 0 : block[i] & 0x7f;
        return;
    case Q2_K:
        copy_factor(block + 80, 0, scales, lane);
        copy_factor(block + 82, 1, minima, lane);
        for (int32_t i = 0; i < 16; i++) {
            FACTOR(scales, i) = block[i] & 15;
            FACTOR(minima, i) = block[i] >> 4;
        }
        return;
    case Q3_K:
        copy_factor(block + 108, 0, scales, lane);
        for (int32_t i = 0; i < 16; i++) {
            const int32_t low = block[96 + i % 8] >> 4 * (i / 8) & 15;
            const int32_t high = block[104 + i % 4] >> 2 * (i / 4) & 3;
            FACTOR(scales, i) = (uint8_t)((low | high << 4) - 32);
        }
        return;
    case Q4_K: case Q5_K:
        copy_factor(block, 0, scales, lane);
        copy_factor(block + 2, 1, minima, lane);
        read_six_bits(block + 4, scales, minima, lane);
        return;
    case Q6_K:
        copy_factor(block + 208, 0, scales, lane);
        for (int32_t i = 0; i < 16; i++)
            FACTOR(scales, i) = block[192 + i];
        return;
    case IQ4_XS: {
        const int32_t upper = block[2] | block[3] << 8;
        copy_factor(block, 0, scales, lane);
        for (int32_t i = 0; i < 8; i++) {
            const int32_t low = block[4 + i / 2] >> 4 * (i % 2) & 15;
            FACTOR(scales, i) = (uint8_t)((low | (upper >> 2 * i & 3) << 4) - 32);
        }
        return;
    }
    default: return;
    }
}

/* --- into their places */

/* A group of 32 inputs of 16 outputs: words (8, 16) into vectors of 16 words, one a bit. */
static void place_group(const four *words, int32_t bits, four *out) {
    const int32_t shared = bits == 8 ? 0 : bits >= 4 ? 4 : 2, rest = bits - shared;
    if (bits == 8) {
        memcpy(out, words, 8 * 4 * BLOCK);
        return;
    }
    for (int32_t j = 0; j < 4 && shared == 4; j++)
        for (int32_t o = 0; o < BLOCK; o++)
            out[j * BLOCK + o] = (words[j * BLOCK + o] & BITS4) |
                                 (words[(j + 4) * BLOCK + o] & BITS4) << 4;
    for (int32_t half = 0; half < 2 && (shared == 2 || rest == 2); half++) {
        const four *from = words + half * 4 * BLOCK;
        four *to = out + ((shared == 2 ? 0 : 4) + half) * BLOCK;
        const int32_t down = shared == 2 ? 0 : 4;
        for (int32_t o = 0; o < BLOCK; o++)
            to[o] = (from[o] >> down & BITS2) | (from[BLOCK + o] >> down & BITS2) << 2 |
                    (from[2 * BLOCK + o] >> down & BITS2) << 4 |
                    (from[3 * BLOCK + o] >> down & BITS2) << 6;
    }
    if (rest != 1)
        return;
    four *to = out + shared * BLOCK;
    memset(to, 0, 4 * BLOCK);
    for (int32_t j = 0; j < 8; j++)
        for (int32_t o = 0; o < BLOCK; o++)
            to[o] |= (words[j * BLOCK + o] >> shared & BITS1) << j;
}

/* 16 rows of floats, of which there are `lanes`: one of 2 bytes each or, `wide`, 4 bytes, which are
   one of float32 or two of bfloat16. */
static void place_floats(const ft_raw *raw, const ft_matrix *matrix, const uint8_t *const *rows,
                         int32_t lanes, uint8_t *out) {
    const size_t size = matrix->format == FT_FLOAT16 ? 2 : 4;
    const int64_t count = raw->row_bytes / (int64_t)size, bytes = ft_weight_bytes(matrix);
    if (lanes < BLOCK || count * BLOCK * (int64_t)size < bytes)
        memset(out, 0, (size_t)bytes);
    for (int64_t i = 0; i < count; i++, out += BLOCK * size)
        for (int32_t lane = 0; lane < lanes; lane++)
            if (size == 2)
                memcpy(out + 2 * lane, rows[lane] + 2 * i, 2);
            else
                memcpy(out + 4 * lane, rows[lane] + 4 * i, 4);
    /* The last of an odd count of bfloat16. */
    for (int32_t lane = 0; raw->row_bytes % (int64_t)size && lane < lanes; lane++)
        memcpy(out + 4 * lane, rows[lane] + 4 * count, 2);
}

typedef struct {
    const ft_raw *raw;
    const ft_matrix *matrix;
    const block_type *type;
} packing_job;

static void place_block(const packing_job *job, int32_t block) {
    enum { MOST = SUPER / 4 };
    const ft_raw *raw = job->raw;
    const ft_matrix *matrix = job->matrix;
    const block_type *type = job->type;
    const int64_t scale_bytes = type->scaling ? ft_scale_bytes(matrix, type->scaling) : 0;
    const int64_t least_bytes = type->scaling ? ft_scale_bytes(matrix, type->least_scaling) : 0;
    uint8_t *weights = (uint8_t *)matrix->weights + block * ft_weight_bytes(matrix);
    uint8_t *scales = (uint8_t *)matrix->scales + block * scale_bytes;
    uint8_t *minima = least_bytes ? (uint8_t *)matrix->minima + block * least_bytes : scales;
    const uint8_t *rows[BLOCK];
    four words[MOST * BLOCK] = {0};
    int32_t lanes = 0;
    for (int32_t lane = 0; lane < BLOCK; lane++) {
        const int64_t output = (int64_t)block * BLOCK + lane;
        const int64_t row = raw->order && output < matrix->outputs ? raw->order[output] : output;
        if (output < matrix->outputs)
            rows[lanes++] = raw->rows + row * raw->row_bytes;
    }
    if (type->format != FT_WHOLE) {
        place_floats(raw, matrix, rows, lanes, weights);
        return;
    }
    const int32_t count = raw->inputs / type->numbers;
    if (lanes < BLOCK) { /* what fills the last block up is nothing */
        memset(scales, 0, (size_t)scale_bytes);
        memset(minima, 0, (size_t)(least_bytes ? least_bytes : scale_bytes));
    }
    for (int32_t i = 0; i < count; i++) {
        for (int32_t lane = 0; lane < lanes; lane++) {
            const uint8_t *from = rows[lane] + (int64_t)i * type->bytes;
            read_numbers(type->type, from, words + lane);
            read_scales(type->type, from, scales, minima, lane);
        }
        for (int32_t k = 0; k < type->numbers / GROUP; k++, weights += 64 * type->bits)
            place_group(words + 8 * BLOCK * k, type->bits, (four *)weights);
        scales += scale_bytes / count;
        minima += least_bytes / count;
    }
}

static void packing_work(ft_team *team, int thread, void *argument) {
    const packing_job *job = argument;
    const int32_t blocks = job->matrix->blocks;
    for (int32_t block; (block = ft_next(team, thread, blocks)) < blocks;)
        place_block(job, block);
}

static const block_type *type_of(int32_t type) {
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].type == type)
            return types + i;
    return NULL;
}

/* Whether rows of this type are what the matrix says, and all that are named are there. */
static int32_t check_packing(const ft_raw *raw, const ft_matrix *matrix, const block_type *type) {
    if (!type || ft_check_matrix(matrix, 0, 0) != FT_DONE || !raw->rows || raw->inputs < 1 ||
        raw->inputs % type->numbers ||
        matrix->inputs != (raw->inputs + GROUP - 1) / GROUP * GROUP ||
        raw->row_bytes != (int64_t)raw->inputs / type->numbers * type->bytes ||
        matrix->format != type->format || raw->row_count < 1 ||
        (!raw->order && raw->row_count != matrix->outputs))
        return FT_MISFIT;
    if (type->format == FT_WHOLE &&
        (matrix->bits != type->bits || matrix->group != type->group ||
         matrix->offset != type->offset || matrix->scaling != type->scaling ||
         matrix->least_scaling != type->least_scaling || !matrix->table != !type->has_table))
        return FT_MISFIT;
    for (int32_t i = 0; raw->order && i < matrix->outputs; i++)
        if (raw->order[i] < 0 || raw->order[i] >= raw->row_count)
            return FT_OUTSIDE;
    return FT_DONE;
}

EXPORT int32_t ft_pack(const ft_raw *raw, const ft_matrix *matrix, int32_t threads) {
    packing_job job = {raw, matrix, type_of(raw->type)};
    const int32_t checked = check_packing(raw, matrix, job.type);
    if (checked == FT_DONE)
        ft_run(packing_work, &job, threads);
    return checked;
}
