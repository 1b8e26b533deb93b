/* The vectors of simd.h on ARM processors of 64 bits: 4 registers of 4 numbers each. */

#ifndef FT_SIMD_NEON_H
#define FT_SIMD_NEON_H

#include <arm_neon.h>

typedef struct { float32x4_t a, b, c, d; } vec;
typedef struct { int32x4_t a, b, c, d; } veci;
typedef struct { uint8x16_t a, b, c, d; } bytes;
#define ONE(F, X) {F((X).a), F((X).b), F((X).c), F((X).d)}
#define TWO(F, X, Y) {F((X).a, (Y).a), F((X).b, (Y).b), F((X).c, (Y).c), F((X).d, (Y).d)}
#define SAME(F, X) {F(X), F(X), F(X), F(X)}
INLINE vec v_load(const float *p) {
    return (vec){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
INLINE void v_store(float *p, vec x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
INLINE vec v_set(float x) { return (vec)SAME(vdupq_n_f32, x); }
INLINE vec v_add(vec x, vec y) { return (vec)TWO(vaddq_f32, x, y); }
INLINE vec v_sub(vec x, vec y) { return (vec)TWO(vsubq_f32, x, y); }
INLINE vec v_mul(vec x, vec y) { return (vec)TWO(vmulq_f32, x, y); }
INLINE vec v_div(vec x, vec y) { return (vec)TWO(vdivq_f32, x, y); }
INLINE vec v_fma(vec x, vec y, vec z) {
    return (vec){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
                 vfmaq_f32(z.d, x.d, y.d)};
}
/* Of two that are equal, or of which one is NaN, the second: as on other processors. */
INLINE float32x4_t quarter_max(float32x4_t x, float32x4_t y) {
    return vbslq_f32(vcgtq_f32(x, y), x, y);
}
INLINE float32x4_t quarter_min(float32x4_t x, float32x4_t y) {
    return vbslq_f32(vcltq_f32(x, y), x, y);
}
INLINE vec v_max(vec x, vec y) { return (vec)TWO(quarter_max, x, y); }
INLINE vec v_min(vec x, vec y) { return (vec)TWO(quarter_min, x, y); }
INLINE uint32_t quarter_reaching(float32x4_t x, float32x4_t y) {
    const uint32_t each[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vcgeq_f32(x, y), vld1q_u32(each)));
}
INLINE uint32_t v_reaching(vec x, vec y) {
    return quarter_reaching(x.a, y.a) | quarter_reaching(x.b, y.b) << 4 |
           quarter_reaching(x.c, y.c) << 8 | quarter_reaching(x.d, y.d) << 12;
}
INLINE vec v_abs(vec x) { return (vec)ONE(vabsq_f32, x); }
INLINE vec v_round(vec x) { return (vec)ONE(vrndnq_f32, x); }
INLINE float32x4_t quarter_half(const uint16_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
INLINE vec v_half(const uint16_t *p) {
    return (vec){quarter_half(p), quarter_half(p + 4), quarter_half(p + 8), quarter_half(p + 12)};
}
INLINE float32x4_t quarter_bfloat(const uint16_t *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
INLINE vec v_bfloat(const uint16_t *p) {
    return (vec){quarter_bfloat(p), quarter_bfloat(p + 4), quarter_bfloat(p + 8),
                 quarter_bfloat(p + 12)};
}
INLINE veci v_int(vec x) { return (veci)ONE(vcvtnq_s32_f32, x); }
INLINE vec v_float(veci x) { return (vec)ONE(vcvtq_f32_s32, x); }
INLINE veci i_set(int32_t x) { return (veci)SAME(vdupq_n_s32, x); }
INLINE veci i_add(veci x, veci y) { return (veci)TWO(vaddq_s32, x, y); }
INLINE float32x4_t quarter_scale(float32x4_t x, int32x4_t n) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(n, 23)));
}
INLINE vec v_scale(vec x, veci n) { return (vec)TWO(quarter_scale, x, n); }
INLINE void i_store_bytes(int8_t *p, veci x) {
    int16x8_t low = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b));
    int16x8_t high = vcombine_s16(vmovn_s32(x.c), vmovn_s32(x.d));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
INLINE int32_t i_sum(veci x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d)));
}
INLINE bytes b_load(const uint8_t *p) {
    return (bytes){vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)};
}
INLINE uint8x16_t quarter_low(uint8x16_t x) { return vandq_u8(x, vdupq_n_u8(15)); }
INLINE uint8x16_t quarter_high(uint8x16_t x) { return vshrq_n_u8(x, 4); }
INLINE bytes b_low(bytes x) { return (bytes)ONE(quarter_low, x); }
INLINE bytes b_high(bytes x) { return (bytes)ONE(quarter_high, x); }
INLINE veci dot_of(veci a, int8x16_t w0, int8x16_t w1, int8x16_t w2, int8x16_t w3,
                   const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
    return (veci){vdotq_s32(a.a, w0, x), vdotq_s32(a.b, w1, x), vdotq_s32(a.c, w2, x),
                  vdotq_s32(a.d, w3, x)};
}
/* Weights of 0 to 15, which are the same with a sign. */
INLINE int8x16_t quarter_signed(uint8x16_t w) { return vreinterpretq_s8_u8(w); }
INLINE veci i_dot(veci a, bytes w, const int8_t *p) {
    return dot_of(a, quarter_signed(w.a), quarter_signed(w.b), quarter_signed(w.c),
                  quarter_signed(w.d), p);
}
/* Weights of 8 bits, stored with 128 added: here as they were before. */
INLINE int8x16_t quarter_wide(uint8x16_t w) {
    return vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(128)));
}
INLINE veci i_dot_wide(veci a, bytes w, const int8_t *p) {
    return dot_of(a, quarter_wide(w.a), quarter_wide(w.b), quarter_wide(w.c), quarter_wide(w.d),
                  p);
}
#define I_DOT_WIDE i_dot_wide
#define WIDE_OFFSET 0
typedef veci part;
INLINE part p_none(void) { return i_set(0); }
INLINE part p_dot(part a, bytes w, const int8_t *x) { return i_dot(a, w, x); }
INLINE veci p_sum(veci a, part b) { return i_add(a, b); }
INLINE uint8x16_t quarter_bits(uint8x16_t x, int8x16_t left, uint8x16_t mask) {
    return vandq_u8(vshlq_u8(x, left), mask);
}
INLINE bytes b_bits(bytes x, const int right, const int mask) {
    int8x16_t left = vdupq_n_s8((int8_t)-right);
    uint8x16_t kept = vdupq_n_u8((uint8_t)mask);
    return (bytes){quarter_bits(x.a, left, kept), quarter_bits(x.b, left, kept),
                   quarter_bits(x.c, left, kept), quarter_bits(x.d, left, kept)};
}
INLINE bytes b_or(bytes x, bytes y) { return (bytes)TWO(vorrq_u8, x, y); }
INLINE bytes b_table(const int8_t *table, int more) {
    uint8x16_t one = vaddq_u8(vreinterpretq_u8_s8(vld1q_s8(table)), vdupq_n_u8((uint8_t)more));
    return (bytes){one, one, one, one};
}
INLINE bytes b_lookup(bytes table, bytes x) { return (bytes)TWO(vqtbl1q_u8, table, x); }
INLINE veci wide_bytes(const uint8_t *p) {
    uint8x16_t all = vld1q_u8(p);
    uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_u8(vget_high_u8(all));
    return (veci){vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))),
                  vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
                  vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
                  vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))};
}
INLINE vec v_points(const uint8_t *p) { return v_float(wide_bytes(p)); }
INLINE vec v_bytes(const uint8_t *p) {
    int8x16_t all = vreinterpretq_s8_u8(vld1q_u8(p));
    int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_s8(vget_high_s8(all));
    return v_float((veci){vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)),
                          vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))});
}
INLINE float32x4_t quarter_power(int32x4_t e) {
    int32x4_t one = vdupq_n_s32(1);
    int32x4_t normal = vshlq_n_s32(vsubq_s32(e, one), 23);
    int32x4_t below = vshlq_n_s32(vaddq_s32(e, one), 21);
    return vreinterpretq_f32_s32(vmaxq_s32(normal, below));
}
INLINE vec v_power(const uint8_t *p) {
    veci e = wide_bytes(p);
    return (vec)ONE(quarter_power, e);
}
INLINE vec v_float8(const uint8_t *p) {
    uint16_t halves[16];
    for (int i = 0; i < 16; i++)
        halves[i] = (uint16_t)(p[i] << 7);
    return v_mul(v_half(halves), v_set(128.0f));
}
INLINE vec v_signed8(const uint8_t *p) {
    uint16_t halves[16];
    for (int i = 0; i < 16; i++)
        halves[i] = (uint16_t)((p[i] & 128) << 8 | (p[i] & 127) << 7);
    return v_mul(v_half(halves), v_set(256.0f));
}
INLINE bytes b_pairs(const uint16_t *p) {
    uint32_t two;
    memcpy(&two, p, 4);
    uint8x16_t all = vreinterpretq_u8_u32(vdupq_n_u32(two));
    return (bytes){all, all, all, all};
}
INLINE float32x4_t quarter_first(uint8x16_t x) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(x), 16));
}
INLINE float32x4_t quarter_second(uint8x16_t x) {
    uint32x4_t mask = vdupq_n_u32(0xffff0000u);
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(x), mask));
}
INLINE vec v_first(bytes x) { return (vec)ONE(quarter_first, x); }
INLINE vec v_second(bytes x) { return (vec)ONE(quarter_second, x); }
INLINE uint32x4_t pairs_at(const uint16_t *p) { return vreinterpretq_u32_u16(vld1q_u16(p)); }
INLINE uint64x2_t twice(uint32x4_t x) { return vreinterpretq_u64_u32(x); }
INLINE void store_pairs(uint16_t *p, uint64x2_t x) { vst1q_u16(p, vreinterpretq_u16_u64(x)); }
INLINE void b_transpose(const uint16_t *rows, int64_t stride, uint16_t *out) {
    for (int j = 0; j < 16; j += 4)
        for (int i = 0; i < 16; i += 4) { /* 4 pairs of 4 rows change places */
            const uint16_t *from = rows + j * stride + 2 * i;
            uint16_t *to = out + 32 * i + 2 * j;
            uint32x4_t r0 = pairs_at(from), r1 = pairs_at(from + stride);
            uint32x4_t r2 = pairs_at(from + 2 * stride), r3 = pairs_at(from + 3 * stride);
            uint64x2_t even0 = twice(vtrn1q_u32(r0, r1)), odd0 = twice(vtrn2q_u32(r0, r1));
            uint64x2_t even2 = twice(vtrn1q_u32(r2, r3)), odd2 = twice(vtrn2q_u32(r2, r3));
            store_pairs(to, vtrn1q_u64(even0, even2));
            store_pairs(to + 32, vtrn1q_u64(odd0, odd2));
            store_pairs(to + 64, vtrn2q_u64(even0, even2));
            store_pairs(to + 96, vtrn2q_u64(odd0, odd2));
        }
}
/* To bfloat16, to the nearest, ties to even; NaN stays NaN. */
INLINE uint16x4_t quarter_to_bfloat(float32x4_t x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t nearest = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), nearest, quiet), 16);
}
INLINE void v_store_bfloat(uint16_t *p, vec x) {
    vst1_u16(p, quarter_to_bfloat(x.a));
    vst1_u16(p + 4, quarter_to_bfloat(x.b));
    vst1_u16(p + 8, quarter_to_bfloat(x.c));
    vst1_u16(p + 12, quarter_to_bfloat(x.d));
}
INLINE float v_sum(vec x) {
    float32x4_t part = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    float32x2_t pair = vadd_f32(vget_low_f32(part), vget_high_f32(part));
    return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}
INLINE vec v_sums(const vec *x) {
    float part[16];
    for (int i = 0; i < 16; i++)
        part[i] = v_sum(x[i]);
    return v_load(part);
}
INLINE float v_top(vec x) {
    float32x4_t low = vmaxq_f32(x.a, x.b), high = vmaxq_f32(x.c, x.d);
    return vmaxvq_f32(vmaxq_f32(low, high));
}
#define FT_WIDE_OPERATIONS

#endif
