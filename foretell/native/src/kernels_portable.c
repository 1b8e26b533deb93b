#include "kernels.h"

const ft_kernels ft_portable = {
    "portable", prepare, product, deliver, norm, rotate, gate,
    store, attention_floats, attend,
};
