#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

#define PATIENCE 4096     /* looks at a barrier before the processor is offered to others */
#define AWAKE_NS 2000000  /* how long a thread without work looks for some before it sleeps */

struct ft_team {
    int size;
    ft_work work;
    void *argument;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int phase;
    struct {
        _Alignas(64) atomic_int taken; /* tasks of a thread's share that were given out */
    } share[MOST_THREADS];
    _Alignas(64) atomic_int job;      /* counts jobs: a new number is a call to work */
    _Alignas(64) atomic_int finished; /* threads that are through with it */
    atomic_int sleeping;
    pthread_mutex_t sleep_lock;
    pthread_cond_t wake;
    int started; /* threads that exist, the callers' aside */
};

static ft_team team = {.sleep_lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};
static pthread_mutex_t running = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

int ft_team_size(const ft_team *t) { return t->size; }

int32_t ft_next(ft_team *t, int thread, int32_t total) {
    for (int i = 0; i < t->size; i++) {
        int owner = (thread + i) % t->size;
        int32_t begin = (int32_t)((int64_t)total * owner / t->size);
        int32_t end = (int32_t)((int64_t)total * (owner + 1) / t->size);
        if (atomic_load_explicit(&t->share[owner].taken, memory_order_relaxed) >= end - begin)
            continue;
        int32_t task = begin + atomic_fetch_add_explicit(&t->share[owner].taken, 1,
                                                         memory_order_relaxed);
        if (task < end)
            return task;
    }
    return total;
}

static void deal_again(ft_team *t) {
    for (int i = 0; i < t->size; i++)
        atomic_store_explicit(&t->share[i].taken, 0, memory_order_relaxed);
}

void ft_barrier(ft_team *t) {
    if (t->size == 1) {
        deal_again(t);
        return;
    }
    int phase = atomic_load_explicit(&t->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) == t->size - 1) {
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        deal_again(t);
        atomic_store_explicit(&t->phase, phase + 1, memory_order_release);
        return;
    }
    for (int looks = 0; atomic_load_explicit(&t->phase, memory_order_acquire) == phase; looks++) {
        if (looks < PATIENCE)
            RELAX();
        else
            sched_yield();
    }
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Waits for a job after number `seen`; returns its number. */
static int await_job(ft_team *t, int seen) {
    int64_t until = nanoseconds() + AWAKE_NS;
    do {
        for (int looks = 0; looks < 64; looks++) {
            int job = atomic_load_explicit(&t->job, memory_order_acquire);
            if (job != seen)
                return job;
            RELAX();
        }
    } while (nanoseconds() < until);
    pthread_mutex_lock(&t->sleep_lock);
    atomic_fetch_add(&t->sleeping, 1);
    int job;
    while ((job = atomic_load(&t->job)) == seen)
        pthread_cond_wait(&t->wake, &t->sleep_lock);
    atomic_fetch_sub(&t->sleeping, 1);
    pthread_mutex_unlock(&t->sleep_lock);
    return job;
}

typedef struct {
    int thread, seen;
} start;

static void *serve(void *argument) {
    start begin = *(start *)argument;
    free(argument);
    for (int seen = begin.seen;;) {
        seen = await_job(&team, seen);
        if (begin.thread < team.size)
            team.work(&team, begin.thread, team.argument);
        atomic_fetch_add_explicit(&team.finished, 1, memory_order_release);
    }
    return NULL;
}

static void hire(int threads) {
    while (team.started < threads - 1) {
        pthread_t thread;
        start *begin = malloc(sizeof *begin);
        if (!begin)
            return;
        *begin = (start){team.started + 1, atomic_load(&team.job)};
        if (pthread_create(&thread, NULL, serve, begin)) {
            free(begin);
            return;
        }
        pthread_detach(thread);
        team.started++;
    }
}

/* A forked child has none of its parent's threads. */
static void forget(void) {
    team = (ft_team){.sleep_lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};
    running = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

static void prepare_forks(void) { pthread_atfork(NULL, NULL, forget); }

void ft_run(ft_work work, void *argument, int threads) {
    pthread_once(&once, prepare_forks);
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    pthread_mutex_lock(&running);
    hire(threads);
    team.size = threads <= team.started + 1 ? threads : team.started + 1;
    team.work = work;
    team.argument = argument;
    deal_again(&team);
    atomic_store(&team.finished, 0);
    if (team.size > 1) {
        atomic_fetch_add(&team.job, 1);
        if (atomic_load(&team.sleeping)) {
            pthread_mutex_lock(&team.sleep_lock);
            pthread_cond_broadcast(&team.wake);
            pthread_mutex_unlock(&team.sleep_lock);
        }
    }
    work(&team, 0, argument);
    if (team.size > 1)
        for (int looks = 0; atomic_load_explicit(&team.finished, memory_order_acquire) <
                            team.started;
             looks++) {
            if (looks < PATIENCE)
                RELAX();
            else
                sched_yield();
        }
    pthread_mutex_unlock(&running);
}
