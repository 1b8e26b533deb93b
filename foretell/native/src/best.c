/* The best entries of rows of logits. */

#include "foretell_native.h"
#include "pool.h"

#include <math.h>

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
        float highest = values[0];
        if (!isinf(highest))
            highest += logf(ft_chosen()->sum_above(logits, job->length, highest));
        job->log_sums[row] = highest;
    }
}

EXPORT void ft_best(const float *logits, int64_t stride, int32_t rows, int32_t length,
                    int32_t wanted, float *values, int32_t *places, float *log_sums,
                    int32_t threads) {
    best_job job = {logits, stride, rows, length, wanted, values, places, log_sums};
    threads = threads < 1 ? 1 : threads > rows ? rows : threads;
    ft_run(best_work, &job, threads > MOST_THREADS ? MOST_THREADS : threads);
}
