/* The rows of a packed matrix: a head is the embedding's matrix as well. */

#include "foretell_native.h"
#include "simd.h"

int32_t ft_forms(const ft_matrix *matrix) {
    return matrix->format == FT_BFLOAT16 ? FT_AS_BFLOAT : FT_AS_WHOLE;
}

void ft_copy_row(const ft_rows *rows, int32_t row, const ft_rows *out, int32_t to, int32_t forms) {
    const int64_t inputs = rows->inputs, groups = inputs / GROUP, bytes = forms & FT_AS_BFLOAT ? 2 : 1;
    memcpy(out->numbers + bytes * to * inputs, rows->numbers + bytes * row * inputs,
           (size_t)(bytes * inputs));
    if (!(forms & FT_AS_WHOLE))
        return;
    memcpy(out->scales + to * groups, rows->scales + row * groups, 4 * (size_t)groups);
    memcpy(out->sums + to * groups, rows->sums + row * groups, 4 * (size_t)groups);
}

/* Row `output` of a matrix, (inputs,) in single precision. */
static void unpack_row(const ft_matrix *matrix, int32_t output, float *out) {
    int32_t inputs = matrix->inputs, lane = output % BLOCK, narrow = matrix->format == FT_INT4;
    int64_t block = output / BLOCK, groups = inputs / GROUP;
    if (matrix->format == FT_BFLOAT16) {
        const uint16_t *from = (const uint16_t *)matrix->weights + block * inputs * BLOCK;
        for (int32_t k = 0; k < inputs; k++)
            out[k] = ft_bfloat(from[k / 2 * 2 * BLOCK + lane * 2 + k % 2]);
        return;
    }
    const uint8_t *from = matrix->weights + (block * inputs * BLOCK >> narrow) + lane * 4;
    for (int32_t group = 0; group < groups; group++) {
        int64_t place = (block * groups + group) * BLOCK + lane;
        float scale = ft_half(matrix->scales[place]);
        float least = matrix->minima ? ft_half(matrix->minima[place]) : 0.0f;
        for (int32_t k = 0; k < GROUP; k++) {
            int32_t number;
            if (narrow) {
                uint8_t pair = from[(group * 4 + k % 16 / 4) * 64 + k % 4];
                number = (k < 16 ? pair & 15 : pair >> 4) - (matrix->minima ? 0 : 8);
            } else {
                number = from[(group * 8 + k / 4) * 64 + k % 4] - 128;
            }
            out[group * GROUP + k] = scale * (float)number + least;
        }
    }
}

EXPORT int32_t ft_rows_of(const ft_matrix *matrix, const int64_t *outputs, int32_t count,
                          float *out) {
    const int32_t checked = ft_check_rows(matrix, outputs, count);
    if (checked != FT_DONE)
        return checked;
    for (int32_t i = 0; i < count; i++)
        unpack_row(matrix, (int32_t)outputs[i], out + (int64_t)i * matrix->inputs);
    return FT_DONE;
}
