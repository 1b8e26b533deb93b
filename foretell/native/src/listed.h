/* Attention over rows that are listed, and products with all rows: kernels, included by kernels.h.

   A query's result depends on the rows that it reads alone: they are taken in ascending order. */

#define AHEAD_ROWS 24 /* of a list, which the processor cannot foresee */

/* 16 numbers of a row from `d` on; of a row that ends before, zeros behind it. `whole`: none
   does. */
INLINE vec row_part(const void *row, int32_t d, int32_t width, const int wide, const int whole) {
    if (whole || d + 16 <= width)
        return wide ? v_load((const float *)row + d) : v_bfloat((const uint16_t *)row + d);
    float part[16] = {0};
    for (int32_t i = 0; d + i < width; i++)
        part[i] = wide ? ((const float *)row)[d + i] : ft_bfloat(((const uint16_t *)row)[d + i]);
    return v_load(part);
}

INLINE const void *row_at(const void *rows, int64_t place, const int wide) {
    return (const char *)rows + (place << (wide ? 2 : 1));
}

/* The rows that a node's query head reads, in order; returns how many. `memory`: room for all. */
static int32_t list_rows(const ft_reading *reading, int32_t head, int32_t node, int32_t *rows) {
    const int32_t owner = head / (reading->heads / reading->owners), all = reading->rows;
    const int64_t place = (int64_t)owner * reading->nodes + node;
    int32_t count = 0;
    if (reading->lists) {
        const int32_t *list = reading->lists + place * reading->longest;
        const int32_t page = reading->page;
        for (int32_t i = 0; i < reading->longest; i++)
            for (int32_t row = list[i] * page; row < list[i] * page + page; row++)
                rows[count++] = row;
        for (int32_t row = reading->first; row < all; row++)
            rows[count++] = row;
    } else if (reading->read) {
        const uint8_t *read = reading->read + place * all;
        for (int32_t row = 0; row < all; row++) {
            rows[count] = row;
            count += read[row] != 0;
        }
    } else {
        for (; count < all; count++)
            rows[count] = count;
    }
    if (!reading->mask)
        return count;
    const float *mask = reading->mask + head * reading->mask_head + (int64_t)node * all;
    int32_t seen = 0;
    for (int32_t i = 0; i < count; i++) {
        rows[seen] = rows[i];
        seen += mask[rows[i]] != -INFINITY;
    }
    return seen;
}

/* Scores of `count` queries (count, width) for rows of a list; NULL: for the first `rows`. A list
   goes on to a multiple of 16. `whole`: the width is a multiple of 16. */
INLINE void score_list(const void *keys, int64_t stride, int32_t width, const int32_t *list,
                       int32_t rows, const float *queries, const int count, const int wide,
                       const int whole, float *scores, int64_t score_stride) {
    vec sums[4][16];
    float part[16];
    for (int32_t i = 0; i < rows; i += 16) {
        const int32_t here = rows - i < 16 ? rows - i : 16;
        for (int32_t r = 0; r < here; r++) {
            const void *key = row_at(keys, (list ? list[i + r] : i + r) * stride, wide);
            if (list && i + r + AHEAD_ROWS < rows) {
                const char *ahead = row_at(keys, list[i + r + AHEAD_ROWS] * stride, wide);
                for (int32_t byte = 0; byte < width << (wide ? 2 : 1); byte += 64)
                    PREFETCH(ahead + byte);
            }
            vec own[4];
            UNROLL for (int q = 0; q < count; q++) own[q] = v_set(0.0f);
            for (int32_t d = 0; d < width; d += 16) {
                vec numbers = row_part(key, d, width, wide, whole);
                UNROLL for (int q = 0; q < count; q++)
                    own[q] = v_fma(row_part(queries + q * width, d, width, 1, whole), numbers,
                                   own[q]);
            }
            UNROLL for (int q = 0; q < count; q++) sums[q][r] = own[q];
        }
        for (int32_t r = here; r < 16; r++)
            UNROLL for (int q = 0; q < count; q++) sums[q][r] = v_set(0.0f);
        UNROLL for (int q = 0; q < count; q++) {
            v_store(part, v_sums(sums[q]));
            memcpy(scores + q * score_stride + i, part, sizeof(float) * (size_t)here);
        }
    }
}

/* out (count, width) = sum of weights[q][i] * row list[i], of `vectors` * 16 numbers from `d`
   on. */
INLINE void mix_list(const void *values, int64_t stride, int32_t width, const int32_t *list,
                     int32_t rows, const float *weights, int64_t weight_stride, int32_t d,
                     const int count, const int vectors, const int wide, const int whole,
                     float *out) {
    vec sums[4 * 4];
    UNROLL for (int i = 0; i < count * vectors; i++) sums[i] = v_set(0.0f);
    for (int32_t i = 0; i < rows; i++) {
        const void *value = row_at(values, list[i] * stride, wide);
        if (i + AHEAD_ROWS < rows) {
            const char *ahead = row_at(values, list[i + AHEAD_ROWS] * stride + d, wide);
            for (int byte = 0; byte < vectors << (wide ? 6 : 5); byte += 64)
                PREFETCH(ahead + byte);
        }
        vec numbers[4];
        UNROLL for (int v = 0; v < vectors; v++)
            numbers[v] = row_part(value, d + 16 * v, width, wide, whole);
        UNROLL for (int q = 0; q < count; q++) {
            vec weight = v_set(weights[q * weight_stride + i]);
            UNROLL for (int v = 0; v < vectors; v++)
                sums[q * vectors + v] = v_fma(weight, numbers[v], sums[q * vectors + v]);
        }
    }
    UNROLL for (int q = 0; q < count; q++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float part[16];
            v_store(part, sums[q * vectors + v]);
            int32_t left = width - d - 16 * v;
            memcpy(out + q * width + d + 16 * v, part,
                   sizeof(float) * (size_t)(left < 16 ? left : 16));
        }
}

/* The four ways in which numbers of rows lie, each a build of its own. */
#define EACH_WAY(CALL, COUNT, WIDTH)                                                             \
    do {                                                                                         \
        if (reading->wide)                                                                       \
            (WIDTH) % 16 ? CALL(COUNT, 1, 0) : CALL(COUNT, 1, 1);                                \
        else                                                                                     \
            (WIDTH) % 16 ? CALL(COUNT, 0, 0) : CALL(COUNT, 0, 1);                                \
    } while (0)

static void score_queries(const ft_reading *reading, int32_t head, const int32_t *list,
                          int32_t rows, const float *queries, int32_t count, float *scores,
                          int64_t score_stride) {
    const int32_t width = reading->width;
    const int64_t stride = reading->key_row;
    const int32_t group = reading->heads / reading->kv_heads;
    const void *keys = row_at(reading->keys, head / group * reading->key_head, reading->wide);
    int32_t q = 0;
#define SCORE(COUNT, WIDE, WHOLE)                                                                \
    score_list(keys, stride, width, list, rows, queries + q * width, COUNT, WIDE, WHOLE,         \
               scores + q * score_stride, score_stride)
    for (; q + 3 <= count; q += 3)
        EACH_WAY(SCORE, 3, width);
    for (; q < count; q++)
        EACH_WAY(SCORE, 1, width);
}

static void mix_queries(const ft_reading *reading, int32_t head, const int32_t *list,
                        int32_t rows, const float *weights, int32_t count, int64_t weight_stride,
                        float *out) {
    const int32_t width = reading->value_width;
    const int64_t stride = reading->value_row;
    const int32_t group = reading->heads / reading->kv_heads;
    const void *values = row_at(reading->values, head / group * reading->value_head, reading->wide);
#define MIX_FOUR(COUNT, WIDE, WHOLE)                                                             \
    mix_list(values, stride, width, list, rows, weights + q * weight_stride, weight_stride, d,   \
             COUNT, 4, WIDE, WHOLE, out + q * width)
#define MIX_ONE(COUNT, WIDE, WHOLE)                                                              \
    mix_list(values, stride, width, list, rows, weights + q * weight_stride, weight_stride, d,   \
             COUNT, 1, WIDE, WHOLE, out + q * width)
#define MIX_COUNT(COUNT)                                                                         \
    for (; q + COUNT <= count; q += COUNT) {                                                     \
        int32_t d = 0;                                                                           \
        for (; d + 48 < width; d += 64)                                                          \
            EACH_WAY(MIX_FOUR, COUNT, width);                                                    \
        for (; d < width; d += 16)                                                               \
            EACH_WAY(MIX_ONE, COUNT, width);                                                     \
    }
    int32_t q = 0;
    MIX_COUNT(3) MIX_COUNT(1)
}

/* The places of scores that are at least `least`, ascending; returns how many. `places` has room for
   all. */
static int32_t reaching(const float *scores, int32_t count, float least, int32_t *places) {
    const vec lowest = v_set(least);
    int32_t found = 0, i = 0;
    for (; i + 16 <= count; i += 16)
        for (uint32_t bits = v_reaching(v_load(scores + i), lowest); bits; bits &= bits - 1)
            places[found++] = i + __builtin_ctz(bits);
    for (; i < count; i++)
        if (scores[i] >= least)
            places[found++] = i;
    return found;
}

/* What a task works in: of each query its numbers and its scores, and a list. */
static int64_t reading_bytes(const ft_reading *reading) {
    const int64_t group = reading->heads / reading->kv_heads;
    return 4 * (group * (reading->width + reading->rows + 32) + reading->rows + 32);
}

/* Attention of a node's query heads `first` to `last - 1`, which share keys. */
static void read_listed(const ft_reading *reading, int32_t node, int32_t first, int32_t last,
                        void *memory) {
    const int32_t width = reading->width, group = reading->heads / reading->kv_heads;
    const int64_t stride = reading->rows + 32;
    float *queries = memory, *scores = queries + group * width;
    int32_t *list = (int32_t *)(scores + group * stride);
    /* Whether query heads of one key head read the same rows. */
    const int same = reading->owners == reading->kv_heads && !reading->mask_head;
    float *given = NULL;
    if (reading->weights) {
        given = reading->weights +
                ((int64_t)(first / group) * reading->nodes + node) * reading->rows;
        memset(given, 0, sizeof(float) * (size_t)reading->rows);
    }
    for (int32_t head = first; head < last;) {
        const int32_t count = same ? last - head : 1;
        const int32_t rows = list_rows(reading, head, node, list);
        for (int32_t q = 0; q < count; q++) {
            const float *from =
                reading->q + ((int64_t)(head + q) * reading->nodes + node) * width;
            for (int32_t d = 0; d < width; d++)
                queries[q * width + d] = from[d] * reading->scale;
        }
        float *out = reading->out +
                     ((int64_t)node * reading->heads + head) * reading->value_width;
        float *log_sums = reading->log_sums
                              ? reading->log_sums + (int64_t)node * reading->heads + head
                              : NULL;
        if (!rows) { /* nothing is read: nothing comes of it */
            memset(out, 0, sizeof(float) * (size_t)(count * reading->value_width));
            for (int32_t q = 0; q < count && log_sums; q++)
                log_sums[q] = -INFINITY;
        } else {
            score_queries(reading, head, list, rows, queries, count, scores, stride);
        }
        for (int32_t q = 0; q < count && rows; q++) {
            float *weights = scores + q * stride;
            if (reading->mask) {
                const float *mask = reading->mask + (head + q) * reading->mask_head +
                                    (int64_t)node * reading->rows;
                for (int32_t i = 0; i < rows; i++)
                    weights[i] += mask[list[i]];
            }
            float most;
            const float sum = soften_list(weights, rows, 0.0f, NULL, &most), inverse = 1.0f / sum;
            if (log_sums)
                log_sums[q] = most + logf(sum);
            for (int32_t i = 0; i < rows; i++)
                weights[i] *= inverse;
            if (given)
                for (int32_t i = 0; i < rows; i++)
                    given[list[i]] += weights[i] / (float)group;
        }
        if (rows)
            mix_queries(reading, head, list, rows, scores, count, stride, out);
        head += count;
    }
}

/* Products of `count` queries, `apart` numbers from each other, with `rows` rows that lie beside each
   other; the numbers of a row lie `stride` apart. */
INLINE void multiply_columns(const void *keys, int64_t stride, int32_t width, int32_t rows,
                             const float *queries, int64_t apart, const int count, const int wide,
                             float *out, int64_t out_stride) {
    for (int32_t i = 0; i < rows; i += 16) {
        const int32_t here = rows - i < 16 ? rows - i : 16;
        vec sums[4];
        UNROLL for (int q = 0; q < count; q++) sums[q] = v_set(0.0f);
        for (int32_t d = 0; d < width; d++) {
            vec numbers = row_part(row_at(keys, d * stride + i, wide), 0, here, wide, here == 16);
            UNROLL for (int q = 0; q < count; q++)
                sums[q] = v_fma(v_set(queries[q * apart + d]), numbers, sums[q]);
        }
        UNROLL for (int q = 0; q < count; q++) {
            float part[16];
            v_store(part, sums[q]);
            memcpy(out + q * out_stride + i, part, sizeof(float) * (size_t)here);
        }
    }
}

/* Products of a query with rows `from` to `to - 1` of its key head, out (heads, nodes, rows), whose
   rows lie `out_row` apart. */
static void multiply_rows(const ft_reading *reading, int32_t kv_head, int32_t node, int32_t from,
                          int32_t to) {
    const int32_t group = reading->heads / reading->kv_heads, width = reading->width;
    const int64_t nodes = reading->nodes, apart = nodes * reading->out_row;
    const int64_t place = (int64_t)kv_head * group * nodes + node;
    const float *queries = reading->q + place * width;
    float *out = reading->out + place * reading->out_row + from;
    if (reading->key_number != 1) {
        const void *keys =
            row_at(reading->keys, kv_head * reading->key_head + from, reading->wide);
#define MULTIPLY(COUNT, WIDE)                                                                    \
    multiply_columns(keys, reading->key_number, width, to - from, queries + h * nodes * width,   \
                     nodes * width, COUNT, WIDE, out + h * apart, apart)
        int32_t h = 0;
        for (; h + 3 <= group; h += 3)
            reading->wide ? MULTIPLY(3, 1) : MULTIPLY(3, 0);
        for (; h < group; h++)
            reading->wide ? MULTIPLY(1, 1) : MULTIPLY(1, 0);
        return;
    }
    ft_reading part = *reading;
    part.keys = row_at(reading->keys, from * reading->key_row, reading->wide);
    for (int32_t h = 0; h < group;) {
        /* Those of one node lie beside each other, head by head. */
        const int32_t count = nodes == 1 ? group - h : 1;
        score_queries(&part, kv_head * group + h, NULL, to - from, queries + h * nodes * width,
                      count, out + h * apart, apart);
        h += count;
    }
}
