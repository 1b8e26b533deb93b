/* The rows of a packed matrix: a head is the embedding's matrix as well. */

#include "foretell_native.h"
#include "simd.h"

void ft_copy_row(const ft_rows *rows, int32_t row, const ft_rows *out, int32_t to, int32_t forms) {
    const int64_t inputs = rows->inputs, from = row * inputs, into = to * inputs;
    const size_t groups = (size_t)inputs / GROUP * sizeof(ft_group);
    if (forms & FT_AS_WHOLE) {
        memcpy(out->numbers + into, rows->numbers + from, (size_t)inputs);
        memcpy(out->groups + into / GROUP, rows->groups + from / GROUP, groups);
    }
    if (forms & FT_AS_BFLOAT)
        memcpy(out->narrow + into, rows->narrow + from, 2 * (size_t)inputs);
    if (forms & FT_AS_FLOAT)
        memcpy(out->wide + into, rows->wide + from, 4 * (size_t)inputs);
}

/* One of the 32 whole numbers of a group, as it is stored: `group` is where the group's bytes of
   this output begin, of which each vector of 64 has 4. */
static int32_t number_at(const uint8_t *group, int32_t bits, int32_t input) {
    const int32_t quad = input / 4;
    const uint8_t *at = group + input % 4;
    if (bits == 8)
        return at[64 * quad];
    int32_t number;
    if (bits < 4)
        number = at[64 * (quad / 4)] >> 2 * (quad % 4) & 3;
    else
        number = at[64 * (quad % 4)] >> 4 * (quad / 4) & 15;
    if (bits == 3 || bits == 5)
        number |= (at[64 * (bits - 1)] >> quad & 1) << (bits - 1);
    if (bits == 6)
        number |= (at[256 + 64 * (quad / 4)] >> 2 * (quad % 4) & 3) << 4;
    return number;
}

/* A group's scale, or least value, of output `lane` of a block. */
static float scale_at(const uint8_t *scales, int32_t scaling, int32_t group, int32_t in_super,
                      int32_t lane) {
    switch (scaling) {
    case FT_HALF: return ft_half(((const uint16_t *)scales)[group * BLOCK + lane]);
    case FT_SUPER: {
        const uint8_t *super = scales + group / in_super * (2 + in_super) * BLOCK;
        int8_t factor = (int8_t)super[(2 + group % in_super) * BLOCK + lane];
        return ft_half(((const uint16_t *)super)[lane]) * (float)factor;
    }
    case FT_SINGLE: return ((const float *)scales)[group * BLOCK + lane];
    case FT_POWER: return ft_power(scales[group * BLOCK + lane]);
    case FT_FLOAT8: return ft_float8(scales[group * BLOCK + lane]);
    case FT_POINT: return (float)scales[group * BLOCK + lane];
    default: return 0.0f;
    }
}

/* Row `lane` of a block of floats, (inputs,) in single precision. `scales`: of those that have. */
static void unpack_floats(const ft_matrix *matrix, const uint8_t *block, const uint8_t *scales,
                          int32_t lane, float *out) {
    const uint16_t *halves = (const uint16_t *)block;
    for (int32_t k = 0; k < matrix->inputs; k++)
        switch (matrix->format) {
        case FT_BFLOAT16:
            out[k] = ft_bfloat(halves[k / 2 * 2 * BLOCK + lane * 2 + k % 2]);
            break;
        case FT_FLOAT16: out[k] = ft_half(halves[k * BLOCK + lane]); break;
        case FT_SIGNED8:
            out[k] = ft_signed8(block[k * BLOCK + lane]) *
                     scale_at(scales, matrix->scaling, k / matrix->group, 1, lane);
            break;
        default: out[k] = ((const float *)block)[k * BLOCK + lane];
        }
}

/* Row `output` of a matrix, (inputs,) in single precision. */
static void unpack_row(const ft_matrix *matrix, int32_t output, float *out) {
    const int32_t lane = output % BLOCK, bits = matrix->bits;
    const int64_t block = output / BLOCK;
    const uint8_t *weights = matrix->weights + block * ft_weight_bytes(matrix);
    if (matrix->format != FT_WHOLE) {
        const uint8_t *scales = matrix->scales;
        if (matrix->format == FT_SIGNED8)
            scales += block * ft_scale_bytes(matrix, matrix->scaling);
        unpack_floats(matrix, weights, scales, lane, out);
        return;
    }
    const int32_t part = matrix->group < GROUP ? matrix->group : GROUP;
    const int32_t in_super = SUPER / matrix->group, least_scaling = matrix->least_scaling;
    const uint8_t *scales = matrix->scales + block * ft_scale_bytes(matrix, matrix->scaling);
    const uint8_t *minima = matrix->scales; /* read by nobody where there are none */
    if (least_scaling != FT_NONE)
        minima = matrix->minima + block * ft_scale_bytes(matrix, least_scaling);
    for (int32_t first = 0; first < matrix->inputs; first += part) {
        const int32_t group = first / matrix->group;
        const uint8_t *from = weights + first / GROUP * 64 * bits + lane * 4;
        const float scale = scale_at(scales, matrix->scaling, group, in_super, lane);
        const float least = scale_at(minima, least_scaling, group, in_super, lane);
        for (int32_t k = first; k < first + part; k++) {
            int32_t number = number_at(from, bits, k % GROUP);
            if (matrix->fine) {
                out[k] = scale * ((float)matrix->table[number] +
                                  (float)matrix->fine[number] * (1.0f / 256.0f));
                continue;
            }
            number = matrix->table ? matrix->table[number] : number - matrix->offset;
            if (least_scaling == FT_POINT)
                out[k] = scale * ((float)number - least);
            else
                out[k] = scale * (float)number + (least_scaling == FT_NONE ? -0.0f : least);
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
