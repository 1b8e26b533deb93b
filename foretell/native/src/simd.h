/* Vectors of 16 floats, and of 16 whole numbers of 32 bits, on each kind of processor.

   The including file defines one of FT_AVX512, FT_AVX2 or FT_NEON, or none for plain C. Every
   operation is exact or rounds once, as IEEE 754 says, and sums are taken in one order, so that a
   kernel written with them gives the same bits on all of them. */

#ifndef FT_SIMD_H
#define FT_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define FLAT _Pragma("GCC unroll 16") /* so that arrays become registers */

/* Half precision to single precision, for processors that do not do it themselves. */
INLINE float ft_half(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = (bits >> 10) & 0x1fu, fraction = bits & 0x3ffu, out;
    if (exponent == 0) { /* zero and numbers below the normal ones */
        float value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    if (exponent == 31)
        out = sign | 0x7f800000u | fraction << 13;
    else
        out = sign | (exponent + 112) << 23 | fraction << 13;
    float value;
    memcpy(&value, &out, 4);
    return value;
}

INLINE float ft_bfloat(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* 2 to the power e - 128, below the normal numbers too. */
INLINE float ft_power(uint8_t e) {
    uint32_t bits = e < 2 ? 0x200000u << e : (uint32_t)(e - 1) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Half of a number of 4 bits of exponent and 3 of mantissa, without a sign. */
INLINE float ft_float8(uint8_t bits) { return ft_half((uint16_t)(bits << 7)) * 128.0f; }

/* A number of a sign, 4 bits of exponent and 3 of mantissa. */
INLINE float ft_signed8(uint8_t bits) {
    return ft_half((uint16_t)((bits & 128) << 8 | (bits & 127) << 7)) * 256.0f;
}

/* To bfloat16, to the nearest, ties to even; NaN stays NaN. */
INLINE uint16_t ft_to_bfloat(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#if defined(FT_AVX512)

#include <immintrin.h>
typedef __m512 vec;
typedef __m512i veci;
typedef __m512i bytes; /* 16 outputs of 4 inputs */
INLINE vec v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vec a) { _mm512_storeu_ps(p, a); }
INLINE vec v_set(float a) { return _mm512_set1_ps(a); }
INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec v_abs(vec a) { return _mm512_abs_ps(a); }
/* One bit for each number of `a` that is at least that of `b`. */
INLINE uint32_t v_reaching(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE vec v_round(vec a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE vec v_half(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vec v_bfloat(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE veci v_int(vec a) { return _mm512_cvtps_epi32(a); }
INLINE vec v_float(veci a) { return _mm512_cvtepi32_ps(a); }
INLINE veci i_set(int32_t a) { return _mm512_set1_epi32(a); }
INLINE veci i_add(veci a, veci b) { return _mm512_add_epi32(a, b); }
/* a * 2**n for whole n in the range of normal numbers. */
INLINE vec v_scale(vec a, veci n) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(n, 23)));
}
INLINE void i_store_bytes(int8_t *p, veci a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a));
}
INLINE int32_t i_sum(veci a) { return _mm512_reduce_add_epi32(a); }
INLINE bytes b_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE bytes b_low(bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE bytes b_high(bytes a) { return b_low(_mm512_srli_epi16(a, 4)); }
/* Adds the products of unsigned weights with 4 signed inputs; exact. */
INLINE veci i_dot(veci a, bytes w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_dpbusd_epi32(a, w, _mm512_set1_epi32(four));
}
#define I_DOT_WIDE i_dot
#define WIDE_OFFSET 128 /* of weights of 8 bits as I_DOT_WIDE reads them */
/* Sums of products of unsigned weights, which may have to be added to others before they are too
   large: of 2, 3 and 4 bits those of 8 vectors are not, of 5 bits of 4, of 6 bits of 2. */
typedef veci part;
INLINE part p_none(void) { return i_set(0); }
INLINE part p_dot(part a, bytes w, const int8_t *x) { return i_dot(a, w, x); }
INLINE veci p_sum(veci a, part b) { return i_add(a, b); }
/* The bits of each byte from `right` on (negative: moved up) that are in the mask. Shifts have no
   number that is known only later. */
#define RIGHT(N) case N: a = _mm512_srli_epi16(a, N); break;
#define LEFT(N) case -N: a = _mm512_slli_epi16(a, N); break;
INLINE bytes b_bits(bytes a, const int right, const int mask) {
    switch (right) {
        RIGHT(1) RIGHT(2) RIGHT(3) RIGHT(4) RIGHT(5) RIGHT(6) LEFT(1) LEFT(2) LEFT(3) LEFT(4)
    default: break;
    }
    return _mm512_and_si512(a, _mm512_set1_epi8((char)mask));
}
INLINE bytes b_or(bytes a, bytes b) { return _mm512_or_si512(a, b); }
/* A table of 16 bytes, `more` added to each, and what stands in it for numbers of 4 bits. */
INLINE bytes b_table(const int8_t *table, int more) {
    __m128i one = _mm_loadu_si128((const __m128i *)table);
    return _mm512_broadcast_i32x4(_mm_add_epi8(one, _mm_set1_epi8((char)more)));
}
INLINE bytes b_lookup(bytes table, bytes a) { return _mm512_shuffle_epi8(table, a); }
/* Scales: whole numbers with and without a sign, powers of 2 (see FT_POWER), small floats. */
INLINE vec v_bytes(const uint8_t *p) {
    return v_float(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE __m512i wide_bytes(const uint8_t *p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
INLINE vec v_points(const uint8_t *p) { return v_float(wide_bytes(p)); }
INLINE vec v_power(const uint8_t *p) {
    __m512i e = wide_bytes(p), one = _mm512_set1_epi32(1);
    __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, one), 23);
    __m512i below = _mm512_slli_epi32(_mm512_add_epi32(e, one), 21);
    return _mm512_castsi512_ps(_mm512_max_epi32(normal, below));
}
INLINE vec v_float8(const uint8_t *p) {
    __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_slli_epi16(bits, 7)), _mm512_set1_ps(128.0f));
}
/* Floats of 8 bits with a sign: extended by it, shifted, and without its copy. */
INLINE vec v_signed8(const uint8_t *p) {
    __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    bits = _mm256_and_si256(bits, _mm256_set1_epi16((short)0xbfff));
    return _mm512_mul_ps(_mm512_cvtph_ps(bits), _mm512_set1_ps(256.0f));
}
/* A pair of bfloat16, 16 times; the first and the second of 16 pairs. */
INLINE bytes b_pairs(const uint16_t *p) {
    int32_t two;
    memcpy(&two, p, 4);
    return _mm512_set1_epi32(two);
}
INLINE vec v_first(bytes a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
INLINE vec v_second(bytes a) {
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32((int)0xffff0000u)));
}
/* out[32 i + 2 j] and the next = row j's number 2 i and the next: of 16 rows of 32 bfloat16,
   `stride` numbers apart, pairs change places. */
INLINE void b_transpose(const uint16_t *rows, int64_t stride, uint16_t *out) {
    __m512i a[16], b[16];
    FLAT for (int i = 0; i < 16; i++)
        a[i] = _mm512_loadu_si512(rows + i * stride);
    FLAT for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    FLAT for (int i = 0; i < 16; i += 4)
        FLAT for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    FLAT for (int i = 0; i < 4; i++) {
        __m512i lower = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
        __m512i upper = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        _mm512_storeu_si512(out + 32 * i, _mm512_shuffle_i32x4(lower, upper, 0x88));
        _mm512_storeu_si512(out + 32 * (8 + i), _mm512_shuffle_i32x4(lower, upper, 0xdd));
        lower = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        upper = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
        _mm512_storeu_si512(out + 32 * (4 + i), _mm512_shuffle_i32x4(lower, upper, 0x88));
        _mm512_storeu_si512(out + 32 * (12 + i), _mm512_shuffle_i32x4(lower, upper, 0xdd));
    }
}
/* To bfloat16, to the nearest, ties to even; NaN stays NaN. */
INLINE void v_store_bfloat(uint16_t *p, vec a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    nearest = _mm512_mask_or_epi32(nearest, nan, bits, _mm512_set1_epi32(0x400000));
    nearest = _mm512_srli_epi32(nearest, 16);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(nearest));
}
/* The sum of 16 numbers, in one order everywhere: halves are added to each other. */
INLINE float v_sum(vec a) {
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 part = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    part = _mm_add_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_add_ss(part, _mm_shuffle_ps(part, part, 1)));
}
INLINE float v_top(vec a) { return _mm512_reduce_max_ps(a); }
/* The sums of 16 vectors, each as v_sum takes it. */
INLINE vec v_sums(const vec *a) {
    __m512 b[8], c[4], d[2];
    FLAT for (int i = 0; i < 8; i++) /* halves */
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 8], 0x44),
                             _mm512_shuffle_f32x4(a[i], a[i + 8], 0xee));
    FLAT for (int i = 0; i < 4; i++) /* quarters: of a[i], a[i + 4], a[i + 8], a[i + 12] */
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[i], b[i + 4], 0x88),
                             _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd));
    FLAT for (int i = 0; i < 2; i++) /* pairs, within quarters */
        d[i] = _mm512_add_ps(_mm512_shuffle_ps(c[i], c[i + 2], 0x44),
                             _mm512_shuffle_ps(c[i], c[i + 2], 0xee));
    __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(d[0], d[1], 0x88),
                                _mm512_shuffle_ps(d[0], d[1], 0xdd));
    const __m512i places = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return _mm512_permutexvar_ps(places, sums);
}
#define FT_WIDE_OPERATIONS

#elif defined(FT_AVX2)

#include <immintrin.h>
typedef struct { __m256 a, b; } vec;
typedef struct { __m256i a, b; } veci;
typedef veci bytes;
#define BOTH(F, X, Y) {F((X).a, (Y).a), F((X).b, (Y).b)}
INLINE vec v_load(const float *p) { return (vec){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void v_store(float *p, vec x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
INLINE vec v_set(float x) { return (vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vec v_add(vec x, vec y) { return (vec)BOTH(_mm256_add_ps, x, y); }
INLINE vec v_sub(vec x, vec y) { return (vec)BOTH(_mm256_sub_ps, x, y); }
INLINE vec v_mul(vec x, vec y) { return (vec)BOTH(_mm256_mul_ps, x, y); }
INLINE vec v_div(vec x, vec y) { return (vec)BOTH(_mm256_div_ps, x, y); }
INLINE vec v_max(vec x, vec y) { return (vec)BOTH(_mm256_max_ps, x, y); }
INLINE vec v_min(vec x, vec y) { return (vec)BOTH(_mm256_min_ps, x, y); }
INLINE vec v_fma(vec x, vec y, vec z) {
    return (vec){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE uint32_t v_reaching(vec x, vec y) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)) |
           (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)) << 8;
}
INLINE vec v_abs(vec x) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return (vec){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
#define NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
INLINE vec v_round(vec x) {
    return (vec){_mm256_round_ps(x.a, NEAREST), _mm256_round_ps(x.b, NEAREST)};
}
INLINE vec v_half(const uint16_t *p) {
    return (vec){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
INLINE __m256 half_bfloat(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE vec v_bfloat(const uint16_t *p) { return (vec){half_bfloat(p), half_bfloat(p + 8)}; }
INLINE veci v_int(vec x) { return (veci){_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE vec v_float(veci x) { return (vec){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE veci i_set(int32_t x) { return (veci){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE veci i_add(veci x, veci y) {
    return (veci){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
INLINE __m256 half_scale(__m256 x, __m256i n) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(n, 23)));
}
INLINE vec v_scale(vec x, veci n) { return (vec){half_scale(x.a, n.a), half_scale(x.b, n.b)}; }
INLINE void i_store_bytes(int8_t *p, veci x) {
    int32_t wide[16];
    _mm256_storeu_si256((__m256i *)wide, x.a);
    _mm256_storeu_si256((__m256i *)(wide + 8), x.b);
    for (int i = 0; i < 16; i++)
        p[i] = (int8_t)wide[i];
}
INLINE int32_t i_sum(veci x) {
    uint32_t wide[8], sum = 0; /* what no number became wraps round, as vectors do */
    _mm256_storeu_si256((__m256i *)wide, _mm256_add_epi32(x.a, x.b));
    for (int i = 0; i < 8; i++)
        sum += wide[i];
    return (int32_t)sum;
}
INLINE bytes b_load(const uint8_t *p) {
    return (bytes){_mm256_loadu_si256((const __m256i *)p),
                   _mm256_loadu_si256((const __m256i *)(p + 32))};
}
INLINE bytes b_low(bytes x) {
    __m256i mask = _mm256_set1_epi8(15);
    return (bytes){_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
INLINE bytes b_high(bytes x) {
    return b_low((bytes){_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
/* Nothing, but a sum that has come so far: compilers would take its parts in another order, keep all
   of them for longer, and have no registers left. */
#define IN_ORDER(X) __asm__("" : "+x"((X).a), "+x"((X).b))
/* Weights of 0 to 15: pairs of products fit into 16 bits. */
INLINE __m256i half_dot(__m256i a, __m256i w, __m256i x) {
    __m256i pairs = _mm256_maddubs_epi16(w, x);
    return _mm256_add_epi32(a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE veci i_dot(veci a, bytes w, const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    __m256i x = _mm256_set1_epi32(four);
    return (veci){half_dot(a.a, w.a, x), half_dot(a.b, w.b, x)};
}
/* Weights of 8 bits, stored with 128 added: here as size and sign, whose pairs fit as well. */
INLINE __m256i half_dot_wide(__m256i a, __m256i w, __m256i x) {
    w = _mm256_xor_si256(w, _mm256_set1_epi8((char)-128));
    return half_dot(a, _mm256_sign_epi8(w, w), _mm256_sign_epi8(x, w));
}
INLINE veci i_dot_wide(veci a, bytes w, const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    __m256i x = _mm256_set1_epi32(four);
    a = (veci){half_dot_wide(a.a, w.a, x), half_dot_wide(a.b, w.b, x)};
    IN_ORDER(a);
    return a;
}
#define I_DOT_WIDE i_dot_wide
#define WIDE_OFFSET 0
/* 16 bits each. */
typedef veci part;
INLINE part p_none(void) { return i_set(0); }
INLINE part p_dot(part a, bytes w, const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    __m256i x = _mm256_set1_epi32(four);
    a.a = _mm256_add_epi16(a.a, _mm256_maddubs_epi16(w.a, x));
    a.b = _mm256_add_epi16(a.b, _mm256_maddubs_epi16(w.b, x));
    IN_ORDER(a);
    return a;
}
INLINE veci p_sum(veci a, part b) {
    const __m256i one = _mm256_set1_epi16(1);
    return (veci){_mm256_add_epi32(a.a, _mm256_madd_epi16(b.a, one)),
                  _mm256_add_epi32(a.b, _mm256_madd_epi16(b.b, one))};
}
INLINE __m256i half_bits(__m256i x, const int right, const int mask) {
    x = right > 0 ? _mm256_srli_epi16(x, right) : right < 0 ? _mm256_slli_epi16(x, -right) : x;
    return _mm256_and_si256(x, _mm256_set1_epi8((char)mask));
}
INLINE bytes b_bits(bytes x, const int right, const int mask) {
    return (bytes){half_bits(x.a, right, mask), half_bits(x.b, right, mask)};
}
INLINE bytes b_or(bytes x, bytes y) { return (bytes)BOTH(_mm256_or_si256, x, y); }
INLINE bytes b_table(const int8_t *table, int more) {
    __m128i one = _mm_loadu_si128((const __m128i *)table);
    __m256i both = _mm256_broadcastsi128_si256(_mm_add_epi8(one, _mm_set1_epi8((char)more)));
    return (bytes){both, both};
}
INLINE bytes b_lookup(bytes table, bytes x) { return (bytes)BOTH(_mm256_shuffle_epi8, table, x); }
INLINE __m128i eight_bytes(const uint8_t *p) { return _mm_loadl_epi64((const __m128i *)p); }
INLINE vec v_bytes(const uint8_t *p) {
    return v_float((veci){_mm256_cvtepi8_epi32(eight_bytes(p)),
                          _mm256_cvtepi8_epi32(eight_bytes(p + 8))});
}
INLINE veci wide_bytes(const uint8_t *p) {
    return (veci){_mm256_cvtepu8_epi32(eight_bytes(p)), _mm256_cvtepu8_epi32(eight_bytes(p + 8))};
}
INLINE vec v_points(const uint8_t *p) { return v_float(wide_bytes(p)); }
INLINE __m256 half_power(__m256i e) {
    __m256i one = _mm256_set1_epi32(1);
    __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
    __m256i below = _mm256_slli_epi32(_mm256_add_epi32(e, one), 21);
    return _mm256_castsi256_ps(_mm256_max_epi32(normal, below));
}
INLINE vec v_power(const uint8_t *p) {
    veci e = wide_bytes(p);
    return (vec){half_power(e.a), half_power(e.b)};
}
INLINE __m256 half_float8(const uint8_t *p) {
    __m128i bits = _mm_slli_epi16(_mm_cvtepu8_epi16(eight_bytes(p)), 7);
    return _mm256_mul_ps(_mm256_cvtph_ps(bits), _mm256_set1_ps(128.0f));
}
INLINE vec v_float8(const uint8_t *p) { return (vec){half_float8(p), half_float8(p + 8)}; }
INLINE __m256 half_signed8(const uint8_t *p) {
    __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(eight_bytes(p)), 7);
    bits = _mm_and_si128(bits, _mm_set1_epi16((short)0xbfff));
    return _mm256_mul_ps(_mm256_cvtph_ps(bits), _mm256_set1_ps(256.0f));
}
INLINE vec v_signed8(const uint8_t *p) { return (vec){half_signed8(p), half_signed8(p + 8)}; }
INLINE bytes b_pairs(const uint16_t *p) {
    int32_t two;
    memcpy(&two, p, 4);
    return i_set(two);
}
INLINE vec v_first(bytes x) {
    return (vec){_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
INLINE vec v_second(bytes x) {
    __m256i mask = _mm256_set1_epi32((int)0xffff0000u);
    return (vec){_mm256_castsi256_ps(_mm256_and_si256(x.a, mask)),
                 _mm256_castsi256_ps(_mm256_and_si256(x.b, mask))};
}

#elif defined(FT_NEON)

#include "simd_neon.h"

#else

typedef struct { float v[16]; } vec;
typedef struct { int32_t v[16]; } veci;
typedef struct { uint8_t v[64]; } bytes;
#define EACH for (int i = 0; i < 16; i++)
INLINE vec v_load(const float *p) { vec r; memcpy(r.v, p, 64); return r; }
INLINE void v_store(float *p, vec a) { memcpy(p, a.v, 64); }
INLINE vec v_set(float a) { vec r; EACH r.v[i] = a; return r; }
INLINE vec v_add(vec a, vec b) { EACH a.v[i] += b.v[i]; return a; }
INLINE vec v_sub(vec a, vec b) { EACH a.v[i] -= b.v[i]; return a; }
INLINE vec v_mul(vec a, vec b) { EACH a.v[i] *= b.v[i]; return a; }
INLINE vec v_div(vec a, vec b) { EACH a.v[i] /= b.v[i]; return a; }
INLINE vec v_fma(vec a, vec b, vec c) { EACH a.v[i] = fmaf(a.v[i], b.v[i], c.v[i]); return a; }
INLINE vec v_max(vec a, vec b) { EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE vec v_min(vec a, vec b) { EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE vec v_abs(vec a) { EACH a.v[i] = fabsf(a.v[i]); return a; }
INLINE uint32_t v_reaching(vec a, vec b) {
    uint32_t bits = 0;
    EACH bits |= (uint32_t)(a.v[i] >= b.v[i]) << i;
    return bits;
}
INLINE vec v_round(vec a) { EACH a.v[i] = nearbyintf(a.v[i]); return a; }
INLINE vec v_half(const uint16_t *p) { vec r; EACH r.v[i] = ft_half(p[i]); return r; }
INLINE vec v_bfloat(const uint16_t *p) { vec r; EACH r.v[i] = ft_bfloat(p[i]); return r; }
/* What has no whole number, NaN say, becomes 0. */
INLINE veci v_int(vec a) {
    veci r;
    EACH r.v[i] = fabsf(a.v[i]) < 2147483648.0f ? (int32_t)nearbyintf(a.v[i]) : 0;
    return r;
}
INLINE vec v_float(veci a) { vec r; EACH r.v[i] = (float)a.v[i]; return r; }
INLINE veci i_set(int32_t a) { veci r; EACH r.v[i] = a; return r; }
INLINE veci i_add(veci a, veci b) {
    EACH a.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]);
    return a;
}
INLINE vec v_scale(vec a, veci n) { EACH a.v[i] = ldexpf(a.v[i], n.v[i]); return a; }
INLINE void i_store_bytes(int8_t *p, veci a) { EACH p[i] = (int8_t)a.v[i]; }
INLINE int32_t i_sum(veci a) {
    uint32_t sum = 0;
    EACH sum += (uint32_t)a.v[i];
    return (int32_t)sum;
}
INLINE bytes b_load(const uint8_t *p) { bytes r; memcpy(r.v, p, 64); return r; }
INLINE bytes b_low(bytes a) { for (int i = 0; i < 64; i++) a.v[i] &= 15; return a; }
INLINE bytes b_high(bytes a) { for (int i = 0; i < 64; i++) a.v[i] >>= 4; return a; }
INLINE veci i_dot(veci a, bytes w, const int8_t *x) {
    EACH for (int k = 0; k < 4; k++) a.v[i] += (int32_t)w.v[4 * i + k] * x[k];
    return a;
}
#define I_DOT_WIDE i_dot
#define WIDE_OFFSET 128
typedef veci part;
INLINE part p_none(void) { return i_set(0); }
INLINE part p_dot(part a, bytes w, const int8_t *x) { return i_dot(a, w, x); }
INLINE veci p_sum(veci a, part b) { return i_add(a, b); }
INLINE bytes b_bits(bytes a, const int right, const int mask) {
    for (int i = 0; i < 64; i++)
        a.v[i] = (uint8_t)((right < 0 ? a.v[i] << -right : a.v[i] >> right) & mask);
    return a;
}
INLINE bytes b_or(bytes a, bytes b) { for (int i = 0; i < 64; i++) a.v[i] |= b.v[i]; return a; }
INLINE bytes b_table(const int8_t *table, int more) {
    bytes r;
    for (int i = 0; i < 64; i++)
        r.v[i] = (uint8_t)(table[i % 16] + more);
    return r;
}
INLINE bytes b_lookup(bytes table, bytes a) {
    for (int i = 0; i < 64; i++)
        a.v[i] = table.v[a.v[i] & 15];
    return a;
}
INLINE vec v_bytes(const uint8_t *p) { vec r; EACH r.v[i] = (float)(int8_t)p[i]; return r; }
INLINE vec v_points(const uint8_t *p) { vec r; EACH r.v[i] = (float)p[i]; return r; }
INLINE vec v_power(const uint8_t *p) { vec r; EACH r.v[i] = ft_power(p[i]); return r; }
INLINE vec v_float8(const uint8_t *p) { vec r; EACH r.v[i] = ft_float8(p[i]); return r; }
INLINE vec v_signed8(const uint8_t *p) { vec r; EACH r.v[i] = ft_signed8(p[i]); return r; }
INLINE uint16_t b_pair(bytes a, int i) {
    uint16_t bits;
    memcpy(&bits, a.v + 2 * i, 2);
    return bits;
}
INLINE bytes b_pairs(const uint16_t *p) {
    bytes r;
    EACH memcpy(r.v + 4 * i, p, 4);
    return r;
}
INLINE vec v_first(bytes a) { vec r; EACH r.v[i] = ft_bfloat(b_pair(a, 2 * i)); return r; }
INLINE vec v_second(bytes a) { vec r; EACH r.v[i] = ft_bfloat(b_pair(a, 2 * i + 1)); return r; }

#endif

#ifndef FT_WIDE_OPERATIONS
INLINE void b_transpose(const uint16_t *rows, int64_t stride, uint16_t *out) {
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 16; i++)
            memcpy(out + 32 * i + 2 * j, rows + j * stride + 2 * i, 4);
}

INLINE void v_store_bfloat(uint16_t *p, vec a) {
    float part[16];
    v_store(part, a);
    for (int i = 0; i < 16; i++)
        p[i] = ft_to_bfloat(part[i]);
}

INLINE float v_sum(vec a) {
    float part[16];
    v_store(part, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            part[i] += part[i + half];
    return part[0];
}

INLINE vec v_sums(const vec *a) {
    float part[16];
    for (int i = 0; i < 16; i++)
        part[i] = v_sum(a[i]);
    return v_load(part);
}

INLINE float v_top(vec a) {
    float part[16], top;
    v_store(part, a);
    top = part[0];
    for (int i = 1; i < 16; i++)
        top = part[i] > top ? part[i] : top;
    return top;
}
#endif

/* e**a to about one last place; below -87 as at -87. */
INLINE vec v_exp(vec a) {
    vec x = v_max(v_min(a, v_set(88.0f)), v_set(-87.0f));
    vec n = v_round(v_mul(x, v_set(1.44269504f)));
    vec r = v_fma(n, v_set(-0.693359375f), x);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    vec p = v_set(1.9875691500e-4f);
    p = v_fma(p, r, v_set(1.3981999507e-3f));
    p = v_fma(p, r, v_set(8.3334519073e-3f));
    p = v_fma(p, r, v_set(4.1665795894e-2f));
    p = v_fma(p, r, v_set(1.6666665459e-1f));
    p = v_fma(p, r, v_set(5.0000001201e-1f));
    p = v_fma(v_mul(r, r), p, v_add(r, v_set(1.0f)));
    return v_scale(p, v_int(n));
}

#endif
