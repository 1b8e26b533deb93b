/* The C library by itself, for sanitisers and other processors: `make sanitize`.

   Every kind of kernels that runs here computes products of every format, and forwards of small
   models in test_forward.c. A row's bits must be those it has alone, by the portable kernels. */

#define _GNU_SOURCE
#include "checks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define OUTPUTS 41

const char *const kinds[] = {"avx512_bf16", "avx512", "avx2", "neon", "portable"};
static const int8_t bent[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t small[16] = {0, 1, 2, 3, 4, 6, 8, 12, 15, -1, -2, -3, -4, -6, -8, -16};
const matrix_form forms[FORMS] = {
    {"8 bits", FT_WHOLE, 8, 32, 128, FT_HALF, FT_NONE, NULL},
    {"4 bits with least values", FT_WHOLE, 4, 32, 0, FT_HALF, FT_HALF, NULL},
    {"4 bits around zero", FT_WHOLE, 4, 32, 8, FT_HALF, FT_NONE, NULL},
    {"bfloat16", FT_BFLOAT16, 0, 0, 0, 0, 0, NULL},
    {"float16", FT_FLOAT16, 0, 0, 0, 0, 0, NULL},
    {"float32", FT_FLOAT32, 0, 0, 0, 0, 0, NULL},
    {"2 bits", FT_WHOLE, 2, 16, 0, FT_SUPER, FT_SUPER, NULL},
    {"2 bits, long groups", FT_WHOLE, 2, 256, 1, FT_HALF, FT_NONE, NULL},
    {"3 bits", FT_WHOLE, 3, 16, 4, FT_SUPER, FT_NONE, NULL},
    {"3 bits with zero points", FT_WHOLE, 3, 128, 0, FT_HALF, FT_POINT, NULL},
    {"4 bits in super-blocks", FT_WHOLE, 4, 32, 0, FT_SUPER, FT_SUPER, NULL},
    {"5 bits", FT_WHOLE, 5, 32, 0, FT_SUPER, FT_SINGLE, NULL},
    {"5 bits around zero", FT_WHOLE, 5, 32, 16, FT_HALF, FT_NONE, NULL},
    {"6 bits", FT_WHOLE, 6, 16, 32, FT_SUPER, FT_NONE, NULL},
    {"8 bits with zero points", FT_WHOLE, 8, 64, 0, FT_SINGLE, FT_POINT, NULL},
    {"a table", FT_WHOLE, 4, 32, 0, FT_SINGLE, FT_NONE, bent},
    {"a table of small numbers", FT_WHOLE, 4, 32, 0, FT_POWER, FT_NONE, small},
    {"that in groups of 16", FT_WHOLE, 4, 16, 0, FT_FLOAT8, FT_HALF, small},
    {"a table with 256ths", FT_WHOLE, 4, 64, 0, FT_SINGLE, FT_NONE, bent},
    {"floats of 8 bits", FT_SIGNED8, 0, 128, 0, FT_SINGLE, FT_NONE, NULL},
};

void fail(const char *what, const char *where) {
    fprintf(stderr, "%s kernels: %s (%s)\n", ft_kind(), what, where);
    exit(1);
}

void *room(size_t bytes) {
    void *memory = malloc(bytes);
    if (!memory)
        fail("no memory", "test");
    return memory;
}

void choose(const char *kind) {
    if (!ft_choose(kind))
        fail("cannot be chosen", kind);
}

uint32_t seed = 1;

static uint32_t random_bits(void) {
    seed ^= seed << 13;
    seed ^= seed >> 17;
    seed ^= seed << 5;
    return seed;
}

float random_float(void) { return (float)(int32_t)random_bits() * 0x1p-31f; }

float *random_floats(int64_t count, float size) {
    float *numbers = room(4 * (size_t)count);
    for (int64_t i = 0; i < count; i++)
        numbers[i] = size * random_float();
    return numbers;
}

const char *twin_of(const char *kind, int form) {
    const int other = forms[form].format == FT_BFLOAT16 && !strcmp(kind, "avx512_bf16");
    return other ? kind : "portable";
}

/* --- matrices */

/* Scales of one kind, or least values, which are `turned` below zero, of all blocks; NULL: there are
   none. */
static uint8_t *make_scales(const ft_matrix *matrix, int32_t scaling, int turned) {
    const int64_t bytes = matrix->blocks * ft_scale_bytes(matrix, scaling);
    const int32_t in_super = SUPER / matrix->group;
    const uint8_t half_size = matrix->bits == 8 ? 0x14 : 0x20; /* from 0.001, and 0.0078 */
    if (!bytes)
        return NULL;
    uint8_t *scales = room((size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) {
        const uint32_t bits = random_bits() >> 8;
        const int64_t in_record = i % ((2 + in_super) * BLOCK);
        if (scaling == FT_POINT)
            scales[i] = (uint8_t)(bits & ((1u << matrix->bits) - 1));
        else if (scaling == FT_POWER)
            scales[i] = (uint8_t)(bits % 256 < 2 ? bits & 1 : 118 + bits % 4);
        else if (scaling == FT_FLOAT8)
            scales[i] = (uint8_t)(bits & 15);
        else if (scaling == FT_HALF || (scaling == FT_SUPER && in_record < 2 * BLOCK))
            scales[i] = (uint8_t)(i % 2 ? (bits & 3) | (scaling == FT_SUPER ? 0x08 : half_size) |
                                              (turned ? 0x80 : 0)
                                        : bits);
        else if (scaling == FT_SUPER)
            scales[i] = (uint8_t)bits;
    }
    for (int64_t i = 0; scaling == FT_SINGLE && i < bytes / 4; i++) {
        const float scale = 0.005f * (turned ? -1.0f : 1.0f) * (1.5f + random_float());
        memcpy(scales + 4 * i, &scale, 4);
    }
    return scales;
}

ft_matrix make_matrix(int form, int32_t outputs, int32_t inputs, int biased) {
    const matrix_form *of = forms + form;
    ft_matrix matrix = {of->format, outputs, inputs, (outputs + BLOCK - 1) / BLOCK, of->bits,
                        of->group, of->offset, of->scaling, of->least_scaling, 0, 0, 0, 0, 0, 0};
    const int64_t bytes = matrix.blocks * ft_weight_bytes(&matrix);
    uint8_t *weights = room((size_t)bytes);
    for (int64_t i = 0; i < bytes; i++)
        weights[i] = (uint8_t)(random_bits() >> 8);
    for (int64_t i = 0; of->format == FT_BFLOAT16 && i < bytes / 2; i++) {
        const uint16_t number = ft_to_bfloat(0.2f * random_float());
        memcpy(weights + 2 * i, &number, 2);
    }
    for (int64_t i = 0; of->format == FT_SIGNED8 && i < bytes; i++)
        weights[i] = (weights[i] & 0x8f) | 0x30; /* 0.5 to 1, and no NaN */
    for (int64_t i = 1; of->format == FT_FLOAT16 && i < bytes; i += 2)
        weights[i] = (weights[i] & 0x83) | 0x2c; /* 0.06 to 0.125 */
    for (int64_t i = 0; of->format == FT_FLOAT32 && i < bytes / 4; i++) {
        const float number = 0.2f * random_float();
        memcpy(weights + 4 * i, &number, 4);
    }
    matrix.weights = weights;
    if (of->format == FT_WHOLE || of->format == FT_SIGNED8) {
        matrix.scales = make_scales(&matrix, of->scaling, 0);
        matrix.minima = make_scales(&matrix, of->least_scaling, 1);
    }
    if (of->table) {
        int8_t *table = room(16);
        memcpy(table, of->table, 16);
        matrix.table = table;
    }
    if (!strcmp(of->name, "a table with 256ths")) {
        int8_t *fine = room(16);
        memcpy(fine, small, 16);
        matrix.fine = fine;
    }
    matrix.bias = biased ? random_floats(outputs, 0.5f) : NULL;
    return matrix;
}

void drop_matrix(ft_matrix *matrix) {
    free((void *)matrix->weights);
    free((void *)matrix->scales);
    free((void *)matrix->minima);
    free((void *)matrix->table);
    free((void *)matrix->fine);
    free((void *)matrix->bias);
}

/* Inputs that a form can have, about as many. */
static int32_t inputs_of(int form, int32_t inputs) {
    const matrix_form *of = forms + form;
    const int super = of->scaling == FT_SUPER || of->least_scaling == FT_SUPER || of->group > 32;
    return super ? (inputs + SUPER - 1) / SUPER * SUPER : inputs;
}

/* --- products */

/* One number of a product, from what the format says. Returns how large its parts are, too. */
static double slow_product(const ft_matrix *matrix, const float *row, const float *x,
                           double *size) {
    double sum = 0;
    *size = 1e-6;
    for (int32_t first = 0; first < matrix->inputs; first += GROUP) {
        float top = 0;
        for (int32_t k = first; k < first + GROUP; k++)
            top = fabsf(x[k]) > top ? fabsf(x[k]) : top;
        for (int32_t k = first; k < first + GROUP; k++) {
            double rounded = x[k];
            if (matrix->format == FT_BFLOAT16)
                rounded = ft_bfloat(ft_to_bfloat(x[k]));
            if (matrix->format == FT_WHOLE)
                rounded = top > 0 ? nearbyintf(x[k] * (127.0f / top)) * ((double)top / 127) : 0;
            sum += rounded * row[k];
            *size += fabs(rounded * row[k]);
        }
    }
    return sum;
}

static void check_products(const char *kind, int form, int32_t outputs, int32_t inputs) {
    enum { ROWS = 19 };
    static const int32_t some[] = {1, 2, 3, 5, 8, 9, ROWS};
    const size_t bytes = (size_t)outputs * 4;
    ft_matrix matrix = make_matrix(form, outputs, inputs, 1);
    float *x = random_floats((int64_t)ROWS * inputs, 3), *y = room(ROWS * bytes);
    float *want = room(ROWS * bytes), *row = room((size_t)inputs * 4);
    choose(twin_of(kind, form));
    for (int32_t i = 0; i < ROWS; i++)
        ft_product(&matrix, x + (int64_t)i * inputs, 1, want + (int64_t)i * outputs, 1);
    for (int64_t output = 0; output < outputs; output++) {
        ft_rows_of(&matrix, &output, 1, row);
        double size, sum = slow_product(&matrix, row, x, &size) + matrix.bias[output];
        if (fabs(want[output] - sum) > 1e-5 * size)
            fail("a product is not that of its numbers", forms[form].name);
    }
    choose(kind);
    for (int32_t threads = 1; threads <= MOST_THREADS_HERE; threads++)
        for (int i = 0; i < COUNT(some); i++) {
            ft_product(&matrix, x, some[i], y, threads);
            if (memcmp(y, want, some[i] * bytes))
                fail("a row of a product has other bits than alone", forms[form].name);
        }
    /* Rows whose groups have no range, or no numbers at all, break nothing. */
    for (int32_t k = 0; k < inputs; k++) {
        x[k] = k % 2 ? 1e-38f : 0.0f;
        x[inputs + k] = k % 2 ? NAN : INFINITY;
    }
    ft_product(&matrix, x, 3, y, 1);
    for (int32_t output = 0; output < outputs; output++)
        if (fabsf(y[output] - matrix.bias[output]) > 1e-30f)
            fail("a row of next to nothing has a product", forms[form].name);
    if (memcmp(y + 2 * outputs, want + 2 * outputs, bytes))
        fail("a row without numbers changed another", forms[form].name);
    drop_matrix(&matrix);
    free(x);
    free(y);
    free(want);
    free(row);
}

/* --- the team */

typedef struct {
    const ft_matrix *matrix;
    const float *x, *wanted;
    int32_t threads;
} question;

static void *ask(void *argument) {
    const question *asked = argument;
    float y[2 * OUTPUTS];
    for (int i = 0; i < 20; i++) {
        if (i == 10)
            usleep(5000); /* longer than the team stays awake */
        ft_product(asked->matrix, asked->x, 2, y, asked->threads);
        if (memcmp(y, asked->wanted, sizeof y))
            fail("a product of one of several callers is wrong", "team");
    }
    return NULL;
}

static void check_team(void) {
    enum { INPUTS = 64, CALLERS = 3 };
    ft_matrix matrix = make_matrix(0, OUTPUTS, INPUTS, 0);
    float *x = random_floats(2 * INPUTS, 1), wanted[2 * OUTPUTS];
    ft_product(&matrix, x, 2, wanted, 1);
    pthread_t callers[CALLERS];
    question asked[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        asked[i] = (question){&matrix, x, wanted, 2 * i + 1};
        if (pthread_create(callers + i, NULL, ask, asked + i))
            fail("no thread", "team");
    }
    for (int i = 0; i < CALLERS; i++)
        pthread_join(callers[i], NULL);
#ifndef NO_FORKS /* the sanitiser of threads, and emulators, know none after a fork */
    pid_t child = fork();
    if (!child) {
        ask(asked + 1);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status)
        fail("a forked child computes no product", "team");
#endif
    drop_matrix(&matrix);
    free(x);
}

/* Numbers of 4 and 8 bits that stand for weights: each as near as its steps allow. */
static void check_rounding(void) {
    enum { GROUPS = 2 * 1024 + 37 }; /* more than two tasks of a team */
    float *weights = random_floats(GROUPS * GROUP, 2);
    uint8_t *numbers = room(GROUPS * GROUP), *peaks = room(GROUPS);
    float *scales = room(4 * GROUPS), *minima = room(4 * GROUPS);
    for (int32_t i = 0; i < GROUP; i++)
        weights[i] = 0.5f; /* a group without a range */
    ft_ranges(weights, GROUPS, numbers, scales, minima, MOST_THREADS_HERE);
    ft_peaks(weights, GROUPS, peaks, MOST_THREADS_HERE);
    for (int32_t group = 0; group < GROUPS; group++) {
        double lost = 0, whole = 0;
        for (int32_t i = 0; i < GROUP; i++) {
            int32_t place = group * GROUP + i;
            double off = numbers[place] * (double)scales[group] + minima[group] - weights[place];
            lost += off * off;
            whole += (double)weights[place] * weights[place];
            if (numbers[place] > 15)
                fail("a number of 4 bits is none", "ranges");
        }
        if (lost > 0.012 * whole || (group == 0 && lost > 1e-12))
            fail("4 bits are far from their weights", "ranges");
        if (peaks[group] < 96 || peaks[group] > 127)
            fail("a peak is none", "peaks");
    }
    free(weights);
    free(numbers);
    free(peaks);
    free(scales);
    free(minima);
}

/* --- matrices of files */

/* A type of numbers, those of a block and its bytes, and how the library stores them. */
typedef struct {
    int32_t type, numbers, bytes;
    matrix_form form;
} file_type;

static const file_type file_types[] = {
    {0, 1, 4, {"F32", FT_FLOAT32, 0, 0, 0, 0, 0, NULL}},
    {1, 1, 2, {"F16", FT_FLOAT16, 0, 0, 0, 0, 0, NULL}},
    {30, 1, 2, {"BF16", FT_BFLOAT16, 0, 0, 0, 0, 0, NULL}},
    {8, 32, 34, {"Q8_0", FT_WHOLE, 8, 32, 128, FT_HALF, FT_NONE, NULL}},
    {2, 32, 18, {"Q4_0", FT_WHOLE, 4, 32, 8, FT_HALF, FT_NONE, NULL}},
    {3, 32, 20, {"Q4_1", FT_WHOLE, 4, 32, 0, FT_HALF, FT_HALF, NULL}},
    {6, 32, 22, {"Q5_0", FT_WHOLE, 5, 32, 16, FT_HALF, FT_NONE, NULL}},
    {7, 32, 24, {"Q5_1", FT_WHOLE, 5, 32, 0, FT_HALF, FT_HALF, NULL}},
    {10, 256, 84, {"Q2_K", FT_WHOLE, 2, 16, 0, FT_SUPER, FT_SUPER, NULL}},
    {11, 256, 110, {"Q3_K", FT_WHOLE, 3, 16, 4, FT_SUPER, FT_NONE, NULL}},
    {12, 256, 144, {"Q4_K", FT_WHOLE, 4, 32, 0, FT_SUPER, FT_SUPER, NULL}},
    {13, 256, 176, {"Q5_K", FT_WHOLE, 5, 32, 0, FT_SUPER, FT_SUPER, NULL}},
    {14, 256, 210, {"Q6_K", FT_WHOLE, 6, 16, 32, FT_SUPER, FT_NONE, NULL}},
    {20, 32, 18, {"IQ4_NL", FT_WHOLE, 4, 32, 0, FT_HALF, FT_NONE, bent}},
    {23, 256, 136, {"IQ4_XS", FT_WHOLE, 4, 32, 0, FT_SUPER, FT_NONE, bent}},
    {34, 256, 54, {"TQ1_0", FT_WHOLE, 2, 256, 1, FT_HALF, FT_NONE, NULL}},
    {35, 256, 66, {"TQ2_0", FT_WHOLE, 2, 256, 1, FT_HALF, FT_NONE, NULL}},
    {39, 32, 17, {"MXFP4", FT_WHOLE, 4, 32, 0, FT_POWER, FT_NONE, small}},
    {40, 64, 36, {"NVFP4", FT_WHOLE, 4, 16, 0, FT_FLOAT8, FT_NONE, small}},
};

/* Memory of just its size for the numbers of a matrix. */
static ft_matrix empty_matrix(const matrix_form *of, int32_t outputs, int32_t inputs) {
    ft_matrix matrix = {of->format, outputs, (inputs + GROUP - 1) / GROUP * GROUP,
                        (outputs + BLOCK - 1) / BLOCK, of->bits, of->group, of->offset,
                        of->scaling, of->least_scaling, 0, 0, 0, of->table, 0, 0};
    matrix.weights = room((size_t)(matrix.blocks * ft_weight_bytes(&matrix)));
    if (of->scaling)
        matrix.scales = room((size_t)(matrix.blocks * ft_scale_bytes(&matrix, of->scaling)));
    if (of->least_scaling)
        matrix.minima = room((size_t)(matrix.blocks * ft_scale_bytes(&matrix, of->least_scaling)));
    return matrix;
}

/* Rows in another order are the same rows, and what a file cannot have is refused. */
static void check_packing(const file_type *of) {
    const int32_t inputs = of->numbers == 1 ? 45 : 512;
    const int64_t row_bytes = inputs / of->numbers * of->bytes, all = row_bytes * OUTPUTS;
    uint8_t *rows = room((size_t)all);
    int64_t order[OUTPUTS];
    for (int64_t i = 0; i < all; i++)
        rows[i] = (uint8_t)(random_bits() >> 8);
    for (int64_t i = 0; i < OUTPUTS; i++)
        order[i] = OUTPUTS - 1 - i;
    ft_raw raw = {of->type, inputs, OUTPUTS, rows, row_bytes, NULL};
    ft_matrix plain = empty_matrix(&of->form, OUTPUTS, inputs);
    ft_matrix turned = empty_matrix(&of->form, OUTPUTS, inputs);
    const int32_t first = ft_pack(&raw, &plain, MOST_THREADS_HERE);
    raw.order = order;
    if (first != FT_DONE || ft_pack(&raw, &turned, 1) != FT_DONE)
        fail("rows of a file are refused", of->form.name);
    const size_t bytes = (size_t)plain.inputs * 4;
    float *one = room(bytes), *other = room(bytes);
    for (int64_t i = 0; i < OUTPUTS; i++) {
        ft_rows_of(&plain, &i, 1, one);
        ft_rows_of(&turned, order + i, 1, other);
        if (memcmp(one, other, bytes))
            fail("a row is another in another order", of->form.name);
    }
    order[3] = OUTPUTS;
    if (ft_pack(&raw, &turned, 1) != FT_OUTSIDE)
        fail("a row that is not there is not refused", of->form.name);
    raw.order = NULL;
    raw.row_bytes--;
    if (ft_pack(&raw, &turned, 1) != FT_MISFIT)
        fail("rows of another size are not refused", of->form.name);
    plain.table = turned.table = NULL;
    drop_matrix(&plain);
    drop_matrix(&turned);
    free(rows);
    free(one);
    free(other);
}

int main(void) {
    for (int i = 0; i < COUNT(file_types); i++)
        check_packing(file_types + i);
    for (int i = 0; i < COUNT(kinds); i++) {
        if (!ft_choose(kinds[i]))
            continue;
        for (int form = 0; form < FORMS; form++) {
            check_products(kinds[i], form, 37, inputs_of(form, 96));
            check_products(kinds[i], form, 80, inputs_of(form, 544));
        }
        check_rounding();
        check_team();
        printf("%s kernels: products are right\n", kinds[i]);
    }
    check_forwards();
    return 0;
}
