/* The best entries of rows of logits, those that hold a share, and tokens drawn from laws. */

#include "foretell_native.h"
#include "pool.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SLICE 128 /* logits that are looked through one by one where one of them may be of use */

/* The `wanted` best of logits, best first, of equals the first; returns how many there are. */
int32_t ft_best_of(const float *logits, int32_t count, int32_t wanted, int32_t *places) {
    int32_t size = 0;
    float least = -INFINITY;
    for (int32_t first = 0; first < count; first += SLICE) {
        int32_t end = first + SLICE < count ? first + SLICE : count;
        if (size == wanted && !(ft_chosen()->top(logits + first, end - first) > least))
            continue;
        for (int32_t i = first; i < end; i++) {
            if (size == wanted ? !(logits[i] > least) : isnan(logits[i]))
                continue;
            int32_t place = size < wanted ? size++ : size - 1;
            for (; place > 0 && logits[places[place - 1]] < logits[i]; place--)
                places[place] = places[place - 1];
            places[place] = i;
            least = logits[places[size - 1]];
        }
    }
    return size;
}

typedef struct {
    const float *logits;
    int64_t stride;
    int32_t rows, length, wanted;
    float *values;
    int32_t *places;
    float *log_sums;
} best_job;

static void best_work(ft_team *team, int thread, void *argument) {
    const best_job *job = argument;
    const int32_t wanted = job->wanted;
    for (int32_t row; (row = ft_next(team, thread, job->rows)) < job->rows;) {
        const float *logits = job->logits + row * job->stride;
        float *values = job->values + (int64_t)row * wanted;
        int32_t *places = job->places + (int64_t)row * wanted;
        int32_t found = ft_best_of(logits, job->length, wanted, places);
        for (int32_t i = 0; i < wanted; i++) {
            places[i] = i < found ? places[i] : 0;
            values[i] = i < found ? logits[places[i]] : NAN;
        }
        if (!job->log_sums)
            continue;
        float highest = values[0];
        if (!isinf(highest))
            highest += logf(ft_chosen()->sum_above(logits, job->length, highest));
        job->log_sums[row] = highest;
    }
}

EXPORT int32_t ft_best(const float *logits, int64_t stride, int32_t rows, int32_t length,
                       int32_t wanted, float *values, int32_t *places, float *log_sums,
                       int32_t threads) {
    if (rows < 0 || wanted < 1 || wanted > length)
        return FT_MISFIT;
    best_job job = {logits, stride, rows, length, wanted, values, places, log_sums};
    threads = threads < 1 ? 1 : threads > rows ? rows : threads;
    ft_run(best_work, &job, threads > MOST_THREADS ? MOST_THREADS : threads);
    return FT_DONE;
}

EXPORT void ft_masked(const float *logits, const uint8_t *allowed, int32_t length, float *out) {
    for (int32_t i = 0; i < length; i++)
        out[i] = allowed[i] ? logits[i] : -INFINITY;
}

#define PART 256 /* weights whose sum is taken for itself */

static double sum_of(const float *weights, int32_t count) {
    double sums[8] = {0};
    int32_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; j++)
            sums[j] += weights[i + j];
    for (; i < count; i++)
        sums[0] += weights[i];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

EXPORT int32_t ft_draw(const float *weights, int32_t length, double u) {
    double total = 0, before = 0;
    int32_t last = -1;
    for (int32_t first = 0; first < length; first += PART)
        total += sum_of(weights + first, first + PART < length ? PART : length - first);
    if (!(total > 0) || isinf(total))
        return -1;
    const double wanted = u * total;
    for (int32_t first = 0; first < length; first += PART) {
        int32_t count = first + PART < length ? PART : length - first;
        double with = before + sum_of(weights + first, count), reached = before;
        if (with > wanted)
            for (int32_t i = first; i < first + count; i++) {
                reached += weights[i];
                if (reached > wanted)
                    return i;
            }
        before = with;
    }
    for (int32_t i = 0; i < length; i++) /* the product was rounded up to the total */
        last = weights[i] != 0 ? i : last;
    return last;
}

/* --- the fewest that hold a share */

#define LEVELS 1024 /* equal steps of logits below the highest */
#define NEAR 8      /* nats below the highest that mostly hold the share: then levels are narrow */
#define FAR 24
#define CLOSE 2e-6  /* shares that sums in single precision may not tell apart: they err by 4e-7 */

/* Logits by level: how many, and the sum of their exponentials. */
typedef struct {
    int32_t count[LEVELS];
    double mass[LEVELS];
} levels;

static int falling(const void *one, const void *other) {
    float a = *(const float *)one, b = *(const float *)other;
    return (a < b) - (a > b);
}

/* The sum of exponentials of logits less the highest. */
static double whole_sum(const float *logits, int32_t length, float highest) {
    float chances[SLICE];
    double sum = 0;
    for (int32_t first = 0; first < length; first += SLICE) {
        int32_t count = first + SLICE < length ? SLICE : length - first;
        ft_chosen()->exponentials(logits + first, count, highest, chances);
        sum += sum_of(chances, count);
    }
    return sum;
}

static int32_t level_of(float logit, float highest, float reach) {
    float level = (highest - logit) * (LEVELS / reach);
    return level < LEVELS ? (int32_t)level : LEVELS; /* LEVELS: lower than all of them */
}

static void count_levels(const float *logits, int32_t length, float highest, float reach,
                         levels *of) {
    float chances[SLICE];
    memset(of, 0, sizeof *of);
    for (int32_t first = 0; first < length; first += SLICE) {
        int32_t count = first + SLICE < length ? SLICE : length - first;
        if (ft_chosen()->top(logits + first, count) < highest - reach)
            continue;
        ft_chosen()->exponentials(logits + first, count, highest, chances);
        for (int32_t i = 0; i < count; i++) {
            int32_t level = level_of(logits[first + i], highest, reach);
            if (level < LEVELS) {
                of->count[level]++;
                of->mass[level] += chances[i];
            }
        }
    }
}

/* The logits of one level, the highest first; returns how many. */
static int32_t list_level(const float *logits, int32_t length, float highest, float reach,
                          int32_t level, float *found) {
    int32_t count = 0;
    for (int32_t i = 0; i < length; i++)
        if (level_of(logits[i], highest, reach) == level)
            found[count++] = logits[i];
    qsort(found, (size_t)count, sizeof(float), falling);
    return count;
}

/* The lowest logit that is kept; -INFINITY: some that are kept lie beyond `reach` of the highest;
   NAN: it is not certain. */
static float lowest_kept(const float *logits, int32_t length, float highest, float reach,
                         double wanted, double close) {
    levels of;
    double before = 0;
    int32_t level = 0;
    count_levels(logits, length, highest, reach, &of);
    while (level < LEVELS && before + of.mass[level] < wanted)
        before += of.mass[level++];
    if (level == LEVELS)
        return -INFINITY;
    float lowest = NAN, *own = malloc(4 * (size_t)of.count[level]);
    if (!own)
        return NAN;
    int32_t count = list_level(logits, length, highest, reach, level, own);
    for (int32_t i = 0; i < count; i++) {
        double with = before + exp((double)own[i] - highest);
        if (with >= wanted) {
            int certain = wanted - before > close && with - wanted > close;
            /* Of equal ones, which are of one level, it depends on how they are sorted. */
            if (certain && (i + 1 == count || own[i] > own[i + 1]))
                lowest = own[i];
            break;
        }
        before = with;
    }
    free(own);
    return lowest;
}

EXPORT int32_t ft_nucleus(const float *logits, int32_t length, double share, float *kept) {
    const float highest = ft_chosen()->top(logits, length);
    if (isinf(highest) || isnan(highest))
        return 0;
    const double total = whole_sum(logits, length, highest);
    if (!(total >= 1) || isinf(total))
        return 0;
    float lowest = lowest_kept(logits, length, highest, NEAR, share * total, CLOSE * total);
    if (lowest == -INFINITY)
        lowest = lowest_kept(logits, length, highest, FAR, share * total, CLOSE * total);
    if (!isfinite(lowest))
        return 0;
    for (int32_t i = 0; i < length; i++)
        kept[i] = logits[i] >= lowest ? logits[i] : -INFINITY;
    return 1;
}
