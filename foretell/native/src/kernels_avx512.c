#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#endif
#define FT_AVX512
#include "kernels.h"

const ft_kernels ft_avx512 = {
    "avx512", prepare, prepare_twice, choose_peaks, choose_ranges, product, deliver, norm,
    add, rotate, gate, limit, store, attention_floats, set_up, score, soften, mix, top, sum_above,
    exponentials, best, reaching, reading_bytes, read_listed, multiply_rows,
};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
