/* The kernels, written once; a file for each kind of processor includes this one.

   What a row's result is depends on that row alone: every sum over its inputs, or over the rows
   of a cache that it sees, is taken in one order, however many rows are computed beside it. */

#include "foretell_native.h"
#include "simd.h"

#if defined(FT_AVX512)
#define UNROLL _Pragma("GCC unroll 16")
#define HIGHEST TILE /* rows of a tile */
#elif defined(FT_AVX2)
#define UNROLL _Pragma("GCC unroll 8")
#define HIGHEST 4
#define WIDTHS {1, 1, 1, 1}
#elif defined(FT_NEON)
#define UNROLL _Pragma("GCC unroll 8")
#define HIGHEST 2
#define WIDTHS {1, 1}
#else
#define UNROLL
#define HIGHEST 1 /* plain C: one row and one block at a time */
#define WIDTHS {1}
#endif

/* The processor fetches by itself what is read in order, but not early enough where much is
   computed with it: so many bytes ahead of a block's stream we ask for its weights. They go to the
   second cache, which has room for far more requests under way than the first. */
#ifndef AHEAD
#define AHEAD 16384
#endif
#ifndef FETCHED
#define FETCHED 3 /* rows from which on: fewer are computed as quickly as weights arrive */
#endif
#define PREFETCH_WEIGHTS(address) __builtin_prefetch(address, 0, 2)
#define PREFETCH(address) __builtin_prefetch(address, 0, 3)

/* --- activations */

static void store(const float *x, int32_t count, uint16_t *out) {
    for (int32_t i = 0; i < count; i += 16)
        v_store_bfloat(out + i, v_load(x + i));
}

#define TINY 1e-36f /* what is no larger counts as zero: 127 / it could be infinite */

/* The nearest whole numbers from -127 to 127; any of them for what is none, so that no sum of them
   overflows. */
INLINE veci whole(vec x) { return v_int(v_max(v_min(x, v_set(127.0f)), v_set(-127.0f))); }

/* A group's whole numbers with their sums, from its two halves. */
INLINE void keep_group(const ft_rows *rows, int64_t place, float scale, veci low, veci high) {
    i_store_bytes(rows->numbers + place, low);
    i_store_bytes(rows->numbers + place + 16, high);
    float first = (float)i_sum(low), second = (float)i_sum(high);
    rows->groups[place / GROUP] = (ft_group){scale, first + second, {first, second}};
}

/* Each group of 32 has one scale: the largest number becomes 127. Where an input is infinite or no
   number, no scale is one, and so is no product. */
static void prepare_whole(const ft_rows *rows, int64_t place, int32_t count, const float *x) {
    vec nothing = v_set(0.0f);
    for (int32_t i = 0; i < count; i += GROUP) {
        vec low = v_load(x + i), high = v_load(x + i + 16);
        nothing = v_fma(high, v_set(0.0f), v_fma(low, v_set(0.0f), nothing));
        float top = v_top(v_max(v_abs(low), v_abs(high)));
        vec inverse = v_set(top > TINY ? 127.0f / top : 0.0f);
        veci a = whole(v_mul(low, inverse)), b = whole(v_mul(high, inverse));
        keep_group(rows, place + i, top / 127.0f, a, b);
    }
    if (!(v_sum(nothing) == 0.0f)) {
        ft_group *groups = rows->groups + place / GROUP;
        for (int32_t group = 0; group < count / GROUP; group++)
            groups[group].scale = NAN;
    }
}

/* Inputs `first` to `first + count - 1` of a row as products read them, in each of the forms. */
static void prepare(const ft_rows *rows, int32_t row, int32_t first, int32_t count,
                    const float *x, int32_t forms) {
    int64_t place = (int64_t)row * rows->inputs + first;
    if (forms & FT_AS_WHOLE)
        prepare_whole(rows, place, count, x);
    if (forms & FT_AS_BFLOAT)
        store(x, count, rows->narrow + place);
    if (forms & FT_AS_FLOAT)
        memcpy(rows->wide + place, x, (size_t)count * sizeof(float));
}

#define PEAKS 32            /* that a group's largest number may become: 127, 126, ... */
#define ROUNDER 12582912.0f /* what is added to it and taken away is rounded: 1.5 * 2^23 */

/* Of each group of 32 weights the peak with the least squared error. Lanes are peaks. */
static void choose_peaks(const float *weights, int64_t groups, uint8_t *peaks) {
    float candidates[PEAKS], errors[PEAKS];
    for (int i = 0; i < PEAKS; i++)
        candidates[i] = (float)(127 - i);
    const vec rounder = v_set(ROUNDER);
    for (int64_t g = 0; g < groups; g++) {
        const float *group = weights + g * GROUP;
        vec low = v_load(group), high = v_load(group + 16);
        vec top = v_set(v_top(v_max(v_abs(low), v_abs(high))));
        for (int half = 0; half < PEAKS; half += 16) {
            vec scale = v_div(top, v_load(candidates + half)), error = v_set(0.0f);
            vec inverse = v_div(v_load(candidates + half), v_max(top, v_set(TINY)));
            for (int i = 0; i < GROUP; i++) {
                vec exact = v_mul(v_set(group[i]), inverse);
                vec whole = v_sub(v_add(exact, rounder), rounder);
                vec off = v_sub(whole, exact);
                error = v_fma(off, off, error);
            }
            v_store(errors + half, v_mul(error, v_mul(scale, scale)));
        }
        int best = 0;
        for (int i = 1; i < PEAKS; i++)
            best = errors[i] < errors[best] ? i : best;
        peaks[g] = (uint8_t)(127 - best);
    }
}

#define RANGES 16      /* of each group that are tried for 4 bits, the whole one first */
#define NARROWER 0.02f /* each than the one before, as a part of the whole */

/* Of each group of 32 weights the numbers from 0 to 15, the scale and the least value that are
   nearest to it. The numbers are those of the best range; scale and least value fit them by least
   squares. Lanes are ranges. */
static void choose_ranges(const float *weights, int64_t groups, uint8_t *numbers, float *scales,
                          float *minima) {
    float shares[RANGES], tried[GROUP * RANGES];
    float errors[RANGES], steps[RANGES], means[RANGES];
    for (int i = 0; i < RANGES; i++)
        shares[i] = 1.0f - NARROWER * (float)i;
    const vec share = v_load(shares), zero = v_set(0.0f), most = v_set(15.0f);
    const vec rounder = v_set(ROUNDER), each = v_set(1.0f / GROUP);
    for (int64_t g = 0; g < groups; g++) {
        const float *group = weights + g * GROUP;
        vec first = v_load(group), second = v_load(group + 16);
        float top = v_top(v_max(first, second));
        float bottom = -v_top(v_max(v_sub(zero, first), v_sub(zero, second)));
        float mean = (v_sum(first) + v_sum(second)) / GROUP, middle = (bottom + top) / 2.0f;
        vec low = v_mul(v_set(bottom - middle), share);
        vec step = v_mul(v_set((top - bottom) / 15.0f), share);
        vec inverse = v_div(v_set(1.0f), v_max(step, v_set(TINY)));
        vec sum = zero, squares = zero, shared = zero;
        for (int i = 0; i < GROUP; i++) {
            vec exact = v_mul(v_sub(v_set(group[i] - middle), low), inverse);
            vec number = v_sub(v_add(v_max(v_min(exact, most), zero), rounder), rounder);
            sum = v_add(sum, number);
            squares = v_fma(number, number, squares);
            shared = v_fma(number, v_set(group[i] - mean), shared);
            v_store(tried + i * RANGES, number);
        }
        vec center = v_mul(sum, each);
        vec spread = v_sub(squares, v_mul(sum, center)); /* of whole numbers: exact */
        vec fitted = v_div(shared, v_max(spread, each)), error = zero;
        for (int i = 0; i < GROUP; i++) {
            vec rounded = v_mul(v_sub(v_load(tried + i * RANGES), center), fitted);
            vec off = v_sub(rounded, v_set(group[i] - mean));
            error = v_fma(off, off, error);
        }
        v_store(errors, error);
        v_store(steps, fitted);
        v_store(means, center);
        int best = 0;
        for (int i = 1; i < RANGES; i++)
            best = errors[i] < errors[best] ? i : best;
        for (int i = 0; i < GROUP; i++)
            numbers[g * GROUP + i] = (uint8_t)tried[i * RANGES + best];
        scales[g] = steps[best];
        minima[g] = mean - steps[best] * means[best];
    }
}

/* A whole row in two: rows 2 `row` and the next, whose sum it is to 16 bits. The second one's steps
   are 1 / 254 of the first one's. */
static void prepare_twice(const ft_rows *rows, int32_t row, int32_t count, const float *x) {
    const int64_t place = (int64_t)2 * row * rows->inputs;
    prepare_whole(rows, place, count, x);
    const int8_t *coarse = rows->numbers + place;
    const ft_group *groups = rows->groups + place / GROUP;
    float rest[GROUP];
    for (int32_t group = 0; group < count / GROUP; group++) {
        float scale = groups[group].scale, fine = scale / 254.0f;
        vec inverse = v_set(fine > 0.0f ? 1.0f / fine : 0.0f);
        for (int32_t i = 0; i < GROUP; i++)
            rest[i] = x[group * GROUP + i] - scale * (float)coarse[group * GROUP + i];
        veci a = whole(v_mul(v_load(rest), inverse)), b = whole(v_mul(v_load(rest + 16), inverse));
        keep_group(rows, place + rows->inputs + group * GROUP, fine, a, b);
    }
}

/* The sum of (x - mean)^2. */
INLINE float squares_of(const float *x, float mean, int32_t count) {
    vec squares = v_set(0.0f), middle = v_set(mean);
    for (int32_t i = 0; i < count; i += 16) {
        vec part = v_sub(v_load(x + i), middle);
        squares = v_fma(part, part, squares);
    }
    return v_sum(squares);
}

static void norm(const float *x, const ft_norm *norm, int32_t count, float *out) {
    float mean = 0.0f;
    if (norm->centered) {
        vec sum = v_set(0.0f);
        for (int32_t i = 0; i < count; i += 16)
            sum = v_add(sum, v_load(x + i));
        mean = v_sum(sum) / (float)count;
    }
    vec middle = v_set(mean);
    vec factor = v_set(1.0f / sqrtf(squares_of(x, mean, count) / (float)count + norm->eps));
    for (int32_t i = 0; i < count; i += 16) {
        vec part = v_mul(v_mul(v_sub(v_load(x + i), middle), factor), v_load(norm->weight + i));
        v_store(out + i, norm->bias ? v_add(part, v_load(norm->bias + i)) : part);
    }
}

static void add(float *x, const float *more, float factor, int32_t count) {
    vec times = v_set(factor);
    for (int32_t i = 0; i < count; i += 16) {
        vec part = v_load(more + i);
        if (factor != 1.0f)
            part = v_mul(part, times);
        v_store(x + i, v_add(v_load(x + i), part));
    }
}

/* Turns the first `turned` numbers of a head, in pairs. */
static void rotate(float *head, const ft_rotation *rotation, int32_t position) {
    const int32_t half = rotation->turned / 2;
    const float *cosines = rotation->cosines + (int64_t)position * half;
    const float *sines = rotation->sines + (int64_t)position * half;
    int32_t i = 0;
    if (rotation->interleaved) {
        for (; i < half; i++) {
            float a = head[2 * i], b = head[2 * i + 1];
            head[2 * i] = a * cosines[i] - b * sines[i];
            head[2 * i + 1] = b * cosines[i] + a * sines[i];
        }
        return;
    }
    for (; i + 16 <= half; i += 16) {
        vec a = v_load(head + i), b = v_load(head + half + i);
        vec c = v_load(cosines + i), s = v_load(sines + i);
        v_store(head + i, v_sub(v_mul(a, c), v_mul(b, s)));
        v_store(head + half + i, v_add(v_mul(b, c), v_mul(a, s)));
    }
    for (; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cosines[i] - b * sines[i];
        head[half + i] = b * cosines[i] + a * sines[i];
    }
}

/* 1 / (1 + e**-x) */
INLINE vec logistic(vec x) {
    vec one = v_set(1.0f);
    return v_div(one, v_add(one, v_exp(v_sub(v_set(0.0f), x))));
}

INLINE vec v_tanh(vec x) {
    return v_sub(v_mul(v_set(2.0f), logistic(v_mul(v_set(2.0f), x))), v_set(1.0f));
}

/* The share of a normal distribution below x, to 1e-7 (Abramowitz and Stegun, 7.1.26). */
INLINE vec normal_below(vec x) {
    vec one = v_set(1.0f), size = v_mul(v_abs(x), v_set(0.70710678f));
    vec t = v_div(one, v_fma(size, v_set(0.3275911f), one));
    vec p = v_set(1.061405429f);
    p = v_fma(p, t, v_set(-1.453152027f));
    p = v_fma(p, t, v_set(1.421413741f));
    p = v_fma(p, t, v_set(-0.284496736f));
    p = v_mul(v_fma(p, t, v_set(0.254829592f)), t);
    vec beyond = v_mul(v_mul(p, v_exp(v_sub(v_set(0.0f), v_mul(size, size)))), v_set(0.5f));
    vec inside = v_sub(one, beyond); /* of |x|: that of -|x| is `beyond` */
    vec zero = v_set(0.0f), sign = v_div(x, v_max(v_abs(x), v_set(TINY)));
    vec positive = v_max(sign, zero), negative = v_max(v_sub(zero, sign), zero);
    vec neither = v_sub(one, v_add(positive, negative));
    return v_fma(positive, inside, v_fma(negative, beyond, v_mul(neither, v_set(0.5f))));
}

INLINE vec activate(vec x, int32_t activation) {
    vec zero = v_set(0.0f);
    if (activation == FT_GELU)
        return v_mul(x, normal_below(x));
    if (activation == FT_RELU || activation == FT_SQUARED_RELU) {
        vec positive = v_max(x, zero);
        return activation == FT_RELU ? positive : v_mul(positive, positive);
    }
    vec z = x; /* the others are x times a logistic function */
    if (activation == FT_GELU_TANH) {
        vec cube = v_mul(v_mul(x, x), x);
        z = v_mul(v_set(1.5957691216f), v_fma(v_set(0.044715f), cube, x));
    }
    return v_div(x, v_add(v_set(1.0f), v_exp(v_sub(zero, z))));
}

static void gate(const float *gate_x, const float *up, int32_t count, int32_t activation,
                 float *out) {
    if (activation == FT_CLAMPED_SILU) {
        const vec least = v_set(-7.0f), most = v_set(7.0f), one = v_set(1.0f);
        for (int32_t i = 0; i < count; i += 16) {
            vec x = v_min(v_load(gate_x + i), most);
            vec y = v_max(v_min(v_load(up + i), most), least);
            vec z = v_mul(x, logistic(v_mul(v_set(1.702f), x)));
            v_store(out + i, v_mul(z, v_add(y, one)));
        }
        return;
    }
    for (int32_t i = 0; i < count; i += 16) {
        vec y = activate(v_load(gate_x + i), activation);
        v_store(out + i, up ? v_mul(y, v_load(up + i)) : y);
    }
}

INLINE vec limited(vec x, float cap) {
    return v_mul(v_tanh(v_div(x, v_set(cap))), v_set(cap));
}

static void limit(float *x, float scale, float cap, int32_t count) {
    float part[16];
    for (int32_t i = 0; i < count; i += 16) {
        const int32_t here = count - i < 16 ? count - i : 16;
        memcpy(part, x + i, 4 * (size_t)here); /* the last vector is not whole */
        memset(part + here, 0, 4 * (size_t)(16 - here));
        vec y = v_mul(v_load(part), v_set(scale));
        v_store(part, cap ? limited(y, cap) : y);
        memcpy(x + i, part, 4 * (size_t)here);
    }
}

/* --- products: `height` rows by `count` blocks of 16 outputs, out (height, count * 16) */

/* Numbers as they are; tables from -16 to 15, any other, and those with parts of 1 / 256. */
enum { PLAIN, NARROW, WIDE, FINE };
#define NARROW_OFFSET 16
static const int8_t no_table[16];

/* Quad `q` of the 8 of a group: the numbers of 4 inputs of 16 outputs. */
INLINE bytes decode(const uint8_t *group, const int q, const int bits, const int lookup,
                    bytes table) {
    if (bits == 8)
        return b_load(group + 64 * q);
    bytes w;
    if (bits < 4) /* fields of 2 bits: a vector holds 4 quads */
        w = b_bits(b_load(group + 64 * (q / 4)), 2 * (q % 4), 3);
    else
        w = q < 4 ? b_low(b_load(group + 64 * q)) : b_high(b_load(group + 64 * (q - 4)));
    if (bits == 3 || bits == 5) /* one more vector, bit i of quad i */
        w = b_or(w, b_bits(b_load(group + 64 * (bits - 1)), q - bits + 1, 1 << (bits - 1)));
    if (bits == 6) /* two more, of fields of 2 bits */
        w = b_or(w, b_bits(b_load(group + 256 + 64 * (q / 4)), 2 * (q % 4) - 4, 48));
    return lookup == PLAIN || lookup == FINE ? w : b_lookup(table, w);
}

#ifndef FT_BFLOAT_DOTS
/* Scales, or least values, of 16 outputs in float32, for `count` parts of `size` inputs from input
   `first` on, all of them in the same 256. */
static __attribute__((noinline)) void read_scales(const uint8_t *scales, int32_t scaling,
                                                  int32_t group, int32_t first, int32_t size,
                                                  int32_t count, float *out) {
    const int doublings = __builtin_ctz((unsigned)group);
    vec factor = v_set(1.0f);
    if (scaling == FT_SUPER) { /* from here on those of the one super-block */
        scales += first / SUPER * (2 + SUPER / group) * BLOCK;
        factor = v_half((const uint16_t *)scales);
        scales += 2 * BLOCK;
        first %= SUPER;
    }
    for (int32_t i = 0; i < count; i++, out += BLOCK) {
        const int64_t place = (int64_t)((first + i * size) >> doublings) * BLOCK;
        switch (scaling) {
        case FT_HALF: v_store(out, v_half((const uint16_t *)scales + place)); break;
        case FT_SUPER: v_store(out, v_mul(factor, v_bytes(scales + place))); break;
        case FT_SINGLE: v_store(out, v_load((const float *)scales + place)); break;
        case FT_POWER: v_store(out, v_power(scales + place)); break;
        case FT_FLOAT8: v_store(out, v_float8(scales + place)); break;
        default: v_store(out, v_points(scales + place));
        }
    }
}

/* `split`: 2, where halves of the 32 inputs have scales of their own, else 1. */
INLINE void tile_whole(const ft_matrix *matrix, const int32_t *blocks, const int count,
                       const ft_rows *rows, int32_t first, const int height, const int bits,
                       const int split, const int lookup, float *out) {
    const int wide = bits == 8 || lookup >= WIDE;
    /* Quads whose products are added up before they could be too large. */
    const int summed = bits == 6 ? 2 : bits == 5 || lookup == NARROW ? 4 : 8 / split;
    const int32_t inputs = matrix->inputs, groups = inputs / GROUP;
    const int64_t block_bytes = (int64_t)inputs * 2 * bits, group_bytes = 64 * bits;
    const int32_t scaling = matrix->scaling, least_scaling = matrix->least_scaling;
    const int64_t scale_bytes = ft_scale_bytes(matrix, scaling);
    const int64_t least_bytes = ft_scale_bytes(matrix, least_scaling);
    const vec offset = v_set((float)(lookup == NARROW ? -NARROW_OFFSET
                                     : lookup >= WIDE ? -WIDE_OFFSET
                                     : bits == 8      ? 128 - WIDE_OFFSET - matrix->offset
                                                      : -matrix->offset));
    const int8_t *x = rows->numbers + (int64_t)first * inputs;
    const ft_group *known = rows->groups + (int64_t)first * groups;
    const uint8_t *weights[STRIP];
    /* Of 256 inputs at a time. */
    enum { PARTS = SUPER / 16 };
    float scales[STRIP][PARTS * BLOCK], minima[STRIP][PARTS * BLOCK];
    const bytes table = b_table(lookup == PLAIN ? no_table : matrix->table,
                                lookup == NARROW ? NARROW_OFFSET : 128);
    const bytes fine = b_table(lookup == FINE ? matrix->fine : no_table, 128);
    vec total[TILE * STRIP];
    UNROLL for (int n = 0; n < count; n++) {
        weights[n] = matrix->weights + blocks[n] * block_bytes;
    }
    UNROLL for (int i = 0; i < height * count; i++) total[i] = v_set(0.0f);
    for (int32_t group = 0; group < groups; group++) {
        const int32_t part_of_super = group % (SUPER / GROUP) * split;
        if (part_of_super == 0) {
            const int32_t left = groups - group, size = GROUP / split;
            const int32_t wanted = (left < SUPER / GROUP ? left : SUPER / GROUP) * split;
            for (int n = 0; n < count; n++) {
                read_scales(matrix->scales + blocks[n] * scale_bytes, scaling, matrix->group,
                            group * GROUP, size, wanted, scales[n]);
                if (least_scaling != FT_NONE)
                    read_scales(matrix->minima + blocks[n] * least_bytes, least_scaling,
                                matrix->group, group * GROUP, size, wanted, minima[n]);
            }
        }
        veci dots[TILE * STRIP], fine_dots[TILE * STRIP];
        part parts[TILE * STRIP];
        const int8_t *inputs_here = x + group * GROUP;
        if (height >= FETCHED && first == 0) {
            int64_t ahead = group * group_bytes + AHEAD;
            if (ahead >= block_bytes)
                ahead += (count - 1) * block_bytes;
            UNROLL for (int n = 0; n < count; n++)
                UNROLL for (int j = 0; j < bits; j++)
                    PREFETCH_WEIGHTS(weights[n] + ahead + 64 * j);
        }
        UNROLL for (int q = 0; q < 8; q++) {
            if (q % (8 / split) == 0)
                UNROLL for (int i = 0; i < height * count; i++) {
                    dots[i] = fine_dots[i] = i_set(0);
                    parts[i] = p_none();
                }
            UNROLL for (int n = 0; n < count; n++) {
                bytes w = decode(weights[n] + group * group_bytes, q, bits, lookup, table);
                UNROLL for (int m = 0; m < height; m++) {
                    const int8_t *of_row = inputs_here + (int64_t)m * inputs + 4 * q;
                    const int i = m * count + n;
                    if (lookup == FINE) {
                        dots[i] = I_DOT_WIDE(dots[i], b_lookup(table, w), of_row);
                        fine_dots[i] = I_DOT_WIDE(fine_dots[i], b_lookup(fine, w), of_row);
                        continue;
                    }
                    if (wide) {
                        dots[i] = I_DOT_WIDE(dots[i], w, of_row);
                        continue;
                    }
                    parts[i] = p_dot(parts[i], w, of_row);
                    if ((q + 1) % summed)
                        continue;
                    dots[i] = p_sum(dots[i], parts[i]);
                    parts[i] = p_none();
                }
            }
            if ((q + 1) % (8 / split))
                continue;
            const int s = q / 4;
            const int32_t place = (part_of_super + (split == 1 ? 0 : s)) * BLOCK;
            UNROLL for (int n = 0; n < count; n++) {
                vec scale = v_load(scales[n] + place), least = scale, from = offset;
                if (least_scaling != FT_NONE)
                    least = v_load(minima[n] + place);
                if (least_scaling == FT_POINT)
                    from = v_sub(offset, least);
                UNROLL for (int m = 0; m < height; m++) {
                    const ft_group *own = known + m * groups + group;
                    const int i = m * count + n;
                    vec step = v_set(own->scale);
                    vec sum = v_set(split == 1 ? own->sum : own->halves[s]);
                    vec dot = v_fma(from, sum, v_float(dots[i])); /* whole: exact */
                    if (lookup == FINE) { /* rounded once, in every kind alike */
                        vec rest = v_fma(from, sum, v_float(fine_dots[i]));
                        dot = v_add(v_mul(rest, v_set(1.0f / 256)), dot);
                    }
                    total[i] = v_fma(dot, v_mul(scale, step), total[i]);
                    if (least_scaling != FT_NONE && least_scaling != FT_POINT)
                        total[i] = v_fma(least, v_mul(step, sum), total[i]);
                }
            }
        }
    }
    UNROLL for (int i = 0; i < height * count; i++) v_store(out + 16 * i, total[i]);
}

/* Weights of float16, or `single`, as they are, and activations as they are. */
INLINE void tile_float(const ft_matrix *matrix, const int32_t *blocks, const int count,
                       const ft_rows *rows, int32_t first, const int height, const int single,
                       float *out) {
    const int32_t inputs = matrix->inputs, bytes_each = single ? 64 : 32;
    const float *x = rows->wide + (int64_t)first * inputs;
    const uint8_t *weights[STRIP];
    vec total[TILE * STRIP];
    UNROLL for (int n = 0; n < count; n++)
        weights[n] = matrix->weights + (int64_t)blocks[n] * inputs * bytes_each;
    UNROLL for (int i = 0; i < height * count; i++) total[i] = v_set(0.0f);
    for (int32_t k = 0; k < inputs; k++)
        UNROLL for (int n = 0; n < count; n++) {
            const uint8_t *here = weights[n] + (int64_t)k * bytes_each;
            vec w = single ? v_load((const float *)here) : v_half((const uint16_t *)here);
            UNROLL for (int m = 0; m < height; m++)
                total[m * count + n] =
                    v_fma(w, v_set(x[(int64_t)m * inputs + k]), total[m * count + n]);
        }
    UNROLL for (int i = 0; i < height * count; i++) v_store(out + 16 * i, total[i]);
}

/* Floats of 8 bits with scales, and activations as they are: each group's sum is scaled. */
INLINE void tile_signed8(const ft_matrix *matrix, const int32_t *blocks, const int count,
                         const ft_rows *rows, int32_t first, const int height, float *out) {
    const int32_t inputs = matrix->inputs, size = matrix->group;
    const int64_t scale_bytes = ft_scale_bytes(matrix, matrix->scaling);
    const float *x = rows->wide + (int64_t)first * inputs;
    const uint8_t *weights[STRIP];
    vec total[TILE * STRIP], dots[TILE * STRIP];
    float scales[BLOCK];
    UNROLL for (int n = 0; n < count; n++)
        weights[n] = matrix->weights + (int64_t)blocks[n] * inputs * BLOCK;
    UNROLL for (int i = 0; i < height * count; i++) total[i] = v_set(0.0f);
    for (int32_t group = 0; group < inputs; group += size) {
        UNROLL for (int i = 0; i < height * count; i++) dots[i] = v_set(0.0f);
        for (int32_t k = group; k < group + size; k++)
            UNROLL for (int n = 0; n < count; n++) {
                vec w = v_signed8(weights[n] + (int64_t)k * BLOCK);
                UNROLL for (int m = 0; m < height; m++)
                    dots[m * count + n] =
                        v_fma(w, v_set(x[(int64_t)m * inputs + k]), dots[m * count + n]);
            }
        UNROLL for (int n = 0; n < count; n++) {
            read_scales(matrix->scales + blocks[n] * scale_bytes, matrix->scaling, size, group,
                        size, 1, scales);
            UNROLL for (int m = 0; m < height; m++)
                total[m * count + n] =
                    v_fma(dots[m * count + n], v_load(scales), total[m * count + n]);
        }
    }
    UNROLL for (int i = 0; i < height * count; i++) v_store(out + 16 * i, total[i]);
}

#endif

INLINE void tile_bfloat(const ft_matrix *matrix, const int32_t *blocks, const int count,
                        const ft_rows *rows, int32_t first, const int height, float *out) {
    const int32_t inputs = matrix->inputs;
    const uint16_t *x = rows->narrow + (int64_t)first * inputs;
    const uint8_t *weights[STRIP];
    vec total[TILE * STRIP];
    UNROLL for (int n = 0; n < count; n++)
        weights[n] = matrix->weights + (int64_t)blocks[n] * inputs * BLOCK * 2;
    UNROLL for (int i = 0; i < height * count; i++) total[i] = v_set(0.0f);
    for (int32_t k = 0; k < inputs; k += 16) {
        if (height >= FETCHED && first == 0) {
            int64_t ahead = (int64_t)k * BLOCK * 2 + AHEAD;
            if (ahead >= (int64_t)inputs * BLOCK * 2)
                ahead += (count - 1) * (int64_t)inputs * BLOCK * 2;
            UNROLL for (int n = 0; n < count; n++)
                UNROLL for (int j = 0; j < 8; j++)
                    PREFETCH_WEIGHTS(weights[n] + ahead + 64 * j);
        }
        UNROLL for (int j = 0; j < 8; j++) {
            bytes w[STRIP];
            UNROLL for (int n = 0; n < count; n++) w[n] = b_load(weights[n] + (k / 2 + j) * 64);
            UNROLL for (int m = 0; m < height; m++) {
                const uint16_t *pair = x + (int64_t)m * inputs + k + 2 * j;
#ifdef FT_BFLOAT_DOTS
                int32_t two;
                memcpy(&two, pair, 4);
                __m512bh both = (__m512bh)_mm512_set1_epi32(two);
                UNROLL for (int n = 0; n < count; n++)
                    total[m * count + n] =
                        _mm512_dpbf16_ps(total[m * count + n], (__m512bh)w[n], both);
#else
                const bytes both = b_pairs(pair);
                vec one = v_first(both), two = v_second(both);
                UNROLL for (int n = 0; n < count; n++) {
                    vec sum = v_fma(v_first(w[n]), one, total[m * count + n]);
                    total[m * count + n] = v_fma(v_second(w[n]), two, sum);
                }
#endif
            }
        }
    }
    UNROLL for (int i = 0; i < height * count; i++) v_store(out + 16 * i, total[i]);
}

/* Each format has copies of its own, for each number of rows and blocks. */
typedef void (*tile_function)(const ft_matrix *, const int32_t *, const ft_rows *, int32_t,
                              float *);
#define TILE_OF(NAME, HEIGHT, COUNT, CALL, ...)                                                  \
    static __attribute__((noinline)) void NAME##_##HEIGHT##_##COUNT(                             \
        const ft_matrix *matrix, const int32_t *blocks, const ft_rows *rows, int32_t first,      \
        float *out) {                                                                            \
        CALL(matrix, blocks, COUNT, rows, first, HEIGHT, __VA_ARGS__);                           \
    }
#if HIGHEST == 1
#define TILES_OF(NAME, ...) TILE_OF(NAME, 1, 1, __VA_ARGS__)
#define NAMES_OF(NAME) {{NAME##_1_1}}
#define FEW_TILES_OF TILES_OF
#define FEW_NAMES_OF NAMES_OF
#elif HIGHEST == 2
#define TILES_OF(NAME, ...) TILE_OF(NAME, 1, 1, __VA_ARGS__) TILE_OF(NAME, 2, 1, __VA_ARGS__)
#define NAMES_OF(NAME) {{NAME##_1_1}, {NAME##_2_1}}
#define FEW_TILES_OF TILES_OF
#define FEW_NAMES_OF NAMES_OF
#elif HIGHEST == 4
#define TILES_OF(NAME, ...)                                                                      \
    TILE_OF(NAME, 1, 1, __VA_ARGS__) TILE_OF(NAME, 2, 1, __VA_ARGS__)                            \
    TILE_OF(NAME, 3, 1, __VA_ARGS__) TILE_OF(NAME, 4, 1, __VA_ARGS__)
#define NAMES_OF(NAME) {{NAME##_1_1}, {NAME##_2_1}, {NAME##_3_1}, {NAME##_4_1}}
#define FEW_TILES_OF TILES_OF
#define FEW_NAMES_OF NAMES_OF
#else
#define TWO_TILES(NAME, HEIGHT, ...)                                                             \
    TILE_OF(NAME, HEIGHT, 1, __VA_ARGS__) TILE_OF(NAME, HEIGHT, 2, __VA_ARGS__)
#define TWO_NAMES(NAME, HEIGHT) {NAME##_##HEIGHT##_1, NAME##_##HEIGHT##_2}
/* Of rarer formats fewer, so that the library stays small. */
#define FEW_TILES_OF(NAME, ...)                                                                  \
    TILE_OF(NAME, 1, 1, __VA_ARGS__) TILE_OF(NAME, 2, 1, __VA_ARGS__)                            \
    TILE_OF(NAME, 3, 1, __VA_ARGS__) TILE_OF(NAME, 4, 1, __VA_ARGS__)
#define FEW_NAMES_OF(NAME) {{NAME##_1_1}, {NAME##_2_1}, {NAME##_3_1}, {NAME##_4_1}}
#define TILES_OF(NAME, ...)                                                                      \
    FEW_TILES_OF(NAME, __VA_ARGS__) TILE_OF(NAME, 4, 2, __VA_ARGS__)                             \
    TWO_TILES(NAME, 5, __VA_ARGS__) TWO_TILES(NAME, 6, __VA_ARGS__)                              \
    TWO_TILES(NAME, 7, __VA_ARGS__) TWO_TILES(NAME, 8, __VA_ARGS__)
#define NAMES_OF(NAME)                                                                           \
    {{NAME##_1_1}, {NAME##_2_1}, {NAME##_3_1}, TWO_NAMES(NAME, 4), TWO_NAMES(NAME, 5),           \
     TWO_NAMES(NAME, 6), TWO_NAMES(NAME, 7), TWO_NAMES(NAME, 8)}
#endif
#define FEW_HIGHEST (HIGHEST < 4 ? HIGHEST : 4)

enum { WHOLE8_TILES, WHOLE4_TILES, BFLOAT_TILES, WHOLE2_TILES, SPLIT2_TILES, SPLIT3_TILES,
       WHOLE5_TILES, SPLIT6_TILES, NARROW_TILES, NARROW_SPLIT_TILES, WIDE_TILES, HALF_TILES,
       SINGLE_TILES, FINE_TILES, SIGNED8_TILES, ALL_TILES };
#define FEW_FROM WHOLE2_TILES
TILES_OF(bfloat, tile_bfloat, out)
#ifdef FT_BFLOAT_DOTS /* all others are those of ft_avx512 */
static const tile_function tiles[ALL_TILES][HIGHEST][2] = {[BFLOAT_TILES] = NAMES_OF(bfloat)};
#else
TILES_OF(whole8, tile_whole, 8, 1, PLAIN, out)
TILES_OF(whole4, tile_whole, 4, 1, PLAIN, out)
FEW_TILES_OF(whole2, tile_whole, 2, 1, PLAIN, out)
FEW_TILES_OF(split2, tile_whole, 2, 2, PLAIN, out)
FEW_TILES_OF(split3, tile_whole, 3, 2, PLAIN, out)
FEW_TILES_OF(whole5, tile_whole, 5, 1, PLAIN, out)
FEW_TILES_OF(split6, tile_whole, 6, 2, PLAIN, out)
FEW_TILES_OF(narrow4, tile_whole, 4, 1, NARROW, out)
FEW_TILES_OF(narrow_split4, tile_whole, 4, 2, NARROW, out)
FEW_TILES_OF(wide4, tile_whole, 4, 1, WIDE, out)
FEW_TILES_OF(half, tile_float, 0, out)
FEW_TILES_OF(single, tile_float, 1, out)
FEW_TILES_OF(fine4, tile_whole, 4, 1, FINE, out)
FEW_TILES_OF(signed8, tile_signed8, out)
static const tile_function tiles[ALL_TILES][HIGHEST][2] = {
    NAMES_OF(whole8), NAMES_OF(whole4), NAMES_OF(bfloat), FEW_NAMES_OF(whole2),
    FEW_NAMES_OF(split2), FEW_NAMES_OF(split3), FEW_NAMES_OF(whole5), FEW_NAMES_OF(split6),
    FEW_NAMES_OF(narrow4), FEW_NAMES_OF(narrow_split4), FEW_NAMES_OF(wide4), FEW_NAMES_OF(half),
    FEW_NAMES_OF(single), FEW_NAMES_OF(fine4), FEW_NAMES_OF(signed8)};
#endif

/* Which of `tiles` compute products with a matrix. */
static int tiles_of(const ft_matrix *matrix) {
    if (matrix->format != FT_WHOLE)
        return matrix->format == FT_BFLOAT16  ? BFLOAT_TILES
               : matrix->format == FT_FLOAT16 ? HALF_TILES
               : matrix->format == FT_SIGNED8 ? SIGNED8_TILES
                                              : SINGLE_TILES;
    if (matrix->fine)
        return FINE_TILES;
    if (matrix->table) {
        if (!ft_is_narrow(matrix->table))
            return WIDE_TILES;
        return matrix->group == 16 ? NARROW_SPLIT_TILES : NARROW_TILES;
    }
    switch (matrix->bits) {
    case 2: return matrix->group == 16 ? SPLIT2_TILES : WHOLE2_TILES;
    case 3: return SPLIT3_TILES;
    case 4: return WHOLE4_TILES;
    case 5: return WHOLE5_TILES;
    case 6: return SPLIT6_TILES;
    default: return WHOLE8_TILES;
    }
}

/* How many blocks at once, by the number of rows. Few wait for the memory, which is quickest
   where it is read in one stream; more rows share what is loaded of them between two blocks, whose
   sums still fit into the registers. */
#ifndef WIDTHS
#define WIDTHS {1, 1, 1, 2, 2, 2, 2, 2}
#endif
static const int widths[HIGHEST] = WIDTHS;

/* Up to STRIP blocks by up to TILE rows; out (height, count * 16). */
static void product(const ft_matrix *matrix, const int32_t *blocks, int32_t count,
                    const ft_rows *rows, int32_t first, int32_t height, float *out) {
    const int which = tiles_of(matrix), highest = which < FEW_FROM ? HIGHEST : FEW_HIGHEST;
    float part_out[TILE * STRIP * BLOCK];
#ifdef FT_BFLOAT_DOTS
    if (which != BFLOAT_TILES) {
        ft_avx512.product(matrix, blocks, count, rows, first, height, out);
        return;
    }
#endif
    for (int32_t row = 0; row < height;) {
        int32_t rows_here = height - row < highest ? height - row : highest;
        for (int32_t done = 0; done < count;) {
            int width = which < FEW_FROM ? widths[rows_here - 1] : 1;
            if (width > count - done)
                width = 1;
            tiles[which][rows_here - 1][width - 1](matrix, blocks + done, rows, first + row,
                                                   part_out);
            for (int m = 0; m < rows_here; m++)
                memcpy(out + ((row + m) * count + done) * BLOCK, part_out + m * width * BLOCK,
                       (size_t)width * BLOCK * sizeof(float));
            done += width;
        }
        row += rows_here;
    }
}

/* Writes, or adds, a tile (height, width) with `bias` to rows of y. */
static void deliver(const float *tile, int32_t width, int32_t tile_width, int32_t height,
                    const float *bias, float *y, int64_t stride, int32_t add) {
    for (int32_t m = 0; m < height; m++) {
        const float *from = tile + m * tile_width;
        float *to = y + m * stride;
        int32_t i = 0;
        for (; i + 16 <= width; i += 16) {
            vec out = v_load(from + i);
            if (bias)
                out = v_add(out, v_load(bias + i));
            v_store(to + i, add ? v_add(v_load(to + i), out) : out);
        }
        for (; i < width; i++) { /* outputs that only fill a block up are left out */
            float out = from[i];
            if (bias)
                out += bias[i];
            to[i] = add ? to[i] + out : out;
        }
    }
}

/* --- attention of some nodes' query heads that share one key head, over the rows they see

   A node's rows are put in the order of their positions: shared segments, committed rows, its own
   path. Scores are computed for all rows, those of the path moved together, and the sums run over
   that list; so a chain, a tree and a piece of a prompt give the same bits. */

/* What one call works in: of each query its numbers, what it mixes and its scores. */
static int64_t attention_floats(int32_t longest, int32_t width, int32_t queries) {
    return (int64_t)queries * (2 * width + longest + 32);
}

/* Scores of `count` queries for `tiles` times 16 keys, whose pairs of numbers lie in `pairs`. */
INLINE void score_tile(const uint16_t *pairs, const float *queries, int32_t width,
                       const int count, const int tiles, float *scores, int64_t stride) {
    vec sums[12];
    UNROLL for (int i = 0; i < count * tiles; i++) sums[i] = v_set(0.0f);
    for (int32_t d = 0; d < width; d += 2) {
        vec first[2], second[2];
        UNROLL for (int t = 0; t < tiles; t++) {
            bytes both = b_load((const uint8_t *)(pairs + 16 * (t * width + d)));
            first[t] = v_first(both);
            second[t] = v_second(both);
        }
        UNROLL for (int q = 0; q < count; q++) {
            vec one = v_set(queries[q * width + d]), two = v_set(queries[q * width + d + 1]);
            UNROLL for (int t = 0; t < tiles; t++) {
                vec sum = v_fma(one, first[t], sums[q * tiles + t]);
                sums[q * tiles + t] = v_fma(two, second[t], sum);
            }
        }
    }
    UNROLL for (int q = 0; q < count; q++)
        UNROLL for (int t = 0; t < tiles; t++)
            v_store(scores + q * stride + 16 * t, sums[q * tiles + t]);
}

/* 16 keys from `row` on; of keys that are not there the first one's numbers. */
static void turn_keys(const ft_span *part, int32_t row, int32_t to, int32_t width,
                      uint16_t *pairs) {
    const uint16_t *keys = part->keys + (int64_t)row * width;
    if (row + 16 <= to) {
        for (int32_t d = 0; d < width; d += 32)
            b_transpose(keys + d, width, pairs + 16 * d);
        return;
    }
    uint16_t rows[16 * 32];
    for (int32_t d = 0; d < width; d += 32) {
        for (int32_t i = 0; i < 16; i++)
            memcpy(rows + 32 * i, keys + (row + i < to ? i * width : 0) + d, 64);
        b_transpose(rows, 32, pairs + 16 * d);
    }
}

/* Scores of `count` queries for rows `from` to `to - 1` of a part; `pairs` is memory to work in. */
static void score_span(const ft_span *part, int32_t from, int32_t to, int32_t width,
                       const float *queries, int32_t count, uint16_t *pairs, float *scores,
                       int64_t stride) {
    for (int32_t row = from; row < to; row += 32) {
        const int tiles = row + 16 < to ? 2 : 1;
        const char *ahead = (const char *)(part->keys + (int64_t)(row + 64) * width);
        for (int32_t line = 0; line < width; line++) /* 32 rows, 2 bytes a number, 64 a line */
            PREFETCH(ahead + 64 * line);
        turn_keys(part, row, to, width, pairs);
        if (tiles == 2)
            turn_keys(part, row + 16, to, width, pairs + 16 * width);
        float *place = scores + part->begin + row;
        int32_t q = 0;
        if (tiles == 2) {
            for (; q + 6 <= count; q += 6)
                score_tile(pairs, queries + q * width, width, 6, 2, place + q * stride, stride);
            for (; q + 3 <= count; q += 3)
                score_tile(pairs, queries + q * width, width, 3, 2, place + q * stride, stride);
            for (; q < count; q++)
                score_tile(pairs, queries + q * width, width, 1, 2, place + q * stride, stride);
        }
        for (; q + 6 <= count; q += 6)
            score_tile(pairs, queries + q * width, width, 6, 1, place + q * stride, stride);
        for (; q < count; q++)
            score_tile(pairs, queries + q * width, width, 1, 1, place + q * stride, stride);
    }
}

/* The powers of `count` scores, limited by `cap`, less the highest, `most`, in place; returns their
   sum, with that of a `sink` that has no row; NULL: there is none. */
static float soften_list(float *scores, int32_t count, float cap, const float *sink,
                         float *most) {
    int32_t whole = (count + 15) / 16 * 16;
    for (int32_t i = count; i < whole; i++)
        scores[i] = scores[0];
    for (int32_t i = 0; cap && i < whole; i += 16)
        v_store(scores + i, limited(v_load(scores + i), cap));
    vec top = v_load(scores);
    for (int32_t i = 16; i < whole; i += 16)
        top = v_max(top, v_load(scores + i));
    *most = v_top(top);
    if (sink && *sink > *most)
        *most = *sink;
    vec highest = v_set(*most), sum = v_set(0.0f);
    for (int32_t i = 0; i < whole; i += 16) {
        v_store(scores + i, v_exp(v_sub(v_load(scores + i), highest)));
        if (i + 16 > count)
            for (int32_t j = count; j < whole; j++)
                scores[j] = 0.0f;
        sum = v_add(sum, v_load(scores + i));
    }
    return v_sum(sum) + (sink ? v_top(v_exp(v_sub(v_set(*sink), highest))) : 0.0f);
}

/* Adds weights[q][i] * values[i] for rows `from` to `to - 1`, in that order, to out[q]. */
INLINE void mix_tile(const uint16_t *values, int32_t width, int32_t from, int32_t to,
                     const float *weights, int64_t stride, const int count, const int vectors,
                     float *out, int64_t out_stride) {
    vec sums[6 * 4];
    UNROLL for (int q = 0; q < count; q++)
        UNROLL for (int v = 0; v < vectors; v++)
            sums[q * vectors + v] = v_load(out + q * out_stride + 16 * v);
    for (int32_t row = from; row < to; row++) {
        vec value[4];
        PREFETCH((const char *)(values + (int64_t)(row + 48) * width));
        PREFETCH((const char *)(values + (int64_t)(row + 48) * width) + 64);
        UNROLL for (int v = 0; v < vectors; v++)
            value[v] = v_bfloat(values + (int64_t)row * width + 16 * v);
        UNROLL for (int q = 0; q < count; q++) {
            vec weight = v_set(weights[q * stride + row]);
            UNROLL for (int v = 0; v < vectors; v++)
                sums[q * vectors + v] = v_fma(weight, value[v], sums[q * vectors + v]);
        }
    }
    UNROLL for (int q = 0; q < count; q++)
        UNROLL for (int v = 0; v < vectors; v++)
            v_store(out + q * out_stride + 16 * v, sums[q * vectors + v]);
}

#define MIX(COUNT)                                                                               \
    for (; q + COUNT <= count; q += COUNT) {                                                     \
        int32_t d = first;                                                                       \
        for (; d + 64 <= last; d += 64)                                                          \
            mix_tile(values + d, width, from, to, weights + q * stride, stride, COUNT, 4,        \
                     out + q * width + d, width);                                                \
        for (; d + 32 <= last; d += 32)                                                          \
            mix_tile(values + d, width, from, to, weights + q * stride, stride, COUNT, 2,        \
                     out + q * width + d, width);                                                \
        for (; d < last; d += 16)                                                                \
            mix_tile(values + d, width, from, to, weights + q * stride, stride, COUNT, 1,        \
                     out + q * width + d, width);                                                \
    }

/* The same for any number of queries, and numbers `first` to `last - 1` of the values. */
static void mix_rows(const uint16_t *values, int32_t width, int32_t first, int32_t last,
                     int32_t from, int32_t to, const float *weights, int64_t stride,
                     int32_t count, float *out) {
    int32_t q = 0;
    if (from >= to)
        return;
    MIX(6) MIX(3) MIX(1)
}

/* The first row of the own ones whose position is at least `position`. */
static int32_t first_from(const int32_t *positions, int32_t count, int32_t position) {
    int32_t low = 0, high = count;
    while (low < high) {
        int32_t middle = (low + high) / 2;
        if (positions[middle] < position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Positions that a job's nodes see back; 0: all. */
static int32_t window_of(const ft_heads *heads, const ft_job *job) {
    return job->row_positions ? heads->window : 0;
}

/* Whether a node sees one of its own rows, which is none of those that all nodes see. */
static int sees(const ft_heads *heads, const ft_job *job, int32_t node, int32_t row) {
    int32_t window = window_of(heads, job);
    int64_t scratch = job->start - job->base + job->nodes;
    if (job->seen && !job->seen[node * scratch + row - job->base])
        return 0;
    return !window || job->row_positions[row] > job->positions[node] - window;
}

/* Where a node's list of rows begins: `common` own rows stand behind `before` of segments. */
static int32_t begin_of(const ft_heads *heads, const ft_job *job, int32_t node, int32_t common,
                        int32_t before) {
    int32_t window = window_of(heads, job);
    int32_t least = window ? job->positions[node] - window + 1 : 0;
    if (least <= 0)
        return 0;
    return least < before ? least : before + first_from(job->row_positions, common, least);
}

/* Own rows that every node of a part sees, windows aside. */
static int32_t common_rows(const ft_part *part) {
    const ft_job *job = part->job;
    return job->seen || job->base > job->start ? job->base : job->start + part->first + 1;
}

/* Sets a call up: where its rows lie, its queries, and where each node's list begins. */
static void set_up(ft_attention *call, int64_t query_stride, float *memory) {
    const ft_heads *heads = &call->heads;
    const int32_t width = heads->width, group = heads->group;
    const ft_job *any = call->parts->job;
    call->before = call->end = call->nodes = 0;
    for (int32_t s = 0; s < any->segments; s++) {
        const ft_segment *segment = any->segment + s;
        int64_t place =
            heads->layer * segment->layer_stride + heads->kv_head * segment->head_stride;
        call->shared[s] = (ft_span){segment->keys + place, segment->values + place, segment->rows,
                                    call->before};
        call->before += segment->rows;
    }
    for (int32_t p = 0; p < call->part_count; p++) {
        const ft_part *part = call->parts + p;
        const ft_job *job = part->job;
        int64_t place = heads->layer * job->layer_stride + heads->kv_head * job->head_stride;
        int32_t rows = job->start + part->first + part->nodes, common = common_rows(part);
        rows = rows > common ? rows : common;
        int32_t end = call->before + rows;
        call->own[p] = (ft_span){job->keys + place, job->values + place, rows, call->before};
        call->end = end > call->end ? end : call->end;
        call->nodes += part->nodes;
    }
    const int32_t numbers = call->nodes * group * width;
    call->stride = call->end + 32;
    call->scaled = memory;
    call->mixed = memory + numbers;
    call->scores = memory + 2 * numbers;
    for (int32_t i = 0; i < numbers; i++)
        call->mixed[i] = 0.0f;
    call->lowest = call->end;
    call->highest = 0;
    float *scaled = call->scaled;
    for (int32_t p = 0, i = 0; p < call->part_count; p++) {
        const ft_part *part = call->parts + p;
        for (int32_t n = 0; n < part->nodes; n++, i++) {
            const float *queries = part->queries + n * query_stride;
            for (int32_t d = 0; d < group * width; d++)
                *scaled++ = queries[d] * heads->scale;
            int32_t begin =
                begin_of(heads, part->job, part->first + n, common_rows(part), call->before);
            call->begins[i] = begin;
            call->lowest = begin < call->lowest ? begin : call->lowest;
            call->highest = begin > call->highest ? begin : call->highest;
        }
    }
}

/* The rows of a span that stand at places `from` to `to - 1`: scores of `count` queries. */
static void score_places(const ft_attention *call, const ft_span *span, int32_t from, int32_t to,
                         const float *queries, int32_t count, float *memory, float *scores) {
    int32_t first = from > span->begin ? from - span->begin : 0, last = to - span->begin;
    last = last < span->rows ? last : span->rows;
    score_span(span, first, last, call->heads.width, queries, count, (uint16_t *)memory, scores,
               call->stride);
}

/* `memory`: the keys of two tiles, 32 of them. */
static void score(ft_attention *call, int32_t from, int32_t to, float *memory) {
    const int32_t width = call->heads.width, group = call->heads.group;
    from = from > call->lowest ? from : call->lowest;
    for (int32_t s = 0; s < call->parts->job->segments; s++)
        score_places(call, call->shared + s, from, to, call->scaled, call->nodes * group, memory,
                     call->scores);
    int64_t first = 0;
    for (int32_t p = 0; p < call->part_count; p++) {
        int32_t count = call->parts[p].nodes * group;
        score_places(call, call->own + p, from, to, call->scaled + first * width, count, memory,
                     call->scores + first * call->stride);
        first += count;
    }
}

/* Each node's own rows move together behind the common ones; then all scores become weights. */
static void soften(ft_attention *call) {
    const int32_t group = call->heads.group;
    for (int32_t p = 0, i = 0; p < call->part_count; p++) {
        const ft_part *part = call->parts + p;
        int32_t common = common_rows(part);
        for (int32_t n = 0; n < part->nodes; n++, i++) {
            int32_t node = part->first + n, length = call->before + common;
            for (int32_t row = common; row < part->job->start + node + 1; row++) {
                if (!sees(&call->heads, part->job, node, row))
                    continue;
                for (int32_t q = i * group; q < (i + 1) * group; q++) {
                    float *list = call->scores + q * call->stride;
                    list[length] = list[call->before + row];
                }
                length++;
            }
            call->lengths[i] = length;
        }
    }
    for (int32_t q = 0; q < call->nodes * group; q++) {
        int32_t begin = call->begins[q / group];
        float most;
        const float *sink = call->heads.sinks ? call->heads.sinks + q % group : NULL;
        call->sums[q] = soften_list(call->scores + q * call->stride + begin,
                                    call->lengths[q / group] - begin, call->heads.cap, sink,
                                    &most);
    }
}

/* Weighs the first `rows` rows of a span for nodes from `i` on. Those before the place `highest`
   are weighed node by node, from where each one's list begins. */
static void mix_span(ft_attention *call, const ft_span *span, int32_t rows, int32_t i,
                     int32_t nodes, int32_t first, int32_t last) {
    const int32_t width = call->heads.width, group = call->heads.group, begin = span->begin;
    const int64_t stride = call->stride;
    int32_t middle = call->highest > begin ? call->highest - begin : 0;
    middle = middle < rows ? middle : rows;
    for (int32_t node = i; node < i + nodes && middle; node++) {
        int32_t from = call->begins[node] > begin ? call->begins[node] - begin : 0;
        int32_t q = node * group;
        mix_rows(span->values, width, first, last, from, middle,
                 call->scores + begin + q * stride, stride, group, call->mixed + q * width);
    }
    int32_t q = i * group;
    mix_rows(span->values, width, first, last, middle, rows, call->scores + begin + q * stride,
             stride, nodes * group, call->mixed + q * width);
}

static void mix(ft_attention *call, int32_t first, int32_t last) {
    const int32_t width = call->heads.width, group = call->heads.group;
    for (int32_t s = 0; s < call->parts->job->segments; s++)
        mix_span(call, call->shared + s, call->shared[s].rows, 0, call->nodes, first, last);
    for (int32_t p = 0, i = 0; p < call->part_count; i += call->parts[p].nodes, p++) {
        const ft_part *part = call->parts + p;
        int32_t common = common_rows(part);
        mix_span(call, call->own + p, common, i, part->nodes, first, last);
        for (int32_t n = 0; n < part->nodes; n++) {
            int32_t node = part->first + n, length = call->before + common;
            int64_t q = (int64_t)(i + n) * group;
            for (int32_t row = common; row < part->job->start + node + 1; row++) {
                if (!sees(&call->heads, part->job, node, row))
                    continue;
                /* The weight stands at `length`, and the row's values at `row`. */
                mix_rows(call->own[p].values + (int64_t)(row - length) * width, width, first, last,
                         length, length + 1, call->scores + q * call->stride, call->stride, group,
                         call->mixed + q * width);
                length++;
            }
        }
    }
    for (int32_t q = 0; q < call->nodes * group; q++) {
        vec sum = v_set(call->sums[q]);
        float *mixed = call->mixed + (int64_t)q * width;
        for (int32_t d = first; d < last; d += 16)
            v_store(mixed + d, v_div(v_load(mixed + d), sum));
    }
}

/* The largest of some logits, NaN aside where it can be. */
static float top(const float *logits, int32_t count) {
    float highest = -INFINITY;
    int32_t i = 0;
    if (count >= 16) {
        vec highests = v_load(logits);
        for (i = 16; i + 16 <= count; i += 16)
            highests = v_max(highests, v_load(logits + i));
        highest = v_top(highests);
    }
    for (; i < count; i++)
        highest = logits[i] > highest ? logits[i] : highest;
    return highest;
}

/* The sum of exponentials of some logits, divided by that of `highest`. */
static float sum_above(const float *logits, int32_t count, float highest) {
    vec from = v_set(highest), sums = v_set(0.0f);
    int32_t i = 0;
    for (; i + 16 <= count; i += 16)
        sums = v_add(sums, v_exp(v_sub(v_load(logits + i), from)));
    float sum = v_sum(sums);
    for (; i < count; i++)
        sum += expf(logits[i] - highest);
    return sum;
}

/* Exponentials of some logits less `from`, out (count,) with room for a multiple of 16. */
static void exponentials(const float *logits, int32_t count, float from, float *out) {
    float part[16];
    for (int32_t i = 0; i < count; i += 16) {
        const float *own = logits + i;
        if (i + 16 > count) {
            for (int j = 0; j < 16; j++)
                part[j] = i + j < count ? logits[i + j] : from;
            own = part;
        }
        v_store(out + i, v_exp(v_sub(v_load(own), v_set(from))));
    }
}

/* The first of the largest of some logits, and its chance under their softmax. */
static int32_t best(const float *logits, int32_t count, float *chance) {
    enum { PART = 1024 };
    float highest = -INFINITY;
    int32_t part = 0, place = 0;
    for (int32_t from = 0; from < count; from += PART) {
        float most = top(logits + from, from + PART < count ? PART : count - from);
        if (most > highest) {
            highest = most;
            part = from;
        }
    }
    for (place = part; place + 1 < count && logits[place] != highest;)
        place++;
    *chance = 1.0f / sum_above(logits, count, highest);
    return place;
}

#include "listed.h"
