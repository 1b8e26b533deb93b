/* Attention over rows that are listed, products with all rows of a cache, and the highest of some
   numbers: what cache policies are made of that select, and those that watch. */

#define _GNU_SOURCE
#include "foretell_native.h"
#include "pool.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PIECE 1024 /* rows of one task of products */

typedef struct {
    const ft_reading *reading;
    int32_t heads;    /* of one task */
    char *memory;
    int64_t bytes;    /* of each thread */
} listed_job;

static void listed_work(ft_team *team, int thread, void *argument) {
    listed_job *job = argument;
    const ft_reading *reading = job->reading;
    const int32_t parts = reading->heads / job->heads, total = parts * reading->nodes;
    for (int32_t task; (task = ft_next(team, thread, total)) < total;) {
        int32_t first = task % parts * job->heads;
        ft_chosen()->read_listed(reading, task / parts, first, first + job->heads,
                                 job->memory + thread * job->bytes);
    }
}

/* How long threads take for so many tasks of the same length. */
static int64_t rounds(int64_t tasks, int32_t threads, int32_t length) {
    return (tasks + threads - 1) / threads * length;
}

/* Whether the query heads of one key head are soonest done as tasks of their own. Together they
   read its rows once, where these are the same ones: in quarters of the time that one takes, all
   take 3 and one for each, as measured. */
static int soonest_apart(const ft_reading *reading, int32_t threads) {
    const int32_t group = reading->heads / reading->kv_heads, nodes = reading->nodes;
    const int together = reading->owners == reading->kv_heads && !reading->mask_head;
    if (reading->weights) /* they add to the same numbers */
        return 0;
    return rounds((int64_t)reading->heads * nodes, threads, 4) <
           rounds((int64_t)reading->kv_heads * nodes, threads, together ? 3 + group : 4 * group);
}

/* 0: no memory. */
EXPORT int32_t ft_read(const ft_reading *reading, int32_t threads) {
    const int32_t group = reading->heads / reading->kv_heads;
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    listed_job job = {.reading = reading, .heads = soonest_apart(reading, threads) ? 1 : group};
    job.bytes = (ft_chosen()->reading_bytes(reading) + 63) / 64 * 64;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (size_t)(threads * job.bytes)))
        return 0;
    job.memory = memory;
    ft_run(listed_work, &job, threads);
    free(memory);
    return 1;
}

static void products_work(ft_team *team, int thread, void *argument) {
    const ft_reading *reading = argument;
    const int32_t pieces = (reading->rows + PIECE - 1) / PIECE;
    const int32_t each = pieces * reading->kv_heads, total = each * reading->nodes;
    for (int32_t task; (task = ft_next(team, thread, total)) < total;) {
        int32_t from = task % pieces * PIECE, left = reading->rows - from;
        ft_chosen()->multiply_rows(reading, task % each / pieces, task / each, from,
                                   from + (left < PIECE ? left : PIECE));
    }
}

EXPORT void ft_products(const ft_reading *reading, int32_t threads) {
    ft_run(products_work, (void *)reading, threads);
}

/* --- the highest of some numbers */

typedef struct {
    const float *scores;
    int32_t lists, length, count;
    int32_t *places;
    char *memory;
    int64_t bytes;    /* of each thread */
} highest_job;

#define DIGIT 11 /* bits that are looked at together */

/* Whole numbers in the order of floats, NaN aside; of both zeros the same. */
static uint32_t ordered(float score) {
    uint32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* What the `count`-th highest of `length` scores is, count at most length, as `ordered` has it; and
   how many of those that are equal to it are among them. Digit by digit, the numbers are counted
   that begin as it does; after the first digit few of them are left. `keys`: room for all. */
static uint32_t find_least(const float *scores, int32_t length, int32_t count, uint32_t *keys,
                           int32_t *equal) {
    const uint32_t digits = (1u << DIGIT) - 1;
    uint32_t least = 0;
    for (int32_t i = 0; i < length; i++)
        keys[i] = ordered(scores[i]);
    for (int shift = 32 - DIGIT;; shift = shift > DIGIT ? shift - DIGIT : 0) {
        /* Neighbours are counted apart: mostly they are alike, and would wait for each other. */
        int32_t found[1 << DIGIT] = {0}, beside[1 << DIGIT] = {0}, left = 0;
        for (int32_t i = 0; i + 1 < length; i += 2) {
            found[keys[i] >> shift & digits]++;
            beside[keys[i + 1] >> shift & digits]++;
        }
        if (length % 2)
            found[keys[length - 1] >> shift & digits]++;
        uint32_t digit = digits;
        for (; found[digit] + beside[digit] < count; digit--)
            count -= found[digit] + beside[digit];
        least |= digit << shift;
        *equal = count;
        if (!shift)
            return least;
        for (int32_t i = 0; i < length; i++) {
            keys[left] = keys[i];
            left += (keys[i] >> shift & digits) == digit;
        }
        length = left;
    }
}

/* Places of the `count` highest scores, ascending; of equals the first. `keys`: room for all. */
static void take_highest(const float *scores, int32_t length, int32_t count, int32_t *places,
                         uint32_t *keys) {
    int32_t equal = count, taken = 0;
    const uint32_t least = count < length ? find_least(scores, length, count, keys, &equal) : 0;
    for (int32_t i = 0; taken < count; i++) {
        uint32_t key = ordered(scores[i]);
        places[taken] = i;
        taken += (key > least) | ((key == least) & (equal > 0));
        equal -= key == least;
    }
}

/* The same; where few are wanted, blocks that have none of them are passed over. `memory`: room for
   the scores, once more, and for numbers of their blocks. */
static void find_highest(const float *scores, int32_t length, int32_t count, int32_t *places,
                         float *memory) {
    const int32_t blocks = (length + BLOCK - 1) / BLOCK;
    uint32_t *keys = (uint32_t *)(memory + blocks * BLOCK);
    int32_t *block = (int32_t *)(keys + blocks * BLOCK), kept = 0, equal = 0;
    if (count >= blocks) {
        take_highest(scores, length, count, places, keys);
        return;
    }
    for (int32_t b = 0; b < blocks; b++) {
        int32_t end = (b + 1) * BLOCK < length ? (b + 1) * BLOCK : length;
        float top = scores[b * BLOCK];
        for (int32_t i = b * BLOCK + 1; i < end; i++)
            top = scores[i] > top ? scores[i] : top;
        memory[b] = top;
    }
    /* As many blocks as are wanted reach the lowest of the highest blocks' tops, with a score each:
       blocks that do not reach it have none that is wanted. */
    const uint32_t least = find_least(memory, blocks, count, keys, &equal);
    for (int32_t b = 0; b < blocks; b++)
        if (ordered(memory[b]) >= least)
            block[kept++] = b;
    for (int32_t k = 0; k < kept; k++) {
        int32_t first = block[k] * BLOCK, left = length - first;
        for (int32_t i = 0; i < BLOCK; i++) /* scores that are not there are the last ones */
            memory[k * BLOCK + i] = i < left ? scores[first + i] : -INFINITY;
    }
    take_highest(memory, kept * BLOCK, count, places, keys);
    for (int32_t i = 0; i < count; i++)
        places[i] = block[places[i] / BLOCK] * BLOCK + places[i] % BLOCK;
}

static void highest_work(ft_team *team, int thread, void *argument) {
    highest_job *job = argument;
    float *memory = (float *)(job->memory + thread * job->bytes);
    for (int32_t list; (list = ft_next(team, thread, job->lists)) < job->lists;)
        find_highest(job->scores + (int64_t)list * job->length, job->length, job->count,
                     job->places + (int64_t)list * job->count, memory);
}

/* 0: no memory. */
EXPORT int32_t ft_highest(const float *scores, int32_t lists, int32_t length, int32_t count,
                          int32_t *places, int32_t threads) {
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    highest_job job = {.scores = scores, .lists = lists, .length = length, .count = count,
                       .places = places};
    job.bytes = 64 * ((12 * ((int64_t)length + BLOCK) + 63) / 64);
    job.memory = malloc((size_t)(threads * job.bytes));
    if (!job.memory)
        return 0;
    ft_run(highest_work, &job, threads);
    free(job.memory);
    return 1;
}
