/* The kinds of kernels that this processor runs, the quickest first: `make test-x86`. */

#include "foretell_native.h"

#include <stdio.h>

static const char *const kinds[] = {"avx512_bf16", "avx512", "avx2", "neon", "portable"};

int main(void) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (ft_choose(kinds[i]))
            printf("%s ", kinds[i]);
    printf("\n");
    return 0;
}
