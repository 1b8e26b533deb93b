#include "kernels.h"

const ft_kernels ft_portable = {
    "portable", prepare, prepare_twice, choose_peaks, choose_ranges, product, deliver, norm,
    add, rotate, gate, limit, store, attention_floats, set_up, score, soften, mix, top, sum_above,
    exponentials, best, reaching, reading_bytes, read_listed, multiply_rows,
};
