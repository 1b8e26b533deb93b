#include "kernels.h"

const ft_kernels ft_portable = {
    "portable", prepare, prepare_twice, product, deliver, norm, rotate,
    gate, store, attention_floats, attend,
};
