#include "foretell_native.h"

#if defined(FT_BUILDS_NEON)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define FT_NEON
#include "kernels.h"

const ft_kernels ft_neon = {
    "neon", prepare, prepare_twice, choose_peaks, choose_ranges, product, deliver, norm,
    add, rotate, gate, limit, store, attention_floats, set_up, score, soften, mix, top, sum_above,
    exponentials, best, reaching, reading_bytes, read_listed, multiply_rows,
};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
