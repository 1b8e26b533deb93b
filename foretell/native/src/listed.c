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

EXPORT int32_t ft_read(const ft_reading *reading, int32_t threads) {
    const int32_t checked = ft_check_reading(reading);
    if (checked != FT_DONE || reading->value_width < 1 || !reading->values)
        return checked == FT_DONE ? FT_MISFIT : checked;
    const int32_t group = reading->heads / reading->kv_heads;
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    listed_job job = {.reading = reading, .heads = soonest_apart(reading, threads) ? 1 : group};
    job.bytes = (ft_chosen()->reading_bytes(reading) + 63) / 64 * 64;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (size_t)(threads * job.bytes)))
        return FT_NO_MEMORY;
    job.memory = memory;
    ft_run(listed_work, &job, threads);
    free(memory);
    return FT_DONE;
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

EXPORT int32_t ft_products(const ft_reading *reading, int32_t threads) {
    const int32_t checked = ft_check_reading(reading);
    if (checked == FT_DONE)
        ft_run(products_work, (void *)reading, threads);
    return checked;
}

/* --- the highest of some numbers */

typedef struct {
    const float *scores;
    int32_t lists, length, count;
    int32_t *places;
    char *memory;
    int64_t bytes;    /* of each thread */
} highest_job;

#define BINS 256   /* of keys */
#define SAMPLE 256 /* scores by which it is guessed how high the highest are */

/* Whole numbers in the order of floats, NaN aside; of both zeros the same. */
static uint32_t ordered(float score) {
    uint32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static float score_of(uint32_t key) {
    float score;
    key = key & 0x80000000u ? key ^ 0x80000000u : ~key;
    memcpy(&score, &key, 4);
    return score;
}

/* What the `count`-th highest of `length` keys is, count at most length; and how many of those that
   are equal to it are among them. The keys are sorted into `BINS` equal ranges between the least and
   the largest of them; those of the range where it lies go on, until a range is one number. The keys
   are overwritten. */
static uint32_t find_least(uint32_t *keys, int32_t length, int32_t count, int32_t *equal) {
    for (;;) {
        int32_t found[BINS] = {0}, bin = BINS - 1, shift = 0, left = 0;
        uint32_t lowest = keys[0], highest = keys[0];
        for (int32_t i = 1; i < length; i++) {
            lowest = keys[i] < lowest ? keys[i] : lowest;
            highest = keys[i] > highest ? keys[i] : highest;
        }
        while ((highest - lowest) >> shift >= BINS)
            shift++;
        for (int32_t i = 0; i < length; i++)
            found[(keys[i] - lowest) >> shift]++;
        for (; found[bin] < count; bin--)
            count -= found[bin];
        if (!shift) {
            *equal = count;
            return lowest + (uint32_t)bin;
        }
        for (int32_t i = 0; i < length; i++) {
            const uint32_t key = keys[i];
            keys[left] = key;
            left += (key - lowest) >> shift == (uint32_t)bin;
        }
        length = left;
    }
}

/* A score that, going by some of them, a little more than `count` of all reach. */
static float guess_least(const float *scores, int32_t length, int32_t count) {
    uint32_t sample[SAMPLE];
    int32_t equal;
    for (int32_t i = 0; i < SAMPLE; i++)
        sample[i] = ordered(scores[(int64_t)i * length / SAMPLE]);
    const float share = (float)count / (float)length * SAMPLE;
    const int32_t more = (int32_t)(share + 2.0f * sqrtf(share)) + 2;
    return more < SAMPLE ? score_of(find_least(sample, SAMPLE, more, &equal)) : -INFINITY;
}

/* The places of the `count` highest scores, ascending; of equals the first. Those that do not reach
   a guess are passed over, unless it was too high. `places` and `keys` have room for all, `keys`
   twice. */
static void find_highest(const float *scores, int32_t length, int32_t count, int32_t *out,
                         int32_t *places, uint32_t *keys) {
    int32_t kept = 0, equal = 0, taken = 0;
    if (length > 4 * SAMPLE)
        kept = ft_chosen()->reaching(scores, length, guess_least(scores, length, count), places);
    if (kept < count)
        for (kept = 0; kept < length; kept++)
            places[kept] = kept;
    for (int32_t i = 0; i < kept; i++)
        keys[i] = ordered(scores[places[i]]);
    uint32_t *copies = keys + kept;
    memcpy(copies, keys, sizeof(uint32_t) * (size_t)kept);
    const uint32_t least = find_least(copies, kept, count, &equal);
    for (int32_t i = 0; taken < count; i++) {
        out[taken] = places[i];
        taken += (keys[i] > least) | ((keys[i] == least) & (equal > 0));
        equal -= keys[i] == least;
    }
}

static void highest_work(ft_team *team, int thread, void *argument) {
    highest_job *job = argument;
    int32_t *places = (int32_t *)(job->memory + thread * job->bytes);
    uint32_t *keys = (uint32_t *)(places + job->length);
    for (int32_t list; (list = ft_next(team, thread, job->lists)) < job->lists;)
        find_highest(job->scores + (int64_t)list * job->length, job->length, job->count,
                     job->places + (int64_t)list * job->count, places, keys);
}

EXPORT int32_t ft_highest(const float *scores, int32_t lists, int32_t length, int32_t count,
                          int32_t *places, int32_t threads) {
    if (lists < 0 || count < 1 || count > length)
        return FT_MISFIT;
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    highest_job job = {.scores = scores, .lists = lists, .length = length, .count = count,
                       .places = places};
    job.bytes = 64 * ((12 * (int64_t)length + 63) / 64); /* places, and keys twice */
    job.memory = malloc((size_t)(threads * job.bytes));
    if (!job.memory)
        return FT_NO_MEMORY;
    ft_run(highest_work, &job, threads);
    free(job.memory);
    return FT_DONE;
}
