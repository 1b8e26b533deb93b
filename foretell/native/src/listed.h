/* Attention over rows that are listed, and products with all rows: kernels, included by kernels.h.

   A query's result depends on the rows that it reads alone: they are taken in ascending order. */

#define AHEAD_ROWS 12 /* of a list, which the processor cannot foresee */

/* 16 numbers of a row from `d` on; of a row that ends before, zeros behind it. */
INLINE vec row_part(const void *row, int32_t d, int32_t width, const int wide) {
    if (d + 16 <= width)
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

/* Scores of `count` queries (count, width) for rows of a list; NULL: for the first `rows`. */
INLINE void score_list(const void *keys, int64_t stride, int32_t width, const int32_t *list,
                       int32_t rows, const float *queries, const int count, const int wide,
                       float *scores, int64_t score_stride) {
    for (int32_t i = 0; i < rows; i++) {
        const void *key = row_at(keys, (list ? list[i] : i) * stride, wide);
        if (list && i + AHEAD_ROWS < rows) {
            const char *ahead = row_at(keys, list[i + AHEAD_ROWS] * stride, wide);
            for (int32_t byte = 0; byte < width << (wide ? 2 : 1); byte += 64)
                PREFETCH(ahead + byte);
        }
        vec sums[4];
        UNROLL for (int q = 0; q < count; q++) sums[q] = v_set(0.0f);
        for (int32_t d = 0; d < width; d += 16) {
            vec part = row_part(key, d, width, wide);
            UNROLL for (int q = 0; q < count; q++) {
                vec query = row_part(queries + q * width, d, width, 1);
                sums[q] = v_fma(query, part, sums[q]);
            }
        }
        UNROLL for (int q = 0; q < count; q++) scores[q * score_stride + i] = v_sum(sums[q]);
    }
}

/* out (width,) = sum of weights[i] * row list[i], of up to `vectors` * 16 numbers from `d` on. */
INLINE void mix_list(const void *values, int64_t stride, int32_t width, const int32_t *list,
                     int32_t rows, const float *weights, int32_t d, const int vectors,
                     const int wide, float *out) {
    vec sums[4];
    UNROLL for (int v = 0; v < vectors; v++) sums[v] = v_set(0.0f);
    for (int32_t i = 0; i < rows; i++) {
        const void *value = row_at(values, list[i] * stride, wide);
        if (i + AHEAD_ROWS < rows) {
            const char *ahead = row_at(values, list[i + AHEAD_ROWS] * stride + d, wide);
            for (int byte = 0; byte < vectors << (wide ? 6 : 5); byte += 64)
                PREFETCH(ahead + byte);
        }
        vec weight = v_set(weights[i]);
        UNROLL for (int v = 0; v < vectors; v++)
            sums[v] = v_fma(weight, row_part(value, d + 16 * v, width, wide), sums[v]);
    }
    UNROLL for (int v = 0; v < vectors; v++) {
        float part[16];
        v_store(part, sums[v]);
        int32_t left = width - d - 16 * v;
        memcpy(out + d + 16 * v, part, sizeof(float) * (size_t)(left < 16 ? left : 16));
    }
}

static void score_queries(const ft_reading *reading, int32_t head, const int32_t *list,
                          int32_t rows, const float *queries, int32_t count, float *scores,
                          int64_t score_stride) {
    const int32_t width = reading->width;
    const int64_t stride = reading->key_row;
    const int32_t group = reading->heads / reading->kv_heads;
    const void *keys = row_at(reading->keys, head / group * reading->key_head, reading->wide);
    int32_t q = 0;
#define SCORE(COUNT, WIDE)                                                                       \
    score_list(keys, stride, width, list, rows, queries + q * width, COUNT, WIDE,                \
               scores + q * score_stride, score_stride)
#define SCORE_ALL(COUNT)                                                                         \
    for (; q + COUNT <= count; q += COUNT)                                                       \
        reading->wide ? SCORE(COUNT, 1) : SCORE(COUNT, 0);
    SCORE_ALL(4) SCORE_ALL(3) SCORE_ALL(2) SCORE_ALL(1)
}

static void mix_query(const ft_reading *reading, int32_t head, const int32_t *list, int32_t rows,
                      const float *weights, float *out) {
    const int32_t width = reading->value_width;
    const int64_t stride = reading->value_row;
    const int32_t group = reading->heads / reading->kv_heads;
    const void *values = row_at(reading->values, head / group * reading->value_head, reading->wide);
    int32_t d = 0;
#define MIX_LIST(VECTORS, WIDE)                                                                  \
    mix_list(values, stride, width, list, rows, weights, d, VECTORS, WIDE, out)
#define MIX_LISTS(VECTORS)                                                                       \
    for (; d + 16 * (VECTORS - 1) < width; d += 16 * VECTORS)                                    \
        reading->wide ? MIX_LIST(VECTORS, 1) : MIX_LIST(VECTORS, 0);
    MIX_LISTS(4) MIX_LISTS(2) MIX_LISTS(1)
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
        score_queries(reading, head, list, rows, queries, count, scores, stride);
        for (int32_t q = 0; q < count; q++) {
            float *out = reading->out + ((int64_t)node * reading->heads + head + q) *
                                            reading->value_width;
            float *weights = scores + q * stride;
            if (!rows) { /* nothing is read: nothing comes of it */
                memset(out, 0, sizeof(float) * (size_t)reading->value_width);
                continue;
            }
            if (reading->mask) {
                const float *mask = reading->mask + (head + q) * reading->mask_head +
                                    (int64_t)node * reading->rows;
                for (int32_t i = 0; i < rows; i++)
                    weights[i] += mask[list[i]];
            }
            const float inverse = 1.0f / soften_list(weights, rows);
            for (int32_t i = 0; i < rows; i++)
                weights[i] *= inverse;
            mix_query(reading, head + q, list, rows, weights, out);
            if (given)
                for (int32_t i = 0; i < rows; i++)
                    given[list[i]] += weights[i] / (float)group;
        }
        head += count;
    }
}

/* Products of a query with rows `from` to `to - 1` of its key head, out (heads, nodes, rows). */
static void multiply_rows(const ft_reading *reading, int32_t kv_head, int32_t node, int32_t from,
                          int32_t to) {
    const int32_t group = reading->heads / reading->kv_heads, width = reading->width;
    const int64_t rows = reading->rows, nodes = reading->nodes;
    ft_reading part = *reading;
    part.keys = row_at(reading->keys, from * reading->key_row, reading->wide);
    for (int32_t h = 0; h < group;) {
        const int32_t head = kv_head * group + h;
        const int64_t place = head * nodes + node;
        /* Those of one node lie beside each other, head by head. */
        const int32_t count = nodes == 1 ? group - h : 1;
        score_queries(&part, head, NULL, to - from, reading->q + place * width, count,
                      reading->out + place * rows + from, nodes * rows);
        h += count;
    }
}
